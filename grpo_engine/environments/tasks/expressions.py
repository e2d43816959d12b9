"""Compares mathematical expressions by math-verify, in a confined process with a time limit.

math-verify limits its time by alarms, which work only in a main thread, and some expressions
(`\\sum_{n=1}^{10^9} n^{0.5}`) never finish, or fill the memory. In the environment's process they would block every
other group.
"""

from __future__ import annotations

import importlib.util
from functools import cache

from grpo_engine.environments.tasks.confined.client import ConfinedScorers, NotScored
from grpo_engine.environments.tasks.confined.process import Scorer
from grpo_engine.errors import ConfigError, PeerError

_LIMIT_S = 2
"""Time limit for parsing each expression, and for comparing them."""
_FIRST_LIMIT_S = 30
"""For one of our own, which is parsed before there are answers."""


def is_same_expression(expected: str, given: str) -> bool:
    """Whether two LaTeX expressions are equal; False on a time-out.

    Raises:
        ConfigError: math-verify is not installed.
        PeerError: the process does not start.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"comparing {expected!r} with {given!r} needs math-verify: install the `data` extra, "
            "or use task.reward = 'exact'"
        )
    try:
        return bool(verifier().score("", given, expected))
    except NotScored:
        return False
    except PeerError as error:
        raise PeerError(f"math-verify: {error}, or use task.reward = 'exact'") from None


@cache
def verifier() -> ConfinedScorers:
    """The process. Of an answer math-verify evaluates arithmetic alone, so it is used unconfined too."""
    return ConfinedScorers(__name__, must_confine=False)


def load_scorer(setting: str) -> Scorer:
    """Comparison of two expressions: 1 where they are equal."""
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs "Timeout during comparison" for wrong answers
    # The first one makes tables that every worker shares: 0.1 s of CPU, for which a busy machine took a worker's 2 s.
    parse(r"$\frac{1}{2}$", parsing_timeout=_FIRST_LIMIT_S)

    def compare(given: str, expected: str) -> float:
        gold = parse(f"${expected}$", parsing_timeout=_LIMIT_S)
        answer = parse(f"${given}$", parsing_timeout=_LIMIT_S)
        return float(verify(gold, answer, timeout_seconds=_LIMIT_S))

    return compare
