"""Gradients that stand in bf16, in whole steps: one micro-batch is exact, several agree on average, runs go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training import attached, made_up_groups, settings, small_model

from grpo_engine.bridges import BridgeModel
from grpo_engine.data.batching import make_batch
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.step import StepResult, gradient_step
from grpo_engine.train.trainee import Trainee

MASTERS = ["float32", "stochastic_rounding"]


def trainee(**changes: object) -> Trainee:
    config = settings(**{"dtype": "bfloat16", "gradient_dtype": "bfloat16", **changes})
    return Trainee(attached(small_model().to(getattr(torch, config.dtype))), config)


def one_step(subject: Trainee, step: int = 0) -> StepResult:
    torch.manual_seed(step)
    batch = make_batch(made_up_groups(step), seq_len=32)
    return gradient_step(subject, batch, step=step, policy_version=step)


def masters_of(subject: Trainee) -> torch.Tensor:
    return torch.cat([value.flatten().float() for value in subject._masters.state_dict().values()])


@pytest.mark.parametrize("masters", MASTERS)
def test_a_step_of_one_micro_batch_is_the_same_to_the_bit(masters: str) -> None:
    whole = {"batch_size": 8, "gradient_accumulation_steps": 1, "master_weights": masters, "max_grad_norm": 0.01}
    ends = []
    for gradient_dtype in ("float32", "bfloat16"):
        subject = trainee(gradient_dtype=gradient_dtype, **whole)
        norms = [one_step(subject, step).metrics["train/grad_norm"] for step in range(3)]
        assert min(norms) > 0.01  # so they were clipped
        ends.append((norms, masters_of(subject)))
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-6)  # they are summed up in another order
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=0, atol=1e-6 if masters == "float32" else 1e-3)


@pytest.mark.parametrize("masters", MASTERS)
def test_a_step_of_many_micro_batches_has_nearly_the_gradients_of_fp32(masters: str) -> None:
    small = {"batch_size": 1, "gradient_accumulation_steps": 8, "master_weights": masters}
    norms = [one_step(trainee(gradient_dtype=d, **small)).metrics["train/grad_norm"] for d in ("float32", "bfloat16")]
    assert norms[0] != norms[1]
    assert norms[0] == pytest.approx(norms[1], rel=2e-3)


@pytest.mark.parametrize("masters", MASTERS)
def test_a_run_goes_on_bit_for_bit_from_its_checkpoint(masters: str, tmp_path: Path) -> None:
    changes = {"master_weights": masters, "batch_size": 2, "gradient_accumulation_steps": 4}
    subject = trainee(**changes)
    one_step(subject, 0)
    subject.write_weights()
    torch.manual_seed(5)
    subject.save(tmp_path, step=1, policy_version=1, lease="", settings={})
    batch = make_batch(made_up_groups(1), seq_len=32)
    result = gradient_step(subject, batch, step=1, policy_version=1)

    other = trainee(**changes)
    folder = checkpoints.newest(tmp_path)
    assert folder is not None
    other.restore(checkpoints.load(folder, model_name=other.config.model_name))
    other.write_weights()
    again = gradient_step(other, batch, step=1, policy_version=1)
    assert again.metrics == result.metrics
    assert torch.equal(masters_of(other), masters_of(subject))


def test_gradients_are_dropped_with_an_update_that_is_not_finite() -> None:
    subject = trainee()
    torch.autograd.backward(subject.logprobs(make_batch(made_up_groups(0), seq_len=32))[0].sum())
    before = masters_of(subject).clone()
    subject.update(1e-2, is_finite=False)
    assert torch.equal(masters_of(subject), before)
    assert all(p.grad is None for group in subject.optimizer.param_groups for p in group["params"])


def adapters(config: TrainConfig) -> BridgeModel:
    model = add_lora(small_model().bfloat16(), LoraSettings(rank=4))
    return BridgeModel(model=model, is_shared=False, policy_version=0, save=model.save_pretrained)


def test_where_nothing_that_is_trained_is_bf16_the_setting_is_said_to_have_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainee(dtype="float32")
    config = settings(dtype="bfloat16", gradient_dtype="bfloat16", bridge={"mode": "lora_only"})
    with_adapters = Trainee(adapters(config), config)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2
    assert all("gradient_dtype bfloat16 has no effect" in each and "leave it out" in each for each in said)
    torch.autograd.backward(with_adapters.logprobs(make_batch(made_up_groups(0), seq_len=32))[0].sum())
    gradients = [p.grad for group in with_adapters.optimizer.param_groups for p in group["params"]]
    assert {gradient.dtype for gradient in gradients if gradient is not None} == {torch.float32}


def test_where_it_has_an_effect_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    trainee()
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
