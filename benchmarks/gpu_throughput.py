"""Tokens a second and peak memory of our training step on one GPU: full fine-tuning with recompute, rows of 16k tokens.

    python benchmarks/gpu_throughput.py [--rows 2] [--row-tokens 16384] [--steps 4] [--peer] [SETTING=VALUE …]

The model has Qwen3-0.6B's shape and random weights, so that no hub is needed; the step is the trainer's own from a
checked batch to updated weights: forward, loss, backward, clipping, AdamW on fp32 masters, and the copy into bf16
weights. Only fetching and handing over are left out. `--group N` makes groups of N completions that share a prompt of
`--prompt` tokens, `--lengths A-B` completions of that many tokens. `--peer` runs TRL on the same rows and GPU
afterwards (`_trl_gpu.py`, which says what differs). Further words are settings of `grpo-engine train`.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from grpo_engine.bridges import BridgeModel
from grpo_engine.config import apply_overrides
from grpo_engine.data.batching import make_batch
from grpo_engine.models.devices import avoid_fragments, limit_threads
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.rollouts import ScoredGroup

TARGET_TOKENS_PER_S, TARGET_GIB = 25_000, 12.5
VOCABULARY = 151_936


def model(dtype: torch.dtype, device: str = "cuda", **other_shape: int) -> Qwen3ForCausalLM:
    """Qwen3-0.6B's shape: 596 M parameters, embeddings tied."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 40_960}
    config = Qwen3Config(vocab_size=VOCABULARY, tie_word_embeddings=True, **shape | other_shape)
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM(config).to(dtype)


def made_up_groups(args: argparse.Namespace, seed: int) -> list[ScoredGroup]:
    """Random tokens in groups, with random rewards."""
    rng = random.Random(seed)
    groups = []
    for _ in range(args.rows // args.group):
        prompt = [rng.randrange(VOCABULARY) for _ in range(args.prompt)]
        lengths = [rng.randint(*length_range(args)) for _ in range(args.group)]
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
    return groups


def row_flags() -> argparse.ArgumentParser:
    """Flags for the rows, shared by both sides."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--row-tokens", type=int, default=16_384)
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--lengths", default="", help="A-B; absent: what fills a row")
    parser.add_argument("--steps", type=int, default=4)
    return parser


def length_range(args: argparse.Namespace) -> tuple[int, int]:
    """Tokens of the shortest and of the longest completion."""
    full = args.row_tokens - args.prompt
    low, _, high = args.lengths.partition("-")
    return (int(low), int(high)) if args.lengths else (full, full)


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """Our figures."""
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
    avoid_fragments(os.environ)
    limit_threads(config.device, config.threads)
    trained = model(torch.bfloat16)
    trainee = Trainee(
        BridgeModel(model=trained, is_shared=False, policy_version=0, save=lambda folder, tensors: None), config
    )
    seconds, tokens = [], []
    for step in range(args.steps + 1):
        batch = make_batch(made_up_groups(args, seed=step), seq_len=args.row_tokens)
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
    return {
        "tokens_per_s": round(sum(tokens[1:]) / sum(seconds[1:])),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_step_s": round(seconds[0], 1),
        "step_s": [round(s, 3) for s in seconds[1:]],
        "tokens": tokens[1:],
        "loss": result.metrics["train/loss"],
        "grad_norm": result.metrics["train/grad_norm"],
    }


def theirs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """TRL's figures, one entry a variant; a variant that failed has `failed` instead."""
    command = [sys.executable, str(Path(__file__).with_name("_trl_gpu.py"))]
    flags = ("rows", "row_tokens", "group", "prompt", "lengths", "steps")
    command += [f"--{flag.replace('_', '-')}={getattr(args, flag)}" for flag in flags]
    figures = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
        for line in peer.stdout or ():
            print(line, end="", flush=True)
            if line.startswith("{"):
                figures.append(json.loads(line))
    if peer.returncode:
        raise SystemExit(f"TRL's side ended with exit code {peer.returncode}; what it wrote stands above")
    return figures


def print_table(own: dict[str, Any], peers: list[dict[str, Any]]) -> None:
    print(f"{'':<28}{'tokens/s':>10}{'GiB':>8}   ours is")
    print(f"{'ours':<28}{own['tokens_per_s']:>10,}{own['peak_gib']:>8.2f}")
    for peer in peers:
        name = f"TRL, {peer['variant']}"
        if "failed" in peer:
            print(f"{name:<28}  failed: {peer['failed']}")
        else:
            quicker = own["tokens_per_s"] / peer["tokens_per_s"]
            smaller = own["peak_gib"] / peer["peak_gib"]
            print(
                f"{name:<28}{peer['tokens_per_s']:>10,}{peer['peak_gib']:>8.2f}"
                f"   {quicker:.2f} × as quick, in {smaller:.2f} × the memory"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[row_flags()]
    )
    parser.add_argument("--peer", action="store_true", help="TRL too, in the same run on the same GPU")
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    own = ours(args)
    print(json.dumps(own))
    met = own["tokens_per_s"] >= TARGET_TOKENS_PER_S and own["peak_gib"] <= TARGET_GIB
    print(
        f"{own['tokens_per_s']:,} tokens/s at {own['peak_gib']:.2f} GiB (target {TARGET_TOKENS_PER_S:,} at "
        f"{TARGET_GIB}: {'met' if met else 'missed'})",
        flush=True,
    )
    if args.peer and importlib.util.find_spec("trl") is None:
        print("TRL: not installed here (.venv/bin/pip install -c constraints.txt -e '.[peers]')")
    elif args.peer:
        gc.collect()
        torch.cuda.empty_cache()  # the peer is another process and needs this memory
        print_table(own, theirs(args))


if __name__ == "__main__":
    main()
