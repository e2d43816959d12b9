"""Rounding at random: unbiased, between the two neighbours, and nothing is moved that need not be."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_engine.models import rounding
from grpo_engine.models.rounding import add_rounded_, round_to_bf16_

TRIALS = 40_000


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("fraction", [1 / 65536, 0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("below", [1.0, -1.0, 0.0195, -3e38, 1e-30, 1e-40, -1e-39], ids=str)
def test_each_neighbour_is_taken_with_the_probability_that_makes_rounding_unbiased(
    below: float, fraction: float
) -> None:
    low = torch.tensor(below).to(torch.bfloat16).float()
    bits = low.view(torch.int32)
    high = (bits + rounding.LOWER_HALF).view(torch.float32)  # the neighbour further from zero; also of subnormals
    value = (bits + int(fraction * rounding.LOWER_HALF)).view(torch.float32)
    rounded = round_to_bf16_(value.repeat(TRIALS))
    went_up = rounded == high
    assert bool((went_up | (rounded == low)).all())
    deviation = math.sqrt(fraction * (1 - fraction) / TRIALS)
    assert went_up.double().mean().item() == pytest.approx(fraction, abs=5 * deviation)


def test_numbers_that_bf16_can_represent_stay() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for _ in range(20):
        rounded = round_to_bf16_(every.float()).to(torch.bfloat16)
        assert torch.equal(rounded.view(torch.int16)[~every.isnan()], every.view(torch.int16)[~every.isnan()])
        assert bool(rounded[every.isnan()].isnan().all())


def test_nan_stays_nan_whatever_its_lower_bits() -> None:
    bits = [0x7F800001, 0x7F80FFFF, 0x7FFFFFFF, -0x7FFFFF, -1]  # -1: all bits set; a carry would make 0 of it
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32).repeat(1000)
    assert bool(round_to_bf16_(values).isnan().all())


def test_values_beyond_the_largest_number_become_infinity_and_infinity_stays() -> None:
    largest = torch.finfo(torch.float32).max  # the next bf16 number upwards would be 2 ** 128
    rounded = round_to_bf16_(torch.tensor([largest, -largest, math.inf, -math.inf]).repeat(100, 1).contiguous())
    assert rounded[:, 0].unique().tolist()[-1] == math.inf
    assert rounded[:, 1].unique().tolist()[0] == -math.inf
    assert rounded[:, 2:].unique().tolist() == [-math.inf, math.inf]


def test_the_same_state_of_the_generator_gives_the_same_rounding() -> None:
    values = torch.randn(1000)
    state = torch.get_rng_state()
    once = round_to_bf16_(values.clone())
    again = round_to_bf16_(values.clone())
    torch.set_rng_state(state)
    assert torch.equal(round_to_bf16_(values.clone()), once)
    assert not torch.equal(again, once)


def test_a_large_parameter_may_be_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "ROUNDED_AT_ONCE", 7)
    values = torch.randn(5, 9)
    rounded = round_to_bf16_(values.clone())
    assert torch.equal(rounded, rounded.to(torch.bfloat16).float())
    assert bool(((rounded - values).abs() <= values.abs() / 128).all())


def test_a_sum_that_bf16_can_represent_is_exact_for_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "ROUNDED_AT_ONCE", 7)
    total = torch.arange(45.0).view(5, 9).bfloat16()
    addend = torch.arange(45.0).view(9, 5).T.bfloat16()  # not contiguous
    expected = total.float() + addend.float()
    assert add_rounded_(total, addend) is total
    assert torch.equal(total.float(), expected)


def test_sums_that_are_not_finite_stay_so() -> None:
    total = torch.tensor([math.inf, 1.0, math.inf, math.nan]).bfloat16()
    add_rounded_(total, torch.tensor([1.0, -math.inf, -math.inf, 1.0]).bfloat16())
    assert total[:2].tolist() == [math.inf, -math.inf]
    assert bool(total[2:].isnan().all())
