"""Optimizers and masters: gradients add up in fp32 or on average, small updates are not lost, shared memory changes
only when published.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn
from training import small_model
from transformers import LlamaForCausalLM

from grpo_engine.errors import ConfigError, ModelError
from grpo_engine.models import config, optimizers
from grpo_engine.models.config import MasterKind, OptimizerName, OptimizerSettings
from grpo_engine.models.optimizers import GradientDtype, MasterWeights, build_optimizer


def named(dtype: torch.dtype, value: float = 1.0) -> list[tuple[str, nn.Parameter]]:
    return [
        ("a", nn.Parameter(torch.full((3, 2), value, dtype=dtype))),
        ("b", nn.Parameter(torch.ones(2, dtype=dtype))),
    ]


def backward(parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Give every parameter a gradient of ones, through autograd."""
    torch.autograd.backward(torch.stack([parameter.float().sum() for _, parameter in parameters]).sum())


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_matrices_decay_and_norms_and_biases_do_not(name: OptimizerName) -> None:
    matrix, norm = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([matrix, norm], OptimizerSettings(name=name, lr=0.1, weight_decay=0.5))
    matrix.grad, norm.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert matrix.detach().unique().tolist() == pytest.approx([0.95])
    assert norm.detach().unique().tolist() == [1.0]


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "adamw", "lr": 0.01},
        {"name": "adafactor", "lr": 0.01},
        {"name": "adafactor", "lr": 123.0, "adafactor_relative_step": True},  # min(0.01, 1 / sqrt(step)) = 0.01
    ],
    ids=["adamw", "adafactor", "adafactor's own rate"],
)
def test_the_first_step_is_as_large_as_the_rate_and_nothing_decays(settings: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = build_optimizer([parameter], OptimizerSettings(**settings))
    parameter.grad = torch.full((4, 4), 2.0)
    optimizer.step()  # lr * sign; one gradient everywhere, so that the factored second moment is exact
    torch.testing.assert_close(parameter.detach(), torch.full((4, 4), 0.99), rtol=0, atol=1e-5)
    parameter.grad = None
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((4, 4), 0.99), rtol=0, atol=1e-5)


def test_betas_and_decay_reach_the_optimizer_which_needs_something_to_train() -> None:
    settings = OptimizerSettings(lr=0.1, betas=(0.5, 0.7), weight_decay=0.2, eps=1e-6)
    group = build_optimizer([nn.Parameter(torch.ones(1, 1))], settings).param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (0.1, (0.5, 0.7), 0.2, 1e-6)
    with pytest.raises(ModelError, match="nothing to train"):
        build_optimizer([nn.Parameter(torch.ones(1), requires_grad=False)], settings)


def test_adamw_8bit_trains_with_one_byte_a_moment_where_bitsandbytes_can() -> None:
    pytest.importorskip("bitsandbytes", minversion="0.50")
    large, small = nn.Parameter(torch.ones(64, 80)), nn.Parameter(torch.ones(8))
    optimizer = build_optimizer([large, small], OptimizerSettings(name="adamw_8bit", lr=0.01))
    large.grad, small.grad = torch.full((64, 80), 2.0), torch.full((8,), 2.0)
    optimizer.step()  # as Adam's first step: lr * sign
    torch.testing.assert_close(large.detach(), torch.full((64, 80), 0.99), rtol=0, atol=1e-4)
    assert optimizer.state[large]["state1"].dtype is torch.uint8
    assert optimizer.state[small]["state1"].dtype is torch.float32  # below 4096 numbers


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "pip install bitsandbytes, or choose adamw"),
        ("0.49.2", r"from bitsandbytes 0\.50 on, and 0\.49\.2 is installed: pip install -U"),
    ],
    ids=["missing", "without CPU kernels"],
)
def test_an_8_bit_optimizer_that_cannot_run_is_an_error(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "installed_version", lambda name: version)
    with pytest.raises(ConfigError, match=message):
        build_optimizer([nn.Parameter(torch.ones(1))], OptimizerSettings(name="adamw_8bit"))


def test_updates_below_the_last_bit_of_bf16_add_up_in_the_masters() -> None:
    (_, live), *_ = parameters = named(torch.bfloat16)
    in_place = nn.Parameter(live.detach().clone())
    masters = MasterWeights(parameters)
    settings = OptimizerSettings(lr=1e-4)  # the next bf16 below 1.0 is 0.0039 away
    of_masters, of_bf16 = build_optimizer(masters.parameters, settings), build_optimizer([in_place], settings)
    for _ in range(100):
        backward(parameters)
        in_place.grad = torch.ones_like(in_place)
        masters.step(of_masters)
        of_bf16.step()
    masters.publish()
    torch.testing.assert_close(masters.state_dict()["a"], torch.full((3, 2), 0.99), rtol=0, atol=1e-5)
    assert live[0, 0].item() == pytest.approx(0.99, abs=0.002)
    assert in_place[0, 0].item() == 1.0


def test_shared_fp32_memory_changes_only_when_published() -> None:
    memory = torch.ones(8)
    parameter = nn.Parameter(memory[2:5])
    masters = MasterWeights([("w", parameter)], are_shared=True)
    optimizer = build_optimizer(masters.parameters, OptimizerSettings(lr=0.5))
    backward([("w", parameter)])
    masters.step(optimizer)
    assert memory.tolist() == [1.0] * 8
    masters.publish()
    torch.testing.assert_close(memory, torch.tensor([1, 1, 0.5, 0.5, 0.5, 1, 1, 1]))


def test_private_fp32_parameters_are_their_own_masters() -> None:
    parameters = named(torch.float32)
    masters = MasterWeights(parameters)
    assert all(master is live for master, (_, live) in zip(masters.parameters, parameters, strict=True))


def small_bf16_model(kind: str = "plain") -> LlamaForCausalLM:
    """One whose tied embedding has gradients from two places."""
    model = small_model(seed=3, vocab_size=64, intermediate_size=48).to(torch.bfloat16)
    match kind:
        case "frozen":
            model.model.embed_tokens.requires_grad_(False)
        case "mixed":
            model.model.norm.float()
        case "checkpointed":
            model.gradient_checkpointing_enable()
    return model


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):  # for the fp32 norm among bf16 layers
        logits = model(input_ids=rows).logits.float()
    return -logits.log_softmax(-1)[:, :-1].gather(-1, rows[:, 1:, None]).sum()


@pytest.mark.slow
@pytest.mark.parametrize("master_kind", get_args(MasterKind))
@pytest.mark.parametrize("are_shared", [False, True])
@pytest.mark.parametrize("kind", ["frozen", "mixed", "checkpointed"])
def test_gradients_of_sixteen_micro_batches_of_a_bf16_model_add_up_in_fp32(
    kind: str, are_shared: bool, master_kind: MasterKind
) -> None:
    rows = torch.randint(64, (16, 12), generator=torch.Generator().manual_seed(5))
    alone = small_bf16_model(kind).train()
    expected: dict[str, torch.Tensor] = {}
    for row in rows:
        alone.zero_grad()
        torch.autograd.backward(loss_of(alone, row[None]))
        for name, parameter in alone.named_parameters():
            if parameter.grad is not None:
                expected[name] = expected.get(name, 0) + parameter.grad.double()

    model = small_bf16_model(kind).train()
    masters = MasterWeights(model.named_parameters(), are_shared=are_shared, kind=master_kind)
    for row in rows:
        torch.autograd.backward(loss_of(model, row[None]))
        assert all(p.grad is None for p in model.parameters() if p.dtype is torch.bfloat16)
    assert masters.state_dict().keys() == expected.keys()
    for master, (name, total) in zip(masters.parameters, expected.items(), strict=True):
        assert master.grad is not None
        assert master.grad.dtype is torch.float32
        torch.testing.assert_close(master.grad.double(), total, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", get_args(MasterKind))
def test_many_small_micro_batches_add_up_on_average_in_bf16_gradients(kind: MasterKind) -> None:
    torch.manual_seed(0)
    weights = nn.Parameter(torch.ones(256, 256, dtype=torch.bfloat16))
    alone = weights.detach().clone().requires_grad_()
    masters = MasterWeights([("w", weights)], kind=kind, gradient_dtype="bfloat16")
    for size in [1.0] + 64 * [2.0**-10]:  # where the next bf16 is 1/128 away
        torch.autograd.backward((weights * size).sum())
        torch.autograd.backward((alone * size).sum())
    [master] = masters.parameters
    assert alone.grad is not None
    assert alone.grad.unique().tolist() == [1.0]
    assert master.grad is not None
    assert master.grad.dtype is torch.bfloat16
    # Each of 64 additions moves a number by 1/128 one time in eight: 1/16 on average, with a deviation of 0.021.
    assert master.grad.double().mean().item() == pytest.approx(1 + 1 / 16, abs=5 * 0.021 / 256)
    assert master.grad.double().std().item() == pytest.approx(0.021, rel=0.1)


@pytest.mark.parametrize("kind", get_args(MasterKind))
@pytest.mark.parametrize("are_shared", [False, True])
def test_bf16_gradients_of_one_micro_batch_are_those_of_autograd_and_one_tensor(
    kind: MasterKind, are_shared: bool
) -> None:
    rows = torch.randint(64, (1, 12), generator=torch.Generator().manual_seed(5))
    alone, model = small_bf16_model("mixed"), small_bf16_model("mixed")
    torch.autograd.backward(loss_of(alone, rows))
    masters = MasterWeights(model.named_parameters(), are_shared=are_shared, kind=kind, gradient_dtype="bfloat16")
    before = torch.get_rng_state()
    torch.autograd.backward(loss_of(model, rows))
    for (name, expected), master in zip(alone.named_parameters(), masters.parameters, strict=True):
        assert master.grad is not None
        assert torch.equal(master.grad, expected.grad), name
        assert master.grad.untyped_storage().nbytes() == expected.dtype.itemsize * expected.numel()
    assert all(p.grad is None for p in model.parameters() if p.dtype is torch.bfloat16)
    assert torch.equal(before, torch.get_rng_state())  # nothing was rounded


@pytest.mark.parametrize("name", ["adamw", "adafactor", "adamw_8bit"])
@pytest.mark.parametrize("kind", get_args(MasterKind))
def test_an_update_is_the_same_whatever_the_type_of_its_gradient(name: OptimizerName, kind: MasterKind) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes", minversion="0.50")
    ends = []
    for gradient_dtype in get_args(GradientDtype):
        torch.manual_seed(1)
        parameters = [(f"w{i}", nn.Parameter(torch.randn(64, 80).bfloat16())) for i in range(3)]
        parameters.append(("norm", nn.Parameter(torch.ones(8))))
        masters = MasterWeights(parameters, kind=kind, gradient_dtype=gradient_dtype)
        optimizer = build_optimizer(masters.parameters, OptimizerSettings(name=name, lr=1e-4))
        for _ in range(3):
            torch.autograd.backward(sum(p.float().square().sum() for _, p in parameters))
            masters.step(optimizer, gradient_scale=0.3)
            masters.publish()
        states_of = [optimizer.state[master].values() for master in masters.parameters]
        states = [each for values in states_of for each in values if isinstance(each, torch.Tensor)]
        assert torch.bfloat16 not in {state.dtype for state in states}
        assert all(master.grad is None for master in masters.parameters)
        ends.append([*(value.clone() for value in masters.state_dict().values()), *states])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("gradient_dtype", get_args(GradientDtype))
@pytest.mark.parametrize("kind", get_args(MasterKind))
def test_the_norm_of_gradients_is_precise_in_either_type(kind: MasterKind, gradient_dtype: GradientDtype) -> None:
    torch.manual_seed(0)
    factors = [torch.randn(300, 100).bfloat16() for _ in range(5)]
    parameters = [(f"w{i}", nn.Parameter(torch.ones(300, 100, dtype=torch.bfloat16))) for i in range(5)]
    norm = nn.Parameter(torch.ones(7))
    masters = MasterWeights([*parameters, ("norm", norm)], kind=kind, gradient_dtype=gradient_dtype)
    torch.autograd.backward(sum((p * f).sum() for (_, p), f in zip(parameters, factors, strict=True)) + norm.sum())
    expected = torch.cat([*(f.double().flatten() for f in factors), torch.ones(7).double()]).norm().item()
    assert masters.gradient_norm().item() == pytest.approx(expected, rel=1e-5)
    assert masters.gradient_norm().dtype is torch.float32
    plain = nn.utils.get_total_norm(factors).item()
    assert plain != pytest.approx(expected, rel=1e-3)  # as torch's clipping has it in bf16


def test_the_norm_is_0_without_gradients_and_not_finite_with_one_that_is_not() -> None:
    assert MasterWeights(named(torch.bfloat16)).gradient_norm().item() == 0.0
    for value in (torch.inf, torch.nan):
        parameters = named(torch.bfloat16)
        masters = MasterWeights(parameters, gradient_dtype="bfloat16")
        backward(parameters)
        torch.autograd.backward((parameters[0][1] * value).sum())
        assert not masters.gradient_norm().isfinite()


def test_clipping_scales_the_gradients_that_an_optimizer_sees() -> None:
    for kind in get_args(MasterKind):
        for gradient_dtype in get_args(GradientDtype):
            parameters = [*named(torch.bfloat16), ("norm", nn.Parameter(torch.ones(3)))]
            masters = MasterWeights(parameters, kind=kind, gradient_dtype=gradient_dtype)
            optimizer = build_optimizer(masters.parameters, OptimizerSettings(betas=(0.0, 0.0), lr=1e-3))
            backward(parameters)
            masters.step(optimizer, gradient_scale=0.3)
            averages = [state["exp_avg"].unique().tolist() for state in optimizer.state.values()]
            assert averages == [[pytest.approx(0.3, rel=1e-6)]] * 3  # not rounded to bf16: 0.30078


def test_only_gradients_of_bf16_parameters_are_kept_in_bf16() -> None:
    bf16, fp16, fp32 = (
        MasterWeights(named(t), gradient_dtype="bfloat16") for t in (torch.bfloat16, torch.float16, torch.float32)
    )
    assert [masters.have_bf16_gradients for masters in (bf16, fp16, fp32)] == [True, False, False]
    assert not MasterWeights(named(torch.bfloat16)).have_bf16_gradients


def test_one_model_can_get_new_masters_after_the_old_are_freed() -> None:
    parameters = named(torch.bfloat16)
    old = MasterWeights(parameters)
    old_masters = old.parameters
    del old
    new = MasterWeights(parameters)
    backward(parameters)
    assert all(master.grad is None for master in old_masters)
    assert all(master.grad is not None for master in new.parameters)


@pytest.mark.parametrize("gradient_dtype", get_args(GradientDtype))
def test_gradients_still_arrive_when_a_bridge_has_moved_the_memory(gradient_dtype: GradientDtype) -> None:
    for kind in get_args(MasterKind):
        parameters = named(torch.bfloat16)
        masters = MasterWeights(parameters, are_shared=True, kind=kind, gradient_dtype=gradient_dtype)
        backward(parameters)
        for _, parameter in parameters:
            parameter.data = parameter.data.clone()
        backward(parameters)
        assert [master.grad.unique().tolist() for master in masters.parameters] == [[2.0], [2.0]]


@pytest.mark.parametrize("gradient_dtype", get_args(GradientDtype))
def test_a_step_frees_the_gradients(gradient_dtype: GradientDtype) -> None:
    for kind in get_args(MasterKind):
        parameters = named(torch.bfloat16)
        masters = MasterWeights(parameters, kind=kind, gradient_dtype=gradient_dtype)
        optimizer = build_optimizer(masters.parameters, OptimizerSettings(lr=0.1))
        backward(parameters)
        masters.step(optimizer)
        assert all(master.grad is None for master in masters.parameters)
        before = masters.state_dict()["a"].clone()
        masters.step(optimizer)  # nothing to go by
        assert torch.equal(masters.state_dict()["a"], before)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
@pytest.mark.parametrize("are_shared", [False, True])
def test_updates_far_below_the_last_bit_of_bf16_add_up_on_average_when_rounded_at_random(
    name: OptimizerName, are_shared: bool
) -> None:
    torch.manual_seed(0)
    weights = nn.Parameter(torch.full((256, 256), 0.02, dtype=torch.bfloat16))  # next to it: 0.00012 further
    start = weights.detach().double().mean().item()
    masters = MasterWeights([("w", weights)], are_shared=are_shared, kind="stochastic_rounding")
    optimizer = build_optimizer(masters.parameters, OptimizerSettings(name=name, lr=1e-6))
    for _ in range(50):
        torch.autograd.backward(weights.float().sum())
        masters.step(optimizer)
    masters.publish()
    moved = start - weights.detach().double().mean().item()
    # 50 steps of 1e-6. A weight's own error has a deviation of about 7e-5, their mean's 3e-7.
    assert moved == pytest.approx(50e-6, abs=2e-6)
    assert len(weights.detach().unique()) > 1


def test_without_fp32_masters_shared_memory_changes_only_when_published() -> None:
    parameters = [*named(torch.bfloat16), ("norm", nn.Parameter(torch.ones(3)))]
    masters = MasterWeights(parameters, are_shared=True, kind="stochastic_rounding")
    optimizer = build_optimizer(masters.parameters, OptimizerSettings(lr=0.5))
    backward(parameters)
    masters.step(optimizer)
    assert all(parameter.detach().unique().tolist() == [1.0] for _, parameter in parameters)
    for _ in range(2):  # a server that was restarted is given them again
        masters.publish()
        assert all(parameter.detach().float().mean() == pytest.approx(0.5, abs=0.003) for _, parameter in parameters)
        for _, parameter in parameters:
            parameter.data = torch.zeros_like(parameter.data)  # the restarted server's memory


def test_without_fp32_masters_nothing_but_gradients_and_state_is_kept() -> None:
    parameters = named(torch.bfloat16)
    masters = MasterWeights(parameters, kind="stochastic_rounding")
    assert all(master.untyped_storage().nbytes() == 4 for master in masters.parameters)
    assert [master.shape for master in masters.parameters] == [(3, 2), (2,)]
    values = masters.state_dict()
    assert all(values[name].data_ptr() == parameter.data_ptr() for name, parameter in parameters)
    optimizer = build_optimizer(masters.parameters, OptimizerSettings())
    backward(parameters)
    masters.step(optimizer)
    assert all(master.untyped_storage().nbytes() == 4 for master in masters.parameters)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("gradient_dtype", get_args(GradientDtype))
@pytest.mark.parametrize("numbers", [1, 40, 10**6])
def test_a_step_is_the_same_in_any_portions(
    numbers: int, gradient_dtype: GradientDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "STEPPED_AT_ONCE", numbers)
    torch.manual_seed(0)
    parameters = [(f"w{i}", nn.Parameter(torch.ones(5, i, dtype=torch.bfloat16))) for i in range(1, 9)]
    parameters[3][1].requires_grad_(False)
    masters = MasterWeights(parameters, kind="stochastic_rounding", gradient_dtype=gradient_dtype)
    optimizer = build_optimizer(masters.parameters, OptimizerSettings(lr=0.25))
    torch.autograd.backward(sum(parameter.float().sum() for _, parameter in parameters[1:]))
    masters.step(optimizer)
    moved = [parameter.detach().unique().tolist() for _, parameter in parameters]
    # Adam's first step is the rate, which bf16 has here; the first had no gradient, and one is frozen.
    assert moved == [[1.0], [0.75], [0.75], [1.0], [0.75], [0.75], [0.75], [0.75]]
    assert len(optimizer.state) == 6


def test_a_saved_state_of_either_kind_is_loaded_by_the_other() -> None:
    parameters = named(torch.bfloat16, 0.7)
    rounded = MasterWeights(parameters, kind="stochastic_rounding")
    standing = MasterWeights(named(torch.bfloat16))
    standing.load_state_dict(rounded.state_dict())
    assert torch.equal(standing.state_dict()["a"], parameters[0][1].detach().float())
    rounded.load_state_dict({"a": torch.full((3, 2), 0.1), "b": torch.zeros(2)})
    assert torch.equal(parameters[0][1].detach(), torch.full((3, 2), 0.1, dtype=torch.bfloat16))


def test_only_bf16_is_rounded_at_random() -> None:
    with pytest.raises(ModelError, match=r"a is torch\.float16: choose master_weights float32, or load"):
        MasterWeights(named(torch.float16), kind="stochastic_rounding")


def test_masters_of_another_model_are_refused_and_change_nothing() -> None:
    masters = MasterWeights(named(torch.bfloat16))
    with pytest.raises(ModelError, match=r"do not fit.*b, c"):
        masters.load_state_dict({"a": torch.zeros(3, 2), "c": torch.zeros(2)})
    with pytest.raises(ModelError, match=r"b \(3,\) instead of \(2,\)"):
        masters.load_state_dict({"a": torch.zeros(3, 2), "b": torch.zeros(3)})
    assert masters.state_dict()["a"].unique().tolist() == [1.0]
