"""Alignment metrics against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_engine.algo.alignment import alignment_metrics, row_staleness, staleness_metrics

torch.set_num_threads(1)


def test_differences_are_training_minus_inference_over_trained_tokens() -> None:
    training = torch.tensor([[-1.0, -2.0, math.nan], [-4.0, math.inf, 3.0]], dtype=torch.float64, requires_grad=True)
    inference = torch.tensor([[-1.5, -1.9, 1.0], [-3.0, -math.inf, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    metrics = alignment_metrics(training, inference, mask)
    expected = {
        "diff_mean": (0.5 - 0.1 - 1.0) / 3,
        "diff_abs_mean": (0.5 + 0.1 + 1.0) / 3,
        "diff_max": 1.0,
        "training_mean": -7 / 3,
        "inference_mean": -6.4 / 3,
    }
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected)
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_nothing_trained_gives_zeros(shape: tuple[int, int]) -> None:
    values = torch.full(shape, -1.0)
    metrics = alignment_metrics(values, values, torch.zeros(shape, dtype=torch.bool))
    assert [value.item() for value in metrics.values()] == [0.0] * 5


def test_halves_are_averaged_in_fp32() -> None:
    training = torch.full((1000,), -1.0, dtype=torch.bfloat16)
    metrics = alignment_metrics(training, training, torch.ones(1000, dtype=torch.bool))
    assert metrics["training_mean"].dtype is torch.float32
    assert metrics["training_mean"].item() == -1.0


def test_what_is_not_aligned_is_refused() -> None:
    values = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="align all three to the labels"):
        alignment_metrics(values, values[:, :2], torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"expected torch\.bool"):
        alignment_metrics(values, values, torch.ones(2, 3))


def test_staleness_counts_versions_since_each_trained_token_was_sampled() -> None:
    versions = torch.tensor([[3, 4, -9], [5, 6, 5], [0, 0, 0]])  # the 6 was sampled while version 6 was handed over
    mask = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])
    assert row_staleness(versions, mask, version=5).tolist() == [2, 0, 0]
    metrics = staleness_metrics(versions, mask, version=5)
    assert {name: value.item() for name, value in metrics.items()} == {"staleness_mean": 3 / 4, "staleness_max": 2}


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_tokens_of_unknown_age_are_not_stale(shape: tuple[int, int]) -> None:
    versions, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    assert row_staleness(versions, mask, version=5).tolist() == [0] * shape[0]
    assert [value.item() for value in staleness_metrics(versions, mask, version=5).values()] == [0, 0]
