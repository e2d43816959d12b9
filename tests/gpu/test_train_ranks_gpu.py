"""Two ranks on two GPUs compute by NCCL what one GPU computes, and resume each other's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_training import Trained, Training, make_model, train_on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")]


@pytest.mark.parametrize("master_weights", ["float32", "stochastic_rounding"])
def test_two_gpus_train_the_parameters_of_one(master_weights: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    settings = {"dtype": "bfloat16", "master_weights": master_weights}

    def train(folder: str, num_ranks: int, steps: range) -> Trained:
        return train_on_ranks(
            Training(
                model=model,
                folder=tmp_path / folder,
                num_ranks=num_ranks,
                steps=steps,
                settings=settings,
                device="cuda",
            )
        )

    one = train("one", 1, range(6))
    train("two", 2, range(3))
    two = train("two", 2, range(3, 6))
    for name, value in one.parameters.items():
        # Sums of bf16 products in another order, and random rounding.
        torch.testing.assert_close(two.parameters[name].float(), value.float(), atol=0.02, rtol=0.02)
    for before, after in zip(one.metrics[3:], two.metrics, strict=True):
        assert after["train/loss"] == pytest.approx(before["train/loss"], abs=0.02)
        assert after["train/grad_norm"] == pytest.approx(before["train/grad_norm"], rel=0.1)
