"""Where the time of a trainer step goes on one GPU, beside what each part must cost and the bare model.

    python benchmarks/step.py [--shape local/llama-8b-random] [--case "compile_layers=true micro_batch_tokens=4096"] …
    python benchmarks/step.py --shape local/tiny --device cpu --groups 2 --prompt 8 --completion 16     a rehearsal

Rows are groups of completions that share a prompt, as environments send them, with random tokens; weights are random.
Each case is our `gradient_step` and weight update with these settings, and `bare` cases are the model of transformers:
forward, its own loss and backward over the same rows as padded micro-batches, without optimizer. Phases are between
the points that a rank passes, in milliseconds by events of the GPU's stream (on a CPU by the clock): the median of the
steps after the warm-up. `--kernels N` lists the kernels that take longest, by the profiler, in another step. Bounds:
operations of the model over the card's peak, and bytes that a phase has to move over the card's bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from ranks import random_model
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from grpo_engine.bridges import BridgeModel
from grpo_engine.config import apply_overrides
from grpo_engine.data.batching import Batch, make_batch, plan_rows
from grpo_engine.models.execution import decoder_layers
from grpo_engine.ranks.positions import OwnPosition
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.rehearsal import longest_batch
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee
from grpo_engine.train.utilization import ModelFlops, peak_flops
from grpo_engine.wire.rollouts import ScoredGroup

WARM_UP = 2
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12}
"""Bytes a second, by a part of the card's name; NVIDIA's datasheets."""
UPDATE, PUBLISH = "the update", "the weight update"
OPTIMIZER_STATE_BYTES = {"adamw": 8, "adamw_8bit": 2}
"""Of a parameter: both moments."""


class TimedPosition(OwnPosition):
    """Keeps a mark of the GPU's stream at every phase of a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.marks: list[tuple[str, Any]] = []
        super().__init__()

    def at(self, phase: str, *, is_backward: bool = False) -> None:
        """Mark the beginning of a phase, named without its micro-batch."""
        self.marks.append((phase.partition(" of micro-batch")[0], self._mark()))

    def milliseconds(self) -> dict[str, float]:
        """Of each phase since the last call, micro-batches added up; the last mark ends the last phase."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        took: dict[str, float] = defaultdict(float)
        for (phase, began), (_, ended) in itertools.pairwise(self.marks):
            took[phase] += began.elapsed_time(ended) if self._device.type == "cuda" else 1e3 * (ended - began)
        self.marks = []
        return took

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark


def rows(options: Namespace, vocabulary: int) -> Batch:
    """Groups with a shared prompt, every completion of the same length."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, vocabulary, (count,), generator=generator).tolist()

    groups = []
    for _ in range(options.groups):
        prompt, completions = tokens(options.prompt), [tokens(options.completion) for _ in range(options.group_size)]
        length = options.prompt + options.completion
        groups.append(
            ScoredGroup(
                tokens=[prompt + completion for completion in completions],
                masks=[[-100] * options.prompt + completion for completion in completions],
                scores=[float(number % 2) for number in range(options.group_size)],
                advantages=[[float(number % 2) - 0.5] * length for number in range(options.group_size)],
                inference_logprobs=[[1.0] * options.prompt + [-10.0] * options.completion for _ in completions],
                generation_params={"temperature": 1.0, "logprobs_mode": "processed"},
            )
        )
    return make_batch(groups, seq_len=length)


def bare(options: Namespace, model: PreTrainedModel, batch: Batch, words: list[str]) -> dict[str, Any]:
    """The model alone."""
    settings = dict(word.split("=") for word in words)
    if settings.get("compile_layers") == "true":
        for layer in decoder_layers(model):
            layer.compile(dynamic=False)
    plan = plan_rows(batch.lengths.tolist(), max_tokens=int(settings.get("micro_batch_tokens", 2048)))
    inputs = [batch.inputs[part].to(options.device) for part in plan]

    def step() -> None:
        for tokens in inputs:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    seconds = [timed(step, options) for _ in range(WARM_UP + options.steps)][WARM_UP:]
    model.zero_grad()
    return {"micro_batches": len(inputs), "step_ms": 1e3 * statistics.median(seconds)}


def ours(options: Namespace, model: PreTrainedModel, batch: Batch, words: list[str]) -> dict[str, Any]:
    """A whole step, and its phases."""
    config = TrainConfig.model_validate(
        {
            "model_name": options.shape,
            "dtype": str(model.dtype).removeprefix("torch."),
            "optimizer": "adamw_8bit" if options.device == "cuda" else "adamw",
            "lr": 1e-6,
            "seq_len": options.seq_len,
            "batch_size": 4,
            "micro_batch_tokens": 2048,
            **apply_overrides({}, words),
        }
    )
    attached = BridgeModel(model=model, is_shared=True, policy_version=0, save=lambda folder, tensors: None)
    trainee = Trainee(attached, config)
    position = trainee.ranks.position = TimedPosition(torch.device(options.device))

    def step(batch: Batch = batch) -> None:
        gradient_step(trainee, batch, step=1, policy_version=0)
        position.at(PUBLISH)
        trainee.write_weights()
        position.at("")

    first_s = timed(lambda: step(longest_batch(config)), options)
    phases, seconds = [], []
    for _ in range(WARM_UP + options.steps):
        position.marks = []
        seconds.append(timed(step, options))
        phases.append(position.milliseconds())
    if options.kernels:
        longest_kernels(step, options.kernels)
    reserved = torch.cuda.max_memory_reserved() / 1e9 if options.device == "cuda" else 0.0
    return {
        "step_ms": 1e3 * statistics.median(seconds[WARM_UP:]),
        "step_ms_at_most": 1e3 * max(seconds[WARM_UP:]),
        "first_step_s": first_s,
        "phases_ms": {
            name: round(statistics.median(each.get(name, 0.0) for each in phases[WARM_UP:]), 1)
            for name in phases[-1]
            if name
        },
        "reserved_gb": reserved,
        "bounds_ms": bounds(model, batch, config, options),
    }


def bounds(model: PreTrainedModel, batch: Batch, config: TrainConfig, options: Namespace) -> dict[str, float]:
    """What the card's peak and bandwidth allow: milliseconds by part."""
    device = torch.device(options.device)
    peak = peak_flops(device, model.dtype)
    name = torch.cuda.get_device_name() if options.device == "cuda" else ""
    bandwidth = next((each for part, each in BANDWIDTH.items() if part in name), None)
    if peak is None or bandwidth is None:
        return {}
    own = sum(each.numel() for each in model.parameters() if each.requires_grad)
    positions = options.groups * (options.prompt + options.group_size * options.completion)
    flops = ModelFlops(model).of(
        positions=positions, labels=int(batch.mask.sum()), mean_length=options.prompt + options.completion
    )
    gradient, master = (2 if config.gradient_dtype == "bfloat16" else 4), 4
    update = 2 * gradient + 2 * master + 2 * OPTIMIZER_STATE_BYTES.get(config.optimizer, 0)  # the norm reads once more
    parts = {"forward, loss and backward": flops / peak, UPDATE: own * update / bandwidth}
    parts |= {"a gradient accumulated": own * (2 + 2 * gradient) / bandwidth, PUBLISH: own * (master + 2) / bandwidth}
    return {part: round(1e3 * seconds, 1) for part, seconds in parts.items()}


def timed(step: Callable[[], None], options: Namespace) -> float:
    """Seconds of a call, the GPU's work included."""
    began = time.perf_counter()
    step()
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def longest_kernels(step: Callable[[], None], count: int) -> None:
    """Print the kernels of one step that take longest together."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda each: -each.self_device_time_total)
    print(json.dumps({"kernels_ms": round(sum(each.self_device_time_total for each in events) / 1e3, 1)}))
    for each in events[:count]:
        print(f"  {each.self_device_time_total / 1e3:8.1f} ms {each.count:6d} x  {each.key[:110]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="local/llama-8b-random")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--case", action="append", default=[], help="settings, or `bare` and settings; repeat")
    options = parser.parse_args()
    options.num_layers = options.hidden_size = None
    options.row_tokens = options.prompt + options.completion
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    for case in options.case or ["bare", "bare compile_layers=true", "", "compile_layers=true"]:
        torch.manual_seed(0)
        torch.compiler.reset()
        model = random_model(options, options.device, dtype)
        batch = rows(options, model.config.vocab_size)
        num_tokens = int(batch.lengths.sum())
        kind, *words = case.split() if case.split()[:1] == ["bare"] else ["ours", *case.split()]
        try:
            figures = {"bare": bare, "ours": ours}[kind](options, model, batch, words)
            figures["tokens_per_s"] = round(1e3 * num_tokens / figures["step_ms"])
        except torch.OutOfMemoryError as error:
            figures = {"failed": str(error)[:120]}
        rounded = {name: round(value, 1) if isinstance(value, float) else value for name, value in figures.items()}
        print(json.dumps({"case": f"{kind} {' '.join(words)}".strip(), "tokens": num_tokens, **rounded}), flush=True)
        del model
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
