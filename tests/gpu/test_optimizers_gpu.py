"""Optimizers on an NVIDIA GPU: 8-bit states, rounding at random there, and what a step allocates."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from grpo_engine.models.config import MasterKind, OptimizerName, OptimizerSettings
from grpo_engine.models.optimizers import MasterWeights, build_optimizer
from grpo_engine.models.rounding import round_to_bf16_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SIDE = 4096
NUMBERS = SIDE * SIDE
"""Of one parameter: 32 MiB in bf16."""


def bf16_parameters(count: int = 3) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator("cuda").manual_seed(0)
    values = [torch.randn(SIDE, SIDE, device="cuda", generator=generator) * 0.02 for _ in range(count)]
    return [(f"w{index}", nn.Parameter(value.bfloat16())) for index, value in enumerate(values)]


def backward(parameters: list[tuple[str, nn.Parameter]]) -> None:
    for index, (_, parameter) in enumerate(parameters):
        torch.autograd.backward((parameter * (index + 1)).sum())


def require(name: OptimizerName) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")


def state_bytes_per_number(name: OptimizerName) -> float:
    parameter = nn.Parameter(torch.ones(SIDE, SIDE, device="cuda"))
    optimizer = build_optimizer([parameter], OptimizerSettings(name=name))
    parameter.grad = torch.ones_like(parameter)
    before = torch.cuda.memory_allocated()
    optimizer.step()
    return (torch.cuda.memory_allocated() - before) / NUMBERS


def test_8_bit_states_take_a_quarter_of_the_memory() -> None:
    require("adamw_8bit")
    assert state_bytes_per_number("adamw") == pytest.approx(8, abs=0.1)
    assert state_bytes_per_number("adamw_8bit") == pytest.approx(2, abs=0.1)


def test_8_bit_adamw_follows_that_of_bitsandbytes_and_continues_its_checkpoint() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    random = torch.Generator("cuda").manual_seed(0)
    start = [torch.randn(shape, device="cuda", generator=random) for shape in ((300, 4099), (100,))]  # 8 bits; fp32
    theirs, ours = ([nn.Parameter(value.clone()) for value in start] for _ in range(2))
    groups = [{"params": [each]} for each in theirs]  # matrices and vectors, as of `build_optimizer`
    reference = bitsandbytes.optim.AdamW8bit(groups, lr=1e-3, weight_decay=0.0)
    optimizer = build_optimizer(ours, OptimizerSettings(name="adamw_8bit", lr=1e-3))
    assert type(optimizer) is not type(reference)

    def step_both() -> None:
        for one, other in zip(theirs, ours, strict=True):
            one.grad = torch.randn(one.shape, device="cuda", generator=random)
            other.grad = one.grad.clone()
        reference.step()
        optimizer.step()
        for one, other in zip(theirs, ours, strict=True):
            assert (one - other).abs().max() < 2e-4  # where a code differs by one: a fifth of an update at most
            assert (one - other).abs().mean() < 1e-6

    for _ in range(4):
        step_both()
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for one, other in zip(theirs, ours, strict=True):
        other.data.copy_(one)
    step_both()


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor"])
@pytest.mark.parametrize("kind", ["float32", "stochastic_rounding"])
def test_every_optimizer_trains_a_bf16_layer(name: OptimizerName, kind: MasterKind) -> None:
    require(name)
    torch.manual_seed(0)
    layer = nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    inputs = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    target = inputs.roll(1, dims=1)
    masters = MasterWeights(layer.named_parameters(), kind=kind)
    optimizer = build_optimizer(masters.parameters, OptimizerSettings(name=name, lr=1e-2))
    losses = []
    for _ in range(150):
        loss = (layer(inputs).float() - target.float()).square().mean()
        losses.append(loss.item())
        torch.autograd.backward(loss)
        masters.step(optimizer)
        masters.publish()
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor"])
@pytest.mark.parametrize("kind", ["float32", "stochastic_rounding"])
def test_a_saved_state_resumes_bit_for_bit(name: OptimizerName, kind: MasterKind) -> None:
    require(name)
    settings = OptimizerSettings(name=name, lr=1e-4)
    parameters = bf16_parameters(2)
    masters = MasterWeights(parameters, kind=kind)
    optimizer = build_optimizer(masters.parameters, settings)
    for _ in range(2):
        backward(parameters)
        masters.step(optimizer)
    file = io.BytesIO()
    generators = (torch.get_rng_state(), torch.cuda.get_rng_state())
    torch.save((masters.state_dict(), optimizer.state_dict(), generators), file)
    backward(parameters)
    masters.step(optimizer)

    file.seek(0)
    values, state, generators = torch.load(file, map_location="cpu", weights_only=True)
    others = bf16_parameters(2)
    resumed = MasterWeights(others, kind=kind)
    resumed_optimizer = build_optimizer(resumed.parameters, settings)
    resumed.load_state_dict(values)
    resumed_optimizer.load_state_dict(state)
    torch.set_rng_state(generators[0])
    torch.cuda.set_rng_state(generators[1])
    backward(others)
    resumed.step(resumed_optimizer)
    for tensor_name, value in masters.state_dict().items():
        assert torch.equal(resumed.state_dict()[tensor_name], value), tensor_name


def test_rounding_at_random_is_unbiased_on_a_gpu_and_follows_its_generator() -> None:
    values = torch.full((NUMBERS,), 1 + 0.3 / 128, device="cuda")  # three tenths of the way to the next bf16
    state = torch.cuda.get_rng_state()
    rounded = round_to_bf16_(values.clone())
    assert rounded.unique().tolist() == [1.0, 1 + 1 / 128]
    assert (rounded > 1).double().mean().item() == pytest.approx(0.3, abs=5 * (0.21 / NUMBERS) ** 0.5)
    torch.cuda.set_rng_state(state)
    assert torch.equal(round_to_bf16_(values.clone()), rounded)


@pytest.mark.parametrize("kind", ["float32", "stochastic_rounding"])
def test_no_bf16_gradient_stays_allocated(kind: MasterKind) -> None:
    parameters = bf16_parameters()
    masters = MasterWeights(parameters, kind=kind)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        backward(parameters)
    assert all(parameter.grad is None for _, parameter in parameters)
    assert (torch.cuda.memory_allocated() - before) / NUMBERS == pytest.approx(3 * 4, abs=0.1)  # fp32, of each
    del masters


@pytest.mark.parametrize(
    ("kind", "extra_bytes"),
    [
        ("float32", 0.5),  # fused: nothing beside the states
        ("stochastic_rounding", 4 + 5 + 0.5),  # one parameter in fp32, and the random bits and NaN mask of a pass
    ],
)
def test_clipping_and_stepping_allocate_nothing_of_the_size_of_the_model(kind: MasterKind, extra_bytes: float) -> None:
    parameters = bf16_parameters(6)
    masters = MasterWeights(parameters, kind=kind)
    optimizer = build_optimizer(masters.parameters, OptimizerSettings())
    for _ in range(2):  # the first makes the states
        backward(parameters)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        nn.utils.clip_grad_norm_(masters.parameters, 1.0)
        masters.step(optimizer)
    assert (torch.cuda.max_memory_allocated() - before) / NUMBERS < extra_bytes


def test_a_server_that_reads_the_parameters_sees_them_change_at_once() -> None:
    parameters = bf16_parameters(2)
    seen = copy.deepcopy([parameter.detach() for _, parameter in parameters])
    masters = MasterWeights(parameters, are_shared=True, kind="stochastic_rounding")
    optimizer = build_optimizer(masters.parameters, OptimizerSettings(lr=1e-2))
    backward(parameters)
    masters.step(optimizer)
    assert all(torch.equal(parameter, old) for (_, parameter), old in zip(parameters, seen, strict=True))
    masters.publish()
    assert not any(torch.equal(parameter, old) for (_, parameter), old in zip(parameters, seen, strict=True))
