r"""Finds and compares final answers in mathematical text: `\boxed{…}`, `#### 42`, or the last number.

Plain numbers are compared directly; other expressions go to math-verify, whose parser takes milliseconds. Assumes that
a completion is text, not code.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_NUMBER = re.compile(r"(?<![\w.])[-−]?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_AFTER_HASHES = re.compile(r"####(.*)")
_ANSWER_BEGINS = re.compile(r"[*$({\[−+-]*(?:\d|\\)")
_NO_PART_OF_A_NUMBER = ("{,}", r"\,", r"\!", r"\$", ",", "$", "**")
r"""As in `1{,}234`, `1\,234`, `\$5` and `**5**`; the longer ones first."""
_MAX_EXPRESSION = 400
"""Longest expression that is parsed, in characters: a longer one would block its environment."""


def final_answer(text: str) -> str | None:
    r"""The final answer of a text: the last `\boxed{…}`, what follows `####`, else its last number."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    hashed = _after_hashes(text)
    if hashed is not None:
        return hashed
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def is_same_answer(expected: str, given: str) -> bool:
    """Whether two answers are equal: as text, as numbers, or as expressions (math-verify).

    Raises:
        ConfigError: the comparison needs math-verify, which is not installed.
        PeerError: math-verify does not load.
    """
    left, right = _normal(expected), _normal(given)
    if left == right:
        return True
    numbers = _number(left), _number(right)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    if len(expected) > _MAX_EXPRESSION or len(given) > _MAX_EXPRESSION:
        return False
    from grpo_engine.environments.tasks.expressions import is_same_expression  # imported late: loads subprocess

    return is_same_expression(expected, given)


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}`; None if there is none, or it is not closed."""
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


def _after_hashes(text: str) -> str | None:
    """The text after the last `####` that is not a Markdown heading (`#### Step 1`)."""
    lines: list[str] = [line.strip() for line in _AFTER_HASHES.findall(text)]
    answers = [line for line in lines if _ANSWER_BEGINS.match(line)]
    if answers:
        return answers[-1]
    return lines[-1] if lines and lines[-1] and text.rstrip().endswith(lines[-1]) else None


def _normal(answer: str) -> str:
    for mark in _NO_PART_OF_A_NUMBER:
        answer = answer.replace(mark, "")
    return answer.strip().rstrip(".").replace("−", "-").strip()


def _number(text: str) -> Decimal | None:
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
