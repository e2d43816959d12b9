"""The overlong penalty against DAPO's equation 13."""

from __future__ import annotations

import pytest
import torch

from grpo_engine.algo.advantages import group_advantages
from grpo_engine.algo.shaping import overlong_penalty


def test_the_penalty_grows_along_the_buffer_and_stays_full_beyond_it() -> None:
    lengths = torch.tensor([0, 79, 80, 81, 90, 99, 100, 101, 500])
    expected = [0, 0, 0, -0.05, -0.5, -0.95, -1, -1, -1]
    assert overlong_penalty(lengths, max_length=100, buffer=20).tolist() == pytest.approx(expected)


def test_the_papers_own_numbers_punish_between_16384_and_20480_tokens() -> None:
    lengths = torch.tensor([16384, 18432, 20480])
    assert overlong_penalty(lengths, max_length=20480, buffer=4096).tolist() == [0.0, -0.5, -1.0]


def test_without_a_buffer_only_what_is_longer_is_punished() -> None:
    assert overlong_penalty(torch.tensor([9, 10, 11]), max_length=10, buffer=0).tolist() == [0.0, 0.0, -1.0]


def test_the_penalty_is_of_a_float_dtype_and_never_a_negative_zero() -> None:
    penalty = overlong_penalty(torch.tensor([1, 5]), max_length=10, buffer=5)
    assert penalty.dtype is torch.float32
    assert overlong_penalty(torch.tensor([1.0], dtype=torch.float64), max_length=10, buffer=5).dtype is torch.float64
    assert str(penalty.tolist()) == "[0.0, 0.0]"


@pytest.mark.parametrize("buffer", [-1, 11])
def test_a_buffer_that_does_not_fit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"buffer = {buffer} with max_length = 10: must be 0 to max_length tokens"):
        overlong_penalty(torch.tensor([1]), max_length=10, buffer=buffer)


def test_the_penalty_lowers_a_reward_against_its_group() -> None:
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    penalty = overlong_penalty(torch.tensor([5, 10]), max_length=10, buffer=5)
    assert group_advantages(rewards + penalty, groups, scale="none").tolist() == [1.0, -1.0]
