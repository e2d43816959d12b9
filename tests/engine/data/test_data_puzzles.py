"""The puzzles: what is asked, what is right, and what a partly right answer earns."""

from __future__ import annotations

import random

import pytest

from grpo_engine.data.puzzles import make_item, score, stated_result
from grpo_engine.errors import ConfigError


def test_the_answer_belongs_to_the_question_and_the_same_seed_makes_the_same_item() -> None:
    rng = random.Random(3)
    for _ in range(50):
        for task, answer_of in (
            ("sort6", lambda d: "".join(sorted(d))),
            ("copy6", str),
            ("reverse6", lambda d: d[::-1]),
        ):
            question, answer = make_item(task, rng)
            verb, digits = question.split()
            assert verb == task[:-1]
            assert len(digits) == 6
            assert answer == answer_of(digits)
        question, answer = make_item("arithmetic", rng, difficulty=2)
        _, _, left, _, right, *_ = question.replace("?", "").split()
        assert 10 <= int(left) <= 99
        assert int(left) + int(right) == int(answer)
    for task in ("sort6", "copy6", "reverse6", "arithmetic"):
        assert make_item(task, random.Random(7)) == make_item(task, random.Random(7))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("123456", 1.0),
        (" 123456\n", 1.0),
        ("123465", 4 / 6),
        ("12345", 5 / 6),
        ("1234567", 6 / 7),
        ("x123456", 0.0),
        ("", 0.0),
        ("123456" * 2, 0.5),
    ],
)
def test_a_string_earns_the_share_of_positions_that_are_right(completion: str, reward: float) -> None:
    assert score("copy6", "123456", completion) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("7", 1.0),
        (" 7.", 1.0),
        ("It is 7, I think", 1.0),
        ("07", 1.0),
        ("-7", 0.0),
        ("3 + 4 = 7", 1.0),
        ("3 + 4 = 7 = 7 because", 1.0),
        ("3 + 4 = 8, and 7 is a number", 0.0),
        ("3 + 4 equals 7", 1.0),
        ("7, or 8", 0.0),
        ("3 + 4 = ?", 0.0),
        ("seven", 0.0),
        ("", 0.0),
        ("7" * 5000, 0.0),
    ],
)
def test_a_sum_is_right_when_its_stated_result_is(completion: str, reward: float) -> None:
    assert score("arithmetic", "7", completion) == reward


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,234", 1234), ("1,2", 2), ("12,345,678.", 12345678), ("5-3", 3), ("a−3", 3), ("−3", -3), ("none", None)],
)
def test_integers_are_read_as_people_write_them(text: str, value: int | None) -> None:
    assert stated_result(text) == value


def test_an_unknown_puzzle_and_a_difficulty_without_digits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'sort' is not a puzzle.*did you mean 'sort6'"):
        make_item("sort", random.Random(0))
    with pytest.raises(ConfigError, match="difficulty 0"):
        make_item("arithmetic", random.Random(0), difficulty=0)
