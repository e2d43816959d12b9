"""Comparing mathematical expressions by math-verify, in a process of its own that is ended when it takes too long.

Its time limits are alarms, which only a main thread can set, and some expressions (`\\sum_{n=1}^{10^9} n^{0.5}`) take
for ever. In the environment's own process they would hold up every other group.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import signal
import threading
from functools import cache
from multiprocessing.connection import Connection

from grpo_engine.errors import ConfigError

_LIMIT_S = 2
"""Seconds for reading each expression, and for comparing them."""
_PATIENCE_S = 3 * _LIMIT_S + 1
"""Seconds until the process is given up, because it answers to no alarm."""
_FIRST_PATIENCE_S = 60.0
"""The same while it loads its libraries."""


def is_same_expression(expected: str, given: str) -> bool:
    """Whether two expressions of LaTeX are equal; no where that cannot be found out in time.

    Raises:
        ConfigError: math-verify is not installed.
    """
    return _verifier().is_same(expected, given)


class _Verifier:
    """The process, and one question at a time to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._ours: Connection
        self._patience_s = 0.0

    def is_same(self, expected: str, given: str) -> bool:
        with self._lock:
            if self._process is None or not self._process.is_alive():
                self._start(expected, given)
            try:
                self._ours.send((expected, given))
                if self._ours.poll(self._patience_s):
                    self._patience_s = _PATIENCE_S
                    return bool(self._ours.recv())
            except (OSError, EOFError):  # it died of it, e.g. of memory
                pass
            self._end()
            return False

    def _start(self, expected: str, given: str) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                f"comparing {expected!r} with {given!r} needs math-verify: install the `data` extra, "
                "or use task.reward = 'exact'"
            )
        # Not forked: the environment has threads, and their locks would come along.
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._patience_s = _FIRST_PATIENCE_S

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.join()
        self._ours.close()
        self._process = None


@cache
def _verifier() -> _Verifier:
    return _Verifier()


def _answer(questions: Connection) -> None:
    """What the process does: compare until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, meant for the environment
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # "Timeout during comparison", of a wrong answer
    while True:
        try:
            expected, given = questions.recv()
        except EOFError:
            return
        gold = parse(f"${expected}$", parsing_timeout=_LIMIT_S)
        answer = parse(f"${given}$", parsing_timeout=_LIMIT_S)
        questions.send(bool(verify(gold, answer, timeout_seconds=_LIMIT_S)))
