"""Tokens a second and peak memory of our training step on one GPU: full fine-tuning with recompute, rows of 16k tokens.

    python benchmarks/gpu_throughput.py [--rows 2] [--row-tokens 16384] [--steps 4] [--compile-layers] [SETTING=VALUE …]

The model has Qwen3-0.6B's shape and random weights, so that no hub is needed; the step is the trainer's own from a
checked batch to updated weights: forward, loss, backward, clipping, AdamW on fp32 masters, and the copy into bf16
weights. Only fetching and handing over are left out. `--group N` makes groups of N completions that share a prompt of
`--prompt` tokens, `--lengths A-B` completions of that many tokens. Further words are settings of `grpo-engine train`.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from grpo_engine.bridges import BridgeModel
from grpo_engine.config import apply_overrides
from grpo_engine.data.batching import Batch, make_batch
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.rollouts import ScoredGroup

TARGET_TOKENS_PER_S, TARGET_GIB = 25_000, 12.5
VOCABULARY = 151_936


def model() -> Qwen3ForCausalLM:
    """Qwen3-0.6B's shape: 596 M parameters, embeddings tied."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Qwen3ForCausalLM(config).to(torch.bfloat16)


def made_up_batch(args: argparse.Namespace, seed: int) -> Batch:
    """Random tokens in groups, with random rewards."""
    rng = random.Random(seed)
    groups = []
    for _ in range(args.rows // args.group):
        prompt = [rng.randrange(VOCABULARY) for _ in range(args.prompt)]
        lengths = [rng.randint(*args.lengths) for _ in range(args.group)]
        completions = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
        groups.append(
            ScoredGroup(
                tokens=[prompt + c for c in completions],
                masks=[[-100] * len(prompt) + c for c in completions],
                scores=[rng.random() for _ in completions],
                inference_logprobs=[[1.0] * len(prompt) + [-12.0] * len(c) for c in completions],
                advantages=[[rng.gauss(0, 1)] * (len(prompt) + len(c)) for c in completions],
                generation_params={"temperature": 1.0, "logprobs_mode": "processed"},
            )
        )
    return make_batch(groups, seq_len=args.row_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--row-tokens", type=int, default=16_384)
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--lengths", default="", help="A-B; absent: what fills a row")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    full = args.row_tokens - args.prompt
    args.lengths = tuple(map(int, args.lengths.split("-"))) if args.lengths else (full, full)
    table = {
        "model_name": "random/qwen3-0.6b-shape",
        "seq_len": args.row_tokens,
        "micro_batch_tokens": args.row_tokens,
        "optimizer": "adamw",
        "gradient_checkpointing": True,
        "lr": 1e-6,
        "device": "cuda",
        "training_steps": 10**6,
    }
    config = TrainConfig.model_validate(apply_overrides(table, args.settings))
    trained = model()
    trainee = Trainee(
        BridgeModel(model=trained, is_shared=False, policy_version=0, save=trained.save_pretrained), config
    )
    seconds, tokens = [], []
    for step in range(args.steps + 1):
        batch = made_up_batch(args, seed=step)
        torch.cuda.synchronize()
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        result = gradient_step(trainee, batch, step=step, policy_version=step)
        trainee.write_weights()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        tokens.append(int(batch.lengths.sum()) + batch.num_sequences)
        assert result.applied, result.metrics
    rate = sum(tokens[1:]) / sum(seconds[1:])
    peak_gib = torch.cuda.max_memory_allocated() / 2**30
    figures = {
        "tokens_per_s": round(rate),
        "peak_gib": round(peak_gib, 2),
        "first_step_s": round(seconds[0], 1),
        "step_s": [round(s, 3) for s in seconds[1:]],
        "tokens": tokens[1:],
        "loss": result.metrics["train/loss"],
        "grad_norm": result.metrics["train/grad_norm"],
    }
    print(json.dumps(figures))
    met = rate >= TARGET_TOKENS_PER_S and peak_gib <= TARGET_GIB
    print(
        f"{rate:,.0f} tokens/s at {peak_gib:.2f} GiB (target {TARGET_TOKENS_PER_S:,} at {TARGET_GIB}: "
        f"{'met' if met else 'missed'})"
    )


if __name__ == "__main__":
    main()
