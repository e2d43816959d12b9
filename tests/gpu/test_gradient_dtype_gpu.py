"""Gradients that are kept in bf16 on an NVIDIA GPU: their norm, sum, memory and time, and an 8B model on an 80 GB card.

Figures are in the log: `pytest tests/gpu/test_gradient_dtype_gpu.py -o log_cli=true --log-cli-level=INFO`.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from torch import nn
from training import saving
from transformers import AutoModelForCausalLM, LlamaConfig

from grpo_engine.bridges import BridgeModel
from grpo_engine.models.config import MasterKind, OptimizerName, OptimizerSettings
from grpo_engine.models.optimizers import MasterWeights, build_optimizer
from grpo_engine.models.rounding import add_rounded_
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.dry_run import model_shape, one_line
from grpo_engine.train.memory.plan import memory_plan
from grpo_engine.train.memory.rehearsal import longest_batch, rehearse_step
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SIDE = 4096
NUMBERS = SIDE * SIDE
H100_BYTES, WEIGHTS_BYTES, CONTEXT_BYTES = 84_900_000_000, 16_060_522_496, 600_000_000


@pytest.fixture(autouse=True)
def empty_gpu() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def parameters_of(count: int) -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    return [(f"w{i}", nn.Parameter(torch.randn(SIDE, SIDE, device="cuda").bfloat16())) for i in range(count)]


def test_the_norm_of_bf16_gradients_is_precise_and_takes_no_copy_of_them() -> None:
    parameters = parameters_of(4)
    masters = MasterWeights(parameters, kind="stochastic_rounding", gradient_dtype="bfloat16")
    torch.autograd.backward(sum((p.float().square() / 2).sum() for _, p in parameters))  # gradients are the values
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    norm = masters.gradient_norm().item()
    assert torch.cuda.max_memory_allocated() - before < 0.1 * NUMBERS
    expected = torch.stack([p.detach().double().square().sum() for _, p in parameters]).sum().sqrt().item()
    assert norm == pytest.approx(expected, rel=1e-5)


def test_small_addends_add_up_on_average() -> None:
    total = torch.ones(8 * NUMBERS, dtype=torch.bfloat16, device="cuda")
    addend = torch.full_like(total, 2.0**-12)
    add_rounded_(total, addend)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(31):
        add_rounded_(total, addend)
    end.record()
    torch.cuda.synchronize()
    milliseconds = start.elapsed_time(end) / 31
    log.info("adding to 10^9 gradients takes %.1f ms", milliseconds / len(total) * 1e9)
    assert total.double().mean().item() == pytest.approx(1 + 32 * 2**-12, abs=1e-5)


@pytest.mark.parametrize("kind", get_args(MasterKind))
def test_gradients_take_two_bytes_a_number(kind: MasterKind) -> None:
    parameters = parameters_of(3)
    masters = MasterWeights(parameters, kind=kind, gradient_dtype="bfloat16")
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        for _, parameter in parameters:
            torch.autograd.backward(parameter.sum())
    gc.collect()
    assert (torch.cuda.memory_allocated() - before) / NUMBERS == pytest.approx(3 * 2, abs=0.1)
    del masters


@pytest.mark.parametrize("name", get_args(OptimizerName))
@pytest.mark.parametrize("kind", get_args(MasterKind))
def test_every_optimizer_trains_a_layer_on_bf16_gradients(name: OptimizerName, kind: MasterKind) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    inputs = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    target = inputs.roll(1, dims=1)
    masters = MasterWeights(layer.named_parameters(), kind=kind, gradient_dtype="bfloat16")
    optimizer = build_optimizer(masters.parameters, OptimizerSettings(name=name, lr=1e-2))
    losses = []
    for _ in range(150):
        loss = (layer(inputs).float() - target.float()).square().mean()
        losses.append(loss.item())
        for _ in range(2):
            loss = (layer(inputs).float() - target.float()).square().mean()
            torch.autograd.backward(loss)
        masters.step(optimizer, gradient_scale=0.5)
        masters.publish()
    assert losses[-1] < 0.2 * losses[0]


def llama_8b(num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )


def settings(**changes: object) -> TrainConfig:
    base: dict[str, object] = {
        "model_name": "random/model",
        "bridge": {"mode": "shared_vllm"},
        "device": "cuda",
        "training_steps": 4,
        "lr": 1e-6,
        "batch_size": 4,
        "gradient_accumulation_steps": 4,
        "seq_len": 2048,
        "gradient_checkpointing": True,
        "gradient_dtype": "bfloat16",
    }
    return TrainConfig.model_validate({**base, **changes})


def trainee(pretrained: LlamaConfig, config: TrainConfig) -> Trainee:
    """A trainee whose weights are in this process, as if an inference server shared them."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(pretrained, dtype=torch.bfloat16)
    return Trainee(BridgeModel(model=model, is_shared=True, policy_version=0, save=saving(model)), config)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw", "micro_batch_tokens": 4096},
        {"optimizer": "adafactor", "micro_batch_tokens": 4096},
        {"optimizer": "adafactor", "micro_batch_tokens": 4096, "master_weights": "stochastic_rounding"},
        {"optimizer": "adamw", "master_weights": "stochastic_rounding", "gradient_checkpointing": False},
    ],
    ids=str,
)
def test_the_planned_peak_is_within_15_percent_of_the_real_one(changes: dict[str, object]) -> None:
    config = settings(**changes)
    subject = trainee(llama_8b(8), config)
    weights = torch.cuda.memory_allocated() - sum(p.nbytes for p in subject._masters.state_dict().values())
    gradient_step(subject, longest_batch(config), step=0, policy_version=0)  # makes the optimizer's state
    torch.cuda.reset_peak_memory_stats()
    gradient_step(subject, longest_batch(config), step=1, policy_version=1)
    subject.write_weights()
    measured = torch.cuda.max_memory_allocated() - weights
    plan = memory_plan(model_shape(llama_8b(8), config), config)
    log.info("planned %.2f GB, measured %.2f GB: %s", plan.allocated_bytes / 1e9, measured / 1e9, one_line(plan))
    assert plan.allocated_bytes == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("share", "changes"),
    [
        (0.35, {"optimizer": "adamw_8bit", "master_weights": "stochastic_rounding", "micro_batch_tokens": 4096}),
        (0.5, {"optimizer": "adafactor", "master_weights": "stochastic_rounding", "micro_batch_tokens": 8192}),
        (0.3, {"optimizer": "adafactor", "micro_batch_tokens": 8192}),
    ],
    ids=["8-bit Adam", "half for inference", "fp32 masters"],
)
def test_8b_parameters_are_trained_in_what_inference_leaves_of_an_80_gb_card(
    share: float, changes: dict[str, object]
) -> None:
    """The settings at the top of profiles/hermes8b-shared.toml; torch may allocate what an 80 GB card has left."""
    if changes["optimizer"] == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes")
    # The weights would be the server's, and are in this process here; torch does not count the CUDA context.
    allowed = int((1 - share) * H100_BYTES) - CONTEXT_BYTES + WEIGHTS_BYTES
    _, total = torch.cuda.mem_get_info()
    if total < 1.1 * allowed:
        pytest.skip(f"needs {1.1 * allowed / 1e9:.0f} GB")
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # as `train` does, by the environment
    config = settings(**changes)
    subject = trainee(llama_8b(32), config)
    rehearse_step(subject)
    torch.cuda.reset_peak_memory_stats()
    for step in range(2):
        result = gradient_step(subject, longest_batch(config), step=step, policy_version=step)
        assert result.applied
        subject.write_weights()
    log.info(
        "allocated %.1f GB, reserved %.1f GB of %.1f; planned %.1f GB",
        torch.cuda.max_memory_allocated() / 1e9 - WEIGHTS_BYTES / 1e9,
        torch.cuda.max_memory_reserved() / 1e9 - WEIGHTS_BYTES / 1e9,
        (allowed - WEIGHTS_BYTES) / 1e9,
        memory_plan(model_shape(llama_8b(32), config), config).allocated_bytes / 1e9,
    )
