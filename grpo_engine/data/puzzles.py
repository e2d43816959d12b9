"""Four small puzzles with a known answer: generation and scoring.

Three ask for six characters (`sort6`, `copy6`, `reverse6`), so that a reward can be partial and a model of a few
hundred thousand parameters has something to learn within minutes; `arithmetic` asks for a sum. Pure and free of torch:
the built-in tasks wrap these functions, and the locally made models take their warm-up data from them.
"""

from __future__ import annotations

import random
import re
from enum import StrEnum
from typing import NamedTuple, assert_never

from grpo_engine.config import did_you_mean
from grpo_engine.errors import ConfigError

NUM_DIGITS = 6
"""Length of a puzzle's string of digits, and of its answer."""

MAX_ARITHMETIC_DIGITS = 12
"""Longest operand that `arithmetic` makes; models that are trained here learn nothing beyond it."""

_INTEGER = re.compile(r"((?<!\w)[-−])?(\d{1,3}(?:,\d{3})+(?!\d)|\d+)")
"""A sign counts only where a word begins: the dash of `5-3` is no minus sign of 3."""

_MAX_READ_DIGITS = 1000
"""Digits of a completion's number that are read; int() refuses more than 4300, and no answer is that long."""


class PuzzleTask(StrEnum):
    """The kinds of puzzle, by the name that a profile uses."""

    SORT6 = "sort6"
    COPY6 = "copy6"
    REVERSE6 = "reverse6"
    ARITHMETIC = "arithmetic"


class Puzzle(NamedTuple):
    """One question and the only answer that earns the full reward.

    >>> make_item("sort6", random.Random(0))
    Puzzle(question='sort 660487', answer='046678')
    """

    question: str
    answer: str


def make_item(task: PuzzleTask | str, rng: random.Random, *, difficulty: int = 1) -> Puzzle:
    """Draw one puzzle from `rng`; the same state of `rng` gives the same puzzle.

    Args:
        difficulty: number of digits of both operands of `arithmetic` (1: `3 + 4`); the others have one difficulty.

    Raises:
        ConfigError: no such task, or a difficulty outside 1 to `MAX_ARITHMETIC_DIGITS`.
    """
    kind = _task(task)
    if kind is PuzzleTask.ARITHMETIC:
        return _make_sum(rng, difficulty)
    digits = "".join(rng.choice("0123456789") for _ in range(NUM_DIGITS))
    match kind:
        case PuzzleTask.SORT6:
            return Puzzle(f"sort {digits}", "".join(sorted(digits)))
        case PuzzleTask.COPY6:
            return Puzzle(f"copy {digits}", digits)
        case PuzzleTask.REVERSE6:
            return Puzzle(f"reverse {digits}", digits[::-1])
        case _:
            assert_never(kind)


def score(task: PuzzleTask | str, answer: str, completion: str) -> float:
    """Reward of a completion, 0.0 to 1.0.

    `sort6`, `copy6`, `reverse6`: the share of positions that hold the right character, of the longer of the two
    strings: a missing character is a wrong one, and each extra character makes the denominator larger (`1234567` for
    `123456` earns 6/7). White space around the completion does not count.
    `arithmetic`: 1.0 when the stated result is the answer, else 0.0 (see `stated_result`).

    Raises:
        ConfigError: no such task.
    """
    kind = _task(task)
    if kind is PuzzleTask.ARITHMETIC:
        return float(stated_result(completion) == int(answer))
    text = completion.strip()
    num_right = sum(given == right for given, right in zip(text, answer, strict=False))
    return num_right / max(len(text), len(answer))


def stated_result(text: str) -> int | None:
    """The integer that `text` gives as its result; None when it holds none.

    That is the integer after the last equals sign that has one, else the last integer: `7`, ` It is 7.` and `3 + 4 = 7`
    all state 7. (Small instruct models restate the sum even when asked for the number only, and so the first integer
    is seldom what they answer.) Thousands commas are understood, and both kinds of minus sign.
    """
    for tail in reversed(text.split("=")[1:]):
        if found := _INTEGER.search(tail):
            return _value(found)
    integers = list(_INTEGER.finditer(text))
    return _value(integers[-1]) if integers else None


def _value(found: re.Match[str]) -> int:
    sign, digits = found.groups()
    value = int(digits.replace(",", "")[:_MAX_READ_DIGITS])
    return -value if sign else value


def _make_sum(rng: random.Random, num_digits: int) -> Puzzle:
    if not 1 <= num_digits <= MAX_ARITHMETIC_DIGITS:
        raise ConfigError(
            f"arithmetic: difficulty {num_digits} is not the number of digits of an operand: "
            f"use 1 to {MAX_ARITHMETIC_DIGITS}"
        )
    low, high = 10 ** (num_digits - 1), 10**num_digits - 1
    left, right = rng.randint(low, high), rng.randint(low, high)
    return Puzzle(f"What is {left} + {right}? Answer with the number only.", str(left + right))


def _task(task: PuzzleTask | str) -> PuzzleTask:
    try:
        return PuzzleTask(task)
    except ValueError:
        names = [member.value for member in PuzzleTask]
        raise ConfigError(f"{task!r} is not a puzzle: use {', '.join(names)}{did_you_mean(task, names)}") from None
