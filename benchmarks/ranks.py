"""Speed and memory of a trainer step on one and several ranks, beside the bare model in the same run.

    python benchmarks/ranks.py [--shape local/llama-8b-random] [--ranks 1 2] [--set optimizer=adamw_8bit …]
    python benchmarks/ranks.py --shape local/tiny --device cpu --rows 8 --row-tokens 48   rehearses it without a GPU
    python benchmarks/ranks.py --shape local/tiny --device cpu --kinds ours --total-rows 128 --row-tokens 24 \\
        --micro-batch-tokens 1600 --steps 50 --rounds 3   CPU seconds of two ranks for the same tokens

The same rows on every rank, whatever their number, so that ideal scaling is the same step time; with `--total-rows` the
same rows a step, so that ideal scaling is the same CPU time. `bare` is the model of transformers on one device:
forward, its own loss, backward, without optimizer. `sharded` is the same under FSDP2 with torch's fused AdamW, as a
plain training script has it. `ours` is a whole `gradient_step` and the update. Weights are random. One line of JSON a
case; tokens/s are of one rank, from the median of the steps after the first two.

CPU seconds are user and system time of all threads of all ranks: `cpu_s_to_import` until torch and our modules are
loaded, `cpu_s_to_prepare` from there to the first step (meeting, model, optimizer, batch), `cpu_s_a_step` the median of
the steps after the first two. With several numbers of ranks, the last line of a kind has the CPU time of the last
number in that of the first, a step, as the median of the rounds, and of all processes before the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_engine.ranks.launching import launch_ranks
from grpo_engine.ranks.place import WORLD_SIZE, rank_place

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from grpo_engine.ranks.group import RankGroup

KINDS = ("bare", "sharded", "ours")
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="local/llama-8b-random")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--num-layers", type=int, help="instead of the shape's; 62 of Llama 8B's are 14.6 B parameters")
    parser.add_argument("--hidden-size", type=int, help="instead of the shape's, with an MLP of three times that")
    parser.add_argument("--rows", type=int, default=8, help="completions a rank and step")
    parser.add_argument("--total-rows", type=int, help="completions a step, divided among the ranks")
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1, help="measurements of every case, in turns")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of one step of rank 0, for Perfetto")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the trainer")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--figures", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        options.rows = options.total_rows // int(os.environ.get(WORLD_SIZE, 1)) if options.total_rows else options.rows
        measure(options)
        return
    for kind in options.kinds:
        numbers = [1] if kind == "bare" else options.ranks
        found = [{n: run_case(kind, n) for n in numbers} for _ in range(options.rounds)]
        complete = [figures for figures in found if all(figures.values())]
        if len(numbers) > 1 and complete:
            print(json.dumps({"kind": kind, **compared(complete, numbers[0], numbers[-1])}), flush=True)


def run_case(kind: str, num_ranks: int) -> dict[str, Any]:
    """The figures of one case, which are printed too; empty if it failed."""
    with tempfile.NamedTemporaryFile("r") as file:
        argv = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--case", kind, "--figures", file.name]
        failed = launch_ranks(argv, num_local=num_ranks).code
        text = json.dumps({"kind": kind, "ranks": num_ranks, "failed": True}) if failed else file.read()
    print(text, flush=True)
    figures: dict[str, Any] = {} if failed else json.loads(text)
    return figures


def compared(rounds: Sequence[Mapping[int, Mapping[str, Any]]], few: int, many: int) -> dict[str, Any]:
    """The CPU time of `many` ranks in that of `few`: the median of the rounds, and all of them."""

    def ratios(*names: str) -> list[float]:
        return [sum(each[many][n] for n in names) / sum(each[few][n] for n in names) for each in rounds]

    steps, starts = ratios("cpu_s_a_step"), ratios("cpu_s_to_import", "cpu_s_to_prepare")
    return {
        "ranks": [few, many],
        "cpu_ratio_a_step": round(statistics.median(steps), 3),
        "cpu_ratio_to_start": round(statistics.median(starts), 2),
        "cpu_ratios_a_step": [round(each, 3) for each in steps],
        "load": [round(each, 1) for each in os.getloadavg()],
    }


def measure(options: argparse.Namespace) -> None:
    """One rank of one case; rank 0 writes the figures."""
    import torch
    import transformers  # noqa: F401  (loaded here, so that its time is not counted as that of making the model)

    from grpo_engine.models.devices import limit_threads
    from grpo_engine.ranks.group import RankGroup
    from grpo_engine.train import trainee  # noqa: F401

    place = rank_place(os.environ)
    local = place.local_rank if place else 0
    device = f"cuda:{local}" if options.device == "cuda" else "cpu"
    torch.manual_seed(0)
    import_cpu_s = time.process_time()
    limit_threads(device, 1 if device == "cpu" else None)
    with closing(RankGroup(place, device=device)) as ranks:
        step = ours(options, ranks, device) if options.case == "ours" else plain(options, ranks, device)
        if options.trace and ranks.leads:
            step = traced(step, options.trace)
        times, cpu_times, prepare_cpu_s = [], [], time.process_time() - import_cpu_s
        for number in range(options.steps):
            began, began_cpu = time.perf_counter(), time.process_time()
            step(number)
            if device != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            cpu_times.append(time.process_time() - began_cpu)
        peak = torch.cuda.max_memory_allocated() if device != "cpu" else 0
        peaks = ranks.gather(peak)
        cpu_s = ranks.gather((import_cpu_s, prepare_cpu_s, statistics.median(cpu_times[WARM_UP:])))
        step_s = statistics.median(times[WARM_UP:])
        if ranks.leads:
            figures = {
                "kind": options.case,
                "ranks": ranks.size,
                "tokens_per_second_a_rank": round(options.rows * options.row_tokens / step_s),
                "step_s": round(step_s, 3),
                "cpu_s_a_step": round(sum(each[2] for each in cpu_s), 4),
                "cpu_s_to_import": round(sum(each[0] for each in cpu_s), 1),
                "cpu_s_to_prepare": round(sum(each[1] for each in cpu_s), 1),
                "peak_gb_a_rank": [round(peak / 1e9, 1) for peak in peaks],
                "settings": options.set if options.case == "ours" else [],
            }
            Path(options.figures).write_text(json.dumps(figures))


def traced(step: Callable[[int], None], file: str) -> Callable[[int], None]:
    """The step, whose fourth call is traced."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    def call(number: int) -> None:
        if number != WARM_UP + 1:
            step(number)
            return
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            step(number)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        seen.export_chrome_trace(file)

    return call


def random_model(options: argparse.Namespace, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of that shape with random weights, made on the device."""
    import torch
    from transformers import AutoModelForCausalLM

    from grpo_engine.models.loading import load_config
    from grpo_engine.models.local import RANDOM_MODEL_BYTES
    from grpo_engine.models.random_models import published_shape

    is_random = options.shape in RANDOM_MODEL_BYTES
    config = published_shape(options.shape) if is_random else load_config(options.shape)
    config.num_hidden_layers = options.num_layers or config.num_hidden_layers
    if options.hidden_size:
        config.hidden_size, config.intermediate_size = options.hidden_size, 3 * options.hidden_size
        config.num_attention_heads = config.num_key_value_heads = options.hidden_size // config.head_dim
    config.max_position_embeddings = max(config.max_position_embeddings, options.row_tokens)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def plain(options: argparse.Namespace, ranks: RankGroup, device: str) -> Callable[[int], None]:
    """A step of the bare model, or of a plain FSDP2 script."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from grpo_engine.models.execution import decoder_layers

    is_sharded = options.case == "sharded"
    compute = torch.bfloat16 if device != "cpu" else torch.float32
    model = random_model(options, device, torch.float32 if is_sharded and ranks.size > 1 else compute)
    optimizer = None
    if is_sharded:
        if ranks.size > 1:
            policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
            for module in [*decoder_layers(model), model]:
                fully_shard(module, mesh=ranks.mesh(), mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    model.train()
    if "gradient_checkpointing=true" in options.set:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "compile_layers=true" in options.set:
        for layer in decoder_layers(model):
            layer.compile()
    tokens = torch.randint(0, model.config.vocab_size, (options.rows, options.row_tokens), device=device)
    micro_batches = tokens.split(options.micro_batch_tokens // options.row_tokens)

    def step(number: int) -> None:
        for rows in micro_batches:
            model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()

    return step


def ours(options: argparse.Namespace, ranks: RankGroup, device: str) -> Callable[[int], None]:
    """A step of the trainer; all ranks run it at once."""
    import torch

    from grpo_engine.bridges import BridgeModel
    from grpo_engine.config import apply_overrides
    from grpo_engine.data.batching import make_batch
    from grpo_engine.models.sharded import shard_model
    from grpo_engine.train.config import TrainConfig
    from grpo_engine.train.main import sharding_of
    from grpo_engine.train.step import gradient_step
    from grpo_engine.train.trainee import Trainee
    from grpo_engine.wire.rollouts import ScoredGroup

    compute = "bfloat16" if device != "cpu" else "float32"
    config = TrainConfig.model_validate(
        {
            "model_name": options.shape,
            "dtype": compute,
            "optimizer": "adamw",
            "lr": 1e-6,
            "seq_len": options.row_tokens + 1,
            "micro_batch_tokens": options.micro_batch_tokens,
            **apply_overrides({}, options.set),
        }
    )
    model = random_model(options, device, getattr(torch, compute))
    if ranks.size > 1:
        sharding = sharding_of(config)
        shard_model(
            model,
            ranks.mesh(),
            shard_dtype=getattr(torch, compute) if sharding.rounds_weights else torch.float32,
            reshard_after_forward=not sharding.keeps_gathered,
            offload=sharding.offloads,
        )
        torch.cuda.empty_cache()
    trainee = Trainee(
        BridgeModel(model=model, is_shared=False, policy_version=0, save=lambda folder, tensors: None), config, ranks
    )
    length, vocabulary = options.row_tokens + 1, model.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, vocabulary, (options.rows * ranks.size, length), generator=generator).tolist()
    groups = [
        ScoredGroup(
            tokens=[row],
            masks=[[-100, *row[1:]]],
            scores=[0.0],
            advantages=[[float(number % 2) - 0.5] * length],
            inference_logprobs=[[1.0] + [-10.0] * (length - 1)],
            generation_params={"temperature": 1.0, "logprobs_mode": "processed"},
        )
        for number, row in enumerate(rows)
    ]
    batch = make_batch(groups, seq_len=length)

    def step(number: int) -> None:
        with ranks.together(ranks.next_work()) if not ranks.leads else nullcontext():
            gradient_step(trainee, batch, step=number, policy_version=0)
        trainee.write_weights()

    return step


if __name__ == "__main__":
    main()
