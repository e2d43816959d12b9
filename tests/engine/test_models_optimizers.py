"""Optimizers and fp32 masters: small updates are not lost, and shared memory changes only when published."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from grpo_engine.errors import ModelError
from grpo_engine.models.config import OptimizerSettings
from grpo_engine.models.optimizers import MasterWeights, build_optimizer


def named(dtype: torch.dtype, value: float = 1.0) -> list[tuple[str, nn.Parameter]]:
    return [
        ("a", nn.Parameter(torch.full((3, 2), value, dtype=dtype))),
        ("b", nn.Parameter(torch.ones(2, dtype=dtype))),
    ]


def test_adamw_takes_its_first_step_at_the_learning_rate_and_decays_nothing() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = build_optimizer([parameter], OptimizerSettings(lr=0.01))
    parameter.grad = torch.tensor([0.5, -3.0])
    optimizer.step()  # the first step of Adam is lr * sign(gradient)
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.99, -1.99]), rtol=0, atol=1e-6)
    parameter.grad = None
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.99, -1.99]), rtol=0, atol=1e-6)


def test_betas_and_decay_reach_the_optimizer() -> None:
    settings = OptimizerSettings(lr=0.1, betas=(0.5, 0.7), weight_decay=0.2, eps=1e-6)
    group = build_optimizer([nn.Parameter(torch.ones(1))], settings).param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (0.1, (0.5, 0.7), 0.2, 1e-6)


def test_adafactor_steps_at_the_given_rate() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = build_optimizer([parameter], OptimizerSettings(name="adafactor", lr=0.01))
    parameter.grad = torch.full((4, 4), 2.0)
    optimizer.step()  # one gradient everywhere: the factored second moment is exact, and the update is lr * sign
    torch.testing.assert_close(parameter.detach(), torch.full((4, 4), 0.99), rtol=0, atol=1e-5)


def test_adafactor_can_choose_its_own_rate() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    settings = OptimizerSettings(name="adafactor", lr=123.0, adafactor_relative_step=True)
    optimizer = build_optimizer([parameter], settings)
    parameter.grad = torch.full((4, 4), 2.0)
    optimizer.step()  # min(0.01, 1 / sqrt(step)) = 0.01
    torch.testing.assert_close(parameter.detach(), torch.full((4, 4), 0.99), rtol=0, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_missing_8_bit_optimizer_is_an_error_and_not_another_optimizer() -> None:
    with pytest.raises(ModelError, match="pip install bitsandbytes, or choose adamw"):
        build_optimizer([nn.Parameter(torch.ones(1))], OptimizerSettings(name="adamw_8bit"))


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ModelError, match="nothing to train"):
        build_optimizer([nn.Parameter(torch.ones(1), requires_grad=False)], OptimizerSettings())


def test_updates_below_the_last_bit_of_bf16_add_up_in_the_masters() -> None:
    (_, live), *_ = parameters = named(torch.bfloat16)
    in_place = nn.Parameter(live.detach().clone())
    masters = MasterWeights(parameters)
    settings = OptimizerSettings(lr=1e-4)  # the next bf16 below 1.0 is 0.0039 away
    of_masters, of_bf16 = build_optimizer(masters.parameters, settings), build_optimizer([in_place], settings)
    for _ in range(100):
        for _, parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        in_place.grad = torch.ones_like(in_place)
        masters.collect_gradients()
        of_masters.step()
        of_bf16.step()
    masters.publish()
    torch.testing.assert_close(masters.state_dict()["a"], torch.full((3, 2), 0.99), rtol=0, atol=1e-5)
    assert live[0, 0].item() == pytest.approx(0.99, abs=0.002)
    assert in_place[0, 0].item() == 1.0


def test_gradients_move_to_the_masters_as_fp32() -> None:
    parameters = named(torch.bfloat16)
    masters = MasterWeights(parameters)
    parameters[0][1].grad = torch.full((3, 2), 0.5, dtype=torch.bfloat16)
    masters.collect_gradients()
    first, second = masters.parameters
    assert first.grad is not None
    assert first.grad.dtype is torch.float32
    assert first.grad.unique().tolist() == [0.5]
    assert second.grad is None
    assert parameters[0][1].grad is None
    masters.collect_gradients()
    assert first.grad is None


def test_shared_fp32_memory_changes_only_when_published() -> None:
    memory = torch.ones(8)
    parameter = nn.Parameter(memory[2:5])
    masters = MasterWeights([("w", parameter)], are_shared=True)
    optimizer = build_optimizer(masters.parameters, OptimizerSettings(lr=0.5))
    parameter.grad = torch.ones(3)
    masters.collect_gradients()
    optimizer.step()
    assert memory.tolist() == [1.0] * 8
    masters.publish()
    torch.testing.assert_close(memory, torch.tensor([1, 1, 0.5, 0.5, 0.5, 1, 1, 1]))


def test_private_fp32_parameters_are_their_own_masters() -> None:
    parameters = named(torch.float32)
    masters = MasterWeights(parameters)
    assert all(master is live for master, (_, live) in zip(masters.parameters, parameters, strict=True))


def test_frozen_parameters_have_no_masters() -> None:
    parameters = named(torch.bfloat16)
    parameters[1][1].requires_grad_(False)
    assert list(MasterWeights(parameters).state_dict()) == ["a"]


def test_saved_masters_come_back_to_the_bit_and_are_seen_when_published() -> None:
    saved = MasterWeights(named(torch.bfloat16, 1.001)).state_dict()
    saved["a"] = saved["a"] + 1e-6
    parameters = named(torch.bfloat16, 5.0)
    masters = MasterWeights(parameters)
    masters.load_state_dict(saved)
    assert torch.equal(masters.state_dict()["a"], saved["a"])
    assert parameters[0][1][0, 0].item() == 5.0
    masters.publish()
    assert torch.equal(parameters[0][1].detach(), saved["a"].to(torch.bfloat16))


def test_masters_of_another_model_are_refused_and_change_nothing() -> None:
    masters = MasterWeights(named(torch.bfloat16))
    with pytest.raises(ModelError, match=r"do not fit.*b, c"):
        masters.load_state_dict({"a": torch.zeros(3, 2), "c": torch.zeros(2)})
    with pytest.raises(ModelError, match=r"b \(3,\) instead of \(2,\)"):
        masters.load_state_dict({"a": torch.zeros(3, 2), "b": torch.zeros(3)})
    assert masters.state_dict()["a"].unique().tolist() == [1.0]
