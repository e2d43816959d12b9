"""On a GPU, packed rows, recompute, kept attention and compiled layers change gradients by no more than rounding."""

from __future__ import annotations

import random

import pytest
import torch
from torch._dynamo.utils import counters
from training import saving
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_engine.bridges import BridgeModel
from grpo_engine.data.batching import Batch, make_batch
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.rehearsal import rehearse_step
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.rollouts import ScoredGroup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

VOCABULARY = 512


def llama(**changes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).to("cuda", torch.bfloat16)


def trained(model: LlamaForCausalLM, **settings: object) -> Trainee:
    base = {"model_name": "test/model", "optimizer": "adamw", "device": "cuda", "seq_len": 1024}
    config = TrainConfig.model_validate({**base, **settings})
    return Trainee(BridgeModel(model=model, is_shared=False, policy_version=0, save=saving(model)), config)


def batch(*, size: int, prompt: int, lengths: tuple[int, int], groups: int = 3, seq_len: int = 1024) -> Batch:
    rng = random.Random(0)
    made = []
    for _ in range(groups):
        start = [rng.randrange(VOCABULARY) for _ in range(prompt)]
        completions = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(*lengths))] for _ in range(size)]
        made.append(
            ScoredGroup(
                tokens=[start + c for c in completions],
                masks=[[-100] * prompt + c for c in completions],
                scores=[rng.random() for _ in completions],
                inference_logprobs=[[1.0] * prompt + [-6.0] * len(c) for c in completions],
            )
        )
    return make_batch(made, seq_len=seq_len)


def gradients(rows: Batch, *, shares_prompts: bool = True, **settings: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities, and all gradients in one tensor; as the masters have them."""
    trainee = trained(llama(), **settings)
    trainee._scorer.shares_prompts = shares_prompts
    logprobs, entropy = trainee.logprobs(rows)
    torch.autograd.backward((logprobs * rows.rewards.to("cuda")[:, None] + 0.1 * entropy).sum())
    flat = torch.cat([master.grad.flatten() for master in trainee._masters.parameters if master.grad is not None])
    return logprobs.detach().cpu(), flat.cpu()


SHARED = {"size": 6, "prompt": 300, "lengths": (20, 200)}
RAGGED = {"size": 1, "prompt": 5, "lengths": (10, 900), "groups": 9}


@pytest.mark.parametrize("shape", [SHARED, RAGGED])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "keep_attention": True},
        {"compile_layers": True},
        {"compile_layers": True, "gradient_checkpointing": True, "keep_attention": True},
    ],
)
@pytest.mark.parametrize("shares_prompts", [False, True])
def test_no_execution_mode_changes_the_gradients(
    shape: dict[str, object], settings: dict[str, object], shares_prompts: bool
) -> None:
    rows = batch(**shape)  # type: ignore[arg-type]
    expected, reference = gradients(rows, shares_prompts=False)
    found, gradient = gradients(rows, shares_prompts=shares_prompts, **settings)
    assert (found - expected)[rows.mask].abs().mean() < 0.01
    assert torch.cosine_similarity(gradient.double(), reference.double(), dim=0) > 0.999
    assert gradient.norm() == pytest.approx(float(reference.norm()), rel=0.02)


def test_no_batch_after_the_rehearsal_is_compiled_for() -> None:
    settings = {"seq_len": 2048, "micro_batch_tokens": 4096, "batch_size": 4, "gradient_accumulation_steps": 4}
    trainee = trained(
        llama(hidden_size=4096, intermediate_size=8192, num_hidden_layers=1, num_attention_heads=32, head_dim=128),
        compile_layers=True,
        **settings,
    )
    rehearse_step(trainee)
    before = counters["stats"]["unique_graphs"]
    assert before > 0
    for size, prompt, lengths in [(4, 115, (512, 512)), (4, 60, (1, 40)), (1, 5, (1, 1)), (3, 30, (700, 1900))]:
        gradient_step(trainee, batch(size=size, prompt=prompt, lengths=lengths, seq_len=2048), step=0, policy_version=0)
    assert counters["stats"]["unique_graphs"] == before
