"""One step on an NVIDIA GPU: the same as on a CPU with any settings, and the reference model there."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training import saving
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_engine.bridges import BridgeModel
from grpo_engine.data.batching import Batch, make_batch
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora
from grpo_engine.train import scoring
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.scoring import Scorer
from grpo_engine.train.step import StepResult, gradient_step
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.rollouts import ScoredGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

VOCABULARY = 512
SETTINGS: dict[str, dict[str, object]] = {
    "grpo": {},
    "dapo": {"loss": "dapo", "drop_equal_groups": True, "mask_truncated": True},
    "gspo": {"loss": "gspo", "overlong_buffer": 8, "overlong_length": 20},
    "cispo": {"loss": "cispo", "entropy_coef": 0.01, "advantage_baseline": "leave_one_out"},
    "kl": {"kl_coef": 0.3, "kl_unbiased": True},
    "correction": {"correction": "mask", "correction_max": 1.1, "micro_batch_tokens": 128},
    "three_updates": {"kl_coef": 0.3, "num_iterations": 3},
}


def model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "other"
    model(seed=1).save_pretrained(folder)
    return folder


def batch() -> Batch:
    """Three groups of four, one of equal rewards, with completions that were cut short."""
    rng = random.Random(0)
    groups = []
    for number in range(3):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(8, 24))]
        completions = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(2, 32))] for _ in range(4)]
        groups.append(
            ScoredGroup(
                tokens=[prompt + c for c in completions],
                masks=[[-100] * len(prompt) + c for c in completions],
                scores=[0.5 if number == 1 else rng.random() for _ in completions],
                inference_logprobs=[[1.0] * len(prompt) + [-6.2 + rng.random() / 5 for _ in c] for c in completions],
                truncated=[rng.random() < 0.3 for _ in completions],
                generation_params={"temperature": 1.0, "logprobs_mode": "processed"},
            )
        )
    return make_batch(groups, seq_len=64)


def trained_on(device: str, changes: dict[str, object], other_model: Path) -> tuple[Tensor, StepResult]:
    """The masters after a batch, in fp32, and the result of the step; the parameters are shared and unchanged."""
    table: dict[str, object] = {
        "model_name": "test/model",
        "batch_size": 4,
        "seq_len": 64,
        "lr": 1e-3,
        "optimizer": "adamw",
        "dtype": "float32",
        "training_steps": 10,
        **({"reference_model": str(other_model)} if "kl_coef" in changes else {}),
    }
    shared = model().to(device)
    attached = BridgeModel(model=shared, is_shared=True, policy_version=0, save=saving(shared))
    subject = Trainee(attached, TrainConfig.model_validate({**table, **changes}))
    before = [p.detach().clone() for p in shared.parameters()]
    result = gradient_step(subject, batch(), step=0, policy_version=0)
    assert all(torch.equal(p, values) for p, values in zip(shared.parameters(), before, strict=True))
    return torch.cat([p.detach().cpu().flatten() for p in subject._masters.parameters]), result


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_a_step_is_the_same_as_on_a_cpu(changes: dict[str, object], other_model: Path) -> None:
    on_cpu, cpu_result = trained_on("cpu", changes, other_model)
    on_gpu, gpu_result = trained_on("cuda", changes, other_model)
    torch.testing.assert_close(gpu_result.logprobs, cpu_result.logprobs, rtol=1e-3, atol=1e-3)
    assert gpu_result.metrics == pytest.approx(
        cpu_result.metrics, rel=5e-2, abs=2e-3
    )  # a token may fall on the other side of a bound
    # Adam's first update is the learning rate (1e-3) whatever the gradient's size: few that are near 0 may differ.
    assert ((on_gpu - on_cpu).abs() > 1e-4).float().mean() < 0.01


def test_the_reference_under_adapters_is_the_base_model_in_bf16_on_a_gpu() -> None:
    base = model().to("cuda", torch.bfloat16)
    expected, _ = Scorer(base).logprobs(batch())
    adapted = add_lora(base, LoraSettings(rank=8, alpha=16))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    attached = BridgeModel(model=adapted, is_shared=False, policy_version=0, save=saving(adapted))
    # Compiled layers keep what theirs compute in between in float32.
    config = TrainConfig(model_name="test/model", optimizer="adamw", kl_coef=0.1, seq_len=64, compile_layers=False)
    subject = Trainee(attached, config)
    assert subject.reference is not None
    assert torch.equal(subject.reference.logprobs(batch()), expected)
    assert not torch.allclose(subject.logprobs(batch())[0], expected, atol=0.05)


def test_a_batch_copied_back_from_a_gpu_is_complete() -> None:
    there = batch().to("cuda")
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # the next kernels wait in the queue for about half a second
    raised = replace(there, rewards=there.rewards + 1).to("cpu").rewards
    assert torch.equal(raised.clone(), batch().rewards + 1)


def test_plain_rows_are_scored_without_waiting_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "LEAST_GAIN", {"cuda": 2.0})
    scorer, rows = Scorer(model().cuda()), batch()
    scorer.logprobs(rows)  # allocates what later calls reuse
    torch.cuda.set_sync_debug_mode("error")
    try:
        logprobs, entropy = scorer.logprobs(rows)
        torch.autograd.backward((logprobs + entropy).sum())
    finally:
        torch.cuda.set_sync_debug_mode("default")
