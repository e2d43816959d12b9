"""Whether it learns: the tiny model on sort6 and copy6, whole and by an adapter, and not when rewards are shuffled.

Sampling, scoring, batching, loss and update are the real ones, in one process and on policy; servers and the bridge
have tests of their own.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training import attached, scored_group, settings

from grpo_engine.data.batching import make_batch
from grpo_engine.data.puzzles import make_item, score
from grpo_engine.models.config import DtypeName, LoraSettings
from grpo_engine.models.loading import load_model, load_tokenizer
from grpo_engine.models.lora import add_lora
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.rollouts import ScoredGroup

PROMPTS, SIZE, MAX_TOKENS = 16, 8, 8


def sampled_groups(trainee: Trainee, task: str, rng: random.Random, folder: Path) -> list[ScoredGroup]:
    """16 prompts × 8 completions at temperature 1, with the log-probabilities they were sampled at."""
    tokenizer = load_tokenizer(str(folder))
    items = [make_item(task, rng) for _ in range(PROMPTS)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": item.question}], add_generation_prompt=True, return_dict=False
        )
        for item in items
    ]
    assert len({len(prompt) for prompt in prompts}) == 1  # so that no padding is needed
    ids = torch.tensor(prompts).repeat_interleave(SIZE, dim=0)
    with torch.inference_mode():
        out = trainee.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=MAX_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            output_scores=True,
            return_dict_in_generate=True,
        )
    logprobs = torch.stack(out.scores, dim=1).log_softmax(-1)
    groups = []
    for index, item in enumerate(items):
        rows = range(index * SIZE, (index + 1) * SIZE)
        prompt = prompts[index]
        completions = []
        for row in rows:
            new = out.sequences[row, len(prompt) :].tolist()
            end = new.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in new else len(new)
            completions.append(new[:end])
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        groups.append(
            scored_group(
                prompt,
                completions,
                scores=[score(task, item.answer, text) for text in texts],
                logprobs=[
                    [float(logprobs[row, i, token]) for i, token in enumerate(c)]
                    for row, c in zip(rows, completions, strict=True)
                ],
                generation_params={"temperature": 1.0, "logprobs_mode": "processed"},
            )
        )
    return groups


def rewards_over_training(
    folder: Path,
    task: str,
    *,
    steps: int,
    lr: float = 3e-4,
    dtype: DtypeName = "float32",
    lora: LoraSettings | None = None,
    is_shuffled: bool = False,
    **changes: object,
) -> list[float]:
    """Mean reward of every step's samples, before the step."""
    torch.manual_seed(0)
    rng = random.Random(0)
    model = load_model(str(folder), dtype=dtype, device="cpu")
    config = settings(
        lr=lr, batch_size=PROMPTS * SIZE, gradient_accumulation_steps=1, warmup_steps=5, training_steps=steps, **changes
    )
    trained = model if lora is None else add_lora(model, lora)
    trainee = Trainee(attached(trained, is_shared=False), config)
    rewards = []
    for step in range(steps):
        batch = make_batch(sampled_groups(trainee, task, rng, folder), seq_len=64)
        rewards.append(float(batch.rewards.mean()))
        if is_shuffled:
            batch = replace(batch, rewards=batch.rewards[torch.randperm(len(batch.rewards))])
        gradient_step(trainee, batch, step=step, policy_version=step)
        trainee.write_weights()
    return rewards


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


FURTHER = pytest.mark.extended(
    "an adapter learns here; the whole model in test_evaluation_processes.py; rounding has tests with numbers"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "steps", "first", "settings"),
    [
        pytest.param("sort6", 70, (0.58, 0.70), {"lr": 4e-4}, marks=FURTHER),
        pytest.param("copy6", 45, (0.30, 0.50), {"lr": 1e-3}, marks=FURTHER),
        pytest.param(
            *("copy6", 60, (0.30, 0.50)),  # after 45 the reward still rises: from 0.71 to 0.96, by the CPU's kernels
            {"lr": 1e-3, "dtype": "bfloat16", "master_weights": "stochastic_rounding"},
            marks=FURTHER,
        ),
        # an adapter needs six times the learning rate of a whole model
        ("copy6", 50, (0.30, 0.50), {"lr": 6e-3, "lora": LoraSettings(rank=8, alpha=16)}),
    ],
    ids=["sort6", "copy6", "copy6 in bf16 without master weights", "copy6 by an adapter of rank 8"],
)
def test_rewards_rise_in_training(
    tiny_model_dir: Path, task: str, steps: int, first: tuple[float, float], settings: dict[str, Any]
) -> None:
    rewards = rewards_over_training(tiny_model_dir, task, steps=steps, **settings)
    assert first[0] < mean(rewards[:5]) < first[1]
    assert mean(rewards[-10:]) >= 0.80


@pytest.mark.extended("test_train_step.py: better completions become more probable, equal rewards change no weight")
@pytest.mark.slow
def test_nothing_is_learned_from_shuffled_advantages(tiny_model_dir: Path) -> None:
    rewards = rewards_over_training(tiny_model_dir, "copy6", steps=30, lr=5e-4, is_shuffled=True)
    assert max(mean(rewards[at : at + 10]) for at in range(20)) < 0.50
    assert mean(rewards[-10:]) < mean(rewards[:5]) + 0.03
