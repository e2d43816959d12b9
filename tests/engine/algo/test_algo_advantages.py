"""Group advantages and the overlong penalty (DAPO, eq. 13) against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_engine.algo.advantages import Baseline, Scale, equal_groups, group_advantages, overlong_penalty

torch.set_num_threads(1)
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 5.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 7, 7, -3, -3])


@pytest.mark.parametrize(
    ("scale", "ddof", "baseline", "expected"),
    [
        ("none", 1, "mean", [0.5, -0.5, -0.5, 0.5, -1.5, 1.5]),
        ("none", 1, "leave_one_out", [2 / 3, -2 / 3, -2 / 3, 2 / 3, -3.0, 3.0]),
        ("group", 0, "mean", [1.0, -1.0, -1.0, 1.0, -1.0, 1.0]),
        (
            "group",
            1,
            "mean",
            [sign * 0.5 / math.sqrt(1 / 3) for sign in (1, -1, -1, 1)] + [-1 / math.sqrt(2), 1 / math.sqrt(2)],
        ),
        # The rewards' own mean is 1.5, their squared distances sum to 17.5.
        ("batch", 1, "mean", [a / math.sqrt(17.5 / 5) for a in (0.5, -0.5, -0.5, 0.5, -1.5, 1.5)]),
        ("batch", 0, "mean", [a / math.sqrt(17.5 / 6) for a in (0.5, -0.5, -0.5, 0.5, -1.5, 1.5)]),
    ],
)
def test_advantages_are_the_hand_worked_ones(
    scale: Scale, ddof: int, baseline: Baseline, expected: list[float]
) -> None:
    advantages = group_advantages(REWARDS, GROUPS, scale=scale, ddof=ddof, epsilon=0.0, baseline=baseline)
    assert advantages.tolist() == pytest.approx(expected)


def test_the_defaults_divide_by_the_unbiased_deviation_plus_epsilon() -> None:
    rewards = torch.tensor([0.0, 1.0])
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert group_advantages(rewards, torch.tensor([0, 0])).tolist() == pytest.approx([-expected, expected])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_group_of_equal_rewards_gets_exact_zeros(scale: Scale, baseline: Baseline, dtype: torch.dtype) -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.3], dtype=dtype)  # the mean of three 0.1 is not 0.1
    advantages = group_advantages(rewards, torch.tensor([1, 1, 1, 2, 2]), scale=scale, epsilon=0.0, baseline=baseline)
    assert advantages.dtype is dtype
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert advantages[3] > 0 > advantages[4]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_a_group_of_one_has_nothing_to_be_compared_with(scale: Scale, baseline: Baseline, ddof: int) -> None:
    rewards = torch.tensor([5.0, 1.0, 0.0])
    advantages = group_advantages(rewards, torch.tensor([0, 1, 1]), scale=scale, ddof=ddof, baseline=baseline)
    assert advantages[0].item() == 0.0
    assert torch.isfinite(advantages).all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_the_order_of_the_rows_does_not_matter(scale: Scale, baseline: Baseline) -> None:
    random = torch.Generator().manual_seed(1)
    rewards = torch.randn(24, generator=random)
    groups = torch.arange(24) // 4 * 10_000_000_000
    order = torch.randperm(24, generator=random)
    advantages = group_advantages(rewards, groups, scale=scale, baseline=baseline)
    assert torch.equal(
        group_advantages(rewards[order], groups[order], scale=scale, baseline=baseline), advantages[order]
    )


def test_no_rewards_are_no_advantages() -> None:
    no_ids = torch.zeros(0, dtype=torch.int64)
    assert group_advantages(torch.zeros(0), no_ids).shape == (0,)
    assert [part.shape for part in equal_groups(torch.zeros(0), no_ids)] == [(0,), (0,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_groups_whose_rewards_are_all_equal_are_found(dtype: torch.dtype) -> None:
    rewards = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1, 5.0], dtype=dtype)
    is_equal, group = equal_groups(rewards, torch.tensor([7, -3, 7, -3, 7, 9]))
    assert is_equal.tolist() == [False, True, True]  # groups -3, 7 and 9, the last of which has one member
    assert group.tolist() == [1, 0, 1, 0, 1, 2]
    assert is_equal[group].tolist() == [True, False, True, False, True, True]


def test_an_unscored_completion_does_not_make_a_group_equal() -> None:
    is_equal, _ = equal_groups(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))
    assert is_equal.tolist() == [False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": torch.tensor([1, 0])}, "expected .B,. of a float dtype"),
        ({"group_ids": torch.tensor([0])}, "one integer for each of the 2 rewards"),
        ({"group_ids": torch.tensor([0.0, 0.0])}, "one integer for each"),
        ({"scale": "std"}, "scale = 'std': choose one of group, batch, none"),
        ({"baseline": "median"}, "choose one of mean, leave_one_out"),
        ({"ddof": 2}, "ddof = 2"),
        ({"epsilon": -1.0}, "epsilon = -1.0"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"rewards": torch.tensor([1.0, 0.0]), "group_ids": torch.tensor([0, 0])}
    with pytest.raises(ValueError, match=message):
        group_advantages(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("max_length", "buffer", "penalties"),
    [
        (100, 20, {0: 0, 79: 0, 80: 0, 81: -0.05, 90: -0.5, 99: -0.95, 100: -1, 101: -1, 500: -1}),
        (20480, 4096, {16384: 0, 18432: -0.5, 20480: -1}),
        (10, 0, {9: 0, 10: 0, 11: -1}),
    ],
    ids=["full beyond the buffer", "the paper's numbers", "no buffer"],
)
def test_the_penalty_grows_along_the_buffer(max_length: int, buffer: int, penalties: dict[int, float]) -> None:
    measured = overlong_penalty(torch.tensor(list(penalties)), max_length=max_length, buffer=buffer)
    assert measured.tolist() == pytest.approx(list(penalties.values()))


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
