"""The plan of a step's memory against `torch.cuda.max_memory_allocated` of real steps, and running out of memory.

Figures are in the log: `pytest tests/gpu/test_memory_plan_gpu.py -o log_cli=true --log-cli-level=INFO`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import torch
from training import saving
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from grpo_engine.bridges import BridgeModel
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.dry_run import model_shape, one_line
from grpo_engine.train.memory.plan import memory_plan
from grpo_engine.train.memory.rehearsal import OutOfGpuMemory, longest_batch, rehearse_step
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

QWEN3_600M = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)
QWEN2_3B = Qwen2Config(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=11_008,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
LLAMA_8B_OF_8_LAYERS = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
LORA = {"bridge": {"mode": "lora_only"}, "lora_target_modules": ("q_proj", "v_proj")}


@pytest.fixture(autouse=True)
def empty_gpu() -> Iterator[None]:
    """Free the memory of earlier tests before the peak is measured."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def settings(**changes: object) -> TrainConfig:
    base: dict[str, object] = {
        "model_name": "random/model",
        "optimizer": "adamw",
        "dtype": "bfloat16",
        "device": "cuda",
        "training_steps": 4,
        "lr": 1e-6,
        "gradient_accumulation_steps": 4,
    }
    return TrainConfig.model_validate({**base, **changes})


def trainee(pretrained: PreTrainedConfig, config: TrainConfig) -> Trainee:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(pretrained, dtype=torch.bfloat16)
    if config.bridge.mode == "lora_only":
        model = add_lora(model, LoraSettings(rank=config.lora_r, target_modules=config.lora_target_modules))
    return Trainee(BridgeModel(model=model, is_shared=False, policy_version=0, save=saving(model)), config)


@pytest.mark.parametrize(
    ("pretrained", "changes"),
    [
        (QWEN3_600M, {"seq_len": 16_384, "micro_batch_tokens": 16_384, "gradient_checkpointing": True}),
        (QWEN3_600M, {"seq_len": 2048, "batch_size": 4}),
        (QWEN3_600M, {"seq_len": 2048, "batch_size": 4, "master_weights": "stochastic_rounding"}),
        (QWEN2_3B, {"seq_len": 4096, "batch_size": 2, "gradient_checkpointing": True, "optimizer": "adafactor"}),
        (QWEN2_3B, {"seq_len": 2048, "batch_size": 2, "train_layer_indices": "30-35"}),
        (LLAMA_8B_OF_8_LAYERS, {"seq_len": 2048, "batch_size": 4}),
        (LLAMA_8B_OF_8_LAYERS, {"seq_len": 8192, "batch_size": 2, "gradient_checkpointing": True}),
        (LLAMA_8B_OF_8_LAYERS, {"seq_len": 2048, "batch_size": 4, **LORA}),
        (LLAMA_8B_OF_8_LAYERS, {"seq_len": 2048, "batch_size": 4, **LORA, "gradient_checkpointing": True}),
    ],
    ids=[
        "0.6B-16k-recompute",
        "0.6B",
        "0.6B-rounded",
        "3B-recompute-adafactor",
        "3B-six-layers",
        "8B-shape",
        "8B-shape-recompute",
        "8B-shape-adapters",
        "8B-shape-adapters-recompute",
    ],
)
def test_the_planned_peak_is_within_15_percent_of_the_real_one(
    pretrained: PreTrainedConfig, changes: dict[str, object]
) -> None:
    config = settings(**changes)
    subject = trainee(pretrained, config)
    gradient_step(subject, longest_batch(config), step=0, policy_version=0)  # makes the optimizer's state
    torch.cuda.reset_peak_memory_stats()
    gradient_step(subject, longest_batch(config), step=1, policy_version=1)
    subject.write_weights()
    measured = torch.cuda.max_memory_allocated()
    plan = memory_plan(model_shape(pretrained, config), config)
    log.info(
        "planned %.2f GB, measured %.2f GB (reserved %.2f, planned for it %.2f): %s",
        *(value / 1e9 for value in (plan.allocated_bytes, measured)),
        *(value / 1e9 for value in (torch.cuda.max_memory_reserved(), plan.needed_bytes)),
        one_line(plan),
    )
    assert plan.allocated_bytes == pytest.approx(measured, rel=0.15)


def test_a_rehearsal_leaves_nothing_allocated_and_reserves_what_later_steps_need() -> None:
    config = settings(seq_len=2048, batch_size=4)
    subject = trainee(QWEN3_600M, config)
    before, random = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    rehearse_step(subject)
    assert torch.cuda.memory_allocated() == pytest.approx(before, abs=64 * 2**20)  # cuBLAS keeps its workspace
    assert torch.equal(random, torch.cuda.get_rng_state())
    reserved = torch.cuda.memory_reserved()
    for step in range(2):
        gradient_step(subject, longest_batch(config), step=step, policy_version=step)
    assert torch.cuda.memory_reserved() <= 1.1 * reserved  # later steps reserve no more


def test_rows_that_do_not_fit_are_refused_before_training_with_what_to_do() -> None:
    config = settings(seq_len=32_768, batch_size=4)
    _, total = torch.cuda.mem_get_info()
    subject = trainee(QWEN3_600M, config)
    held = torch.empty(max(total - 40 * 10**9, 0), dtype=torch.uint8, device="cuda")  # as if an inference server had it
    with pytest.raises(OutOfGpuMemory) as caught:
        rehearse_step(subject)
    message = str(caught.value)
    log.info("%s", message)
    assert "ran out in the rehearsal before training, with micro-batches of up to 4 x 32767 tokens" in message
    assert "--gradient-checkpointing" in message
    assert all(p.grad is None for group in subject.optimizer.param_groups for p in group["params"])
    del held
