"""Evaluation: the estimators against enumeration, and what becomes of the answers of several environments."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_engine.algo.evaluation import avg_at_k, ks_up_to, over_prompts, pass_at_k

prompts = st.integers(1, 8).flatmap(
    lambda num: st.lists(st.lists(st.booleans(), min_size=num, max_size=num), min_size=1, max_size=5)
)


@given(prompts, st.data())
def test_pass_at_k_is_the_share_of_all_k_subsets_that_hold_a_solution(
    solved: list[list[bool]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(solved[0])))
    by_hand = [
        sum(map(any, itertools.combinations(row, k))) / math.comb(len(row), k)  # every subset, one by one
        for row in solved
    ]
    assert pass_at_k(torch.tensor(solved), k).tolist() == pytest.approx(by_hand, abs=1e-12)


@given(prompts)
def test_pass_at_1_is_the_share_that_is_solved_and_pass_at_all_is_whether_any_is(solved: list[list[bool]]) -> None:
    values = torch.tensor(solved)
    assert pass_at_k(values, 1).tolist() == pytest.approx(values.double().mean(1).tolist())
    assert pass_at_k(values, len(solved[0])).tolist() == [float(any(row)) for row in solved]


@given(prompts)
def test_pass_at_k_never_falls_with_k_and_stays_between_0_and_1(solved: list[list[bool]]) -> None:
    values = torch.tensor(solved)
    curve = torch.stack([pass_at_k(values, k) for k in range(1, len(solved[0]) + 1)])
    assert bool((curve.diff(dim=0) >= -1e-12).all())
    assert bool(((curve >= 0) & (curve <= 1)).all())


def test_pass_at_k_of_ten_thousand_completions_does_not_overflow() -> None:
    solved = torch.zeros(1, 10_000, dtype=torch.bool)
    solved[0, :3] = True
    exact = 1 - math.comb(9_997, 5_000) / math.comb(10_000, 5_000)
    assert float(pass_at_k(solved, 5_000)[0]) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_a_k_that_cannot_be_estimated_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=rf"pass@{k} of 4 completions: k must be between 1 and 4"):
        pass_at_k(torch.zeros(2, 4, dtype=torch.bool), k)


def test_errors_go_over_prompts_and_not_over_completions() -> None:
    means = avg_at_k(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))
    assert means.tolist() == [0.5, 1.0, 0.0]
    estimate = over_prompts(means)
    assert float(estimate.mean) == 0.5
    assert float(estimate.standard_error) == pytest.approx(0.5 / math.sqrt(3))  # standard deviation 0.5 of 3 prompts


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=6), st.integers(2, 4))
def test_more_completions_that_repeat_each_other_make_no_error_smaller(rewards: list[float], times: int) -> None:
    once = over_prompts(avg_at_k(torch.tensor(rewards)[:, None]))
    often = over_prompts(avg_at_k(torch.tensor(rewards)[:, None].expand(-1, times)))
    assert float(often.standard_error) == pytest.approx(float(once.standard_error), abs=1e-9)


def test_one_prompt_has_no_error_to_tell() -> None:
    assert math.isnan(float(over_prompts(torch.tensor([0.5])).standard_error))


@pytest.mark.parametrize(("num_samples", "ks"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_the_ks_that_are_told(num_samples: int, ks: list[int]) -> None:
    assert ks_up_to(num_samples) == ks
