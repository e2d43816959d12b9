r"""Finding and comparing final answers in mathematical text: `\boxed{…}`, `#### 42`, or the last number.

Numbers are compared as numbers without any library; only what is not a plain number goes to math-verify, whose parser
takes milliseconds. Assumes that a completion is text, not code.
"""

from __future__ import annotations

import re
import threading
from decimal import Decimal, InvalidOperation

from grpo_engine.errors import ConfigError

_NUMBER = re.compile(r"(?<![\w.])[-−]?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_MAX_EXPRESSION = 400
"""Characters of an expression that are parsed: a model's endless box must not hold up its environment."""
_PARSE_SECONDS = 2


def final_answer(text: str) -> str | None:
    r"""The answer that a text arrives at: the last `\boxed{…}`, what follows `####`, else its last number."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    if "####" in text:
        after = text.rsplit("####", 1)[1].strip()
        if after:
            return after.splitlines()[0].strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def is_same_answer(expected: str, given: str) -> bool:
    """Whether two answers are equal: as text, as numbers, or as expressions (math-verify).

    Raises:
        ConfigError: the comparison needs math-verify, and that is not installed.
    """
    left, right = _normal(expected), _normal(given)
    if left == right:
        return True
    numbers = _number(left), _number(right)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    return _is_same_expression(expected, given)


def _last_boxed(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    begin = start + len(r"\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def _normal(answer: str) -> str:
    return answer.strip().strip("$").rstrip(".").replace(",", "").replace("$", "").replace("−", "-").strip()


def _number(text: str) -> Decimal | None:
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _is_same_expression(expected: str, given: str) -> bool:
    if len(expected) > _MAX_EXPRESSION or len(given) > _MAX_EXPRESSION:
        return False
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ConfigError(
            f"comparing {expected!r} with {given!r} needs math-verify: install the `data` extra, "
            "or use task.reward = 'exact'"
        ) from None
    # Its time limits are alarms, which only the main thread can set.
    limit = _PARSE_SECONDS if threading.current_thread() is threading.main_thread() else None
    gold = parse(f"${expected}$", parsing_timeout=limit)
    answer = parse(f"${given}$", parsing_timeout=limit)
    return bool(verify(gold, answer, timeout_seconds=limit))
