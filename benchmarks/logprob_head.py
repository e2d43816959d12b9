"""Time and memory of the output head: log-probabilities, entropy and a GRPO loss, forward and backward, beside peers.

    .venv/bin/python benchmarks/logprob_head.py                                    # 4,096 × 128,256 × 1,024 on the CPU
    .venv/bin/python benchmarks/logprob_head.py --dtype bfloat16
    .venv/bin/python benchmarks/logprob_head.py --device cuda                      # 16 × 1,024 × 128,256 × 4,096, bf16

`plain` is what one writes first: all logits in fp32, log-softmax, the labels gathered, the entropy without a graph
unless the loss has it, autograd backwards. `Liger` is its fused GRPO loss, where it is installed. Every measurement is
a process of its own, with as many threads, taken in turns. On the CPU, time is that of the processor (others may use
the machine too), and memory the highest resident above what there was once the inputs were made (the kernel's own
mark, reset there), with the gradients, which all must return. On a GPU, time is that of the clock, and memory all that
torch had allocated at a time, inputs and gradients included. Times are medians of the rounds, ratios medians of each
round's ratio.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from grpo_engine.algo.logprobs import token_logprobs
from grpo_engine.algo.loss import LossConfig, LossInputs, policy_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is measured, and its sizes."""

    device: str
    rows: int
    row_tokens: int
    vocabulary: int
    hidden: int
    dtype: str
    threads: int
    warm_up: int
    """Warm-up passes: a GPU compiles its kernels in the first."""
    passes: int
    """Measured passes, which are averaged."""
    entropy_coef: float
    frozen: bool
    """The weight gets no gradient, as with adapters."""


CLIP_HIGH = 1e4
TARGETS = {"cpu": "memory at most 0.10 × plain, time at most 1.2 ×", "cuda": "memory at most 7.8 GB, time below plain"}


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One batch of hidden states before the output layer."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    entropy_coef: float

    @classmethod
    def of(cls, shape: Shape) -> Problem:
        random = torch.Generator(shape.device).manual_seed(0)
        options = {"generator": random, "device": shape.device, "dtype": getattr(torch, shape.dtype)}
        hidden = torch.randn(shape.rows, shape.row_tokens, shape.hidden, **options).requires_grad_()
        weight = torch.randn(shape.vocabulary, shape.hidden, **options).mul_(shape.hidden**-0.5)
        labels = torch.randint(shape.vocabulary, hidden.shape[:2], generator=random, device=shape.device)
        advantages = torch.randn(shape.rows, generator=random, device=shape.device)
        rollout = torch.full(labels.shape, -math.log(shape.vocabulary) - 0.5, device=shape.device)
        return cls(hidden, weight.requires_grad_(not shape.frozen), labels, rollout, advantages, shape.entropy_coef)

    @property
    def config(self) -> LossConfig:
        """Normalised over tokens, as Liger's `bnpo`, and never clipped: each token has a gradient."""
        return LossConfig(aggregation="token_mean", clip_low=1.0, clip_high=CLIP_HIGH, entropy_coef=self.entropy_coef)

    def inputs(self, logprobs: Tensor, entropy: Tensor | None = None) -> LossInputs:
        """What the loss needs beside the present log-probabilities."""
        mask = torch.ones_like(self.labels, dtype=torch.bool)
        return LossInputs(logprobs, self.rollout_logprobs, self.advantages, mask, entropy=entropy)


def two_steps(problem: Problem) -> Tensor:
    """`token_logprobs`, then `policy_loss`."""
    numbers = token_logprobs(problem.hidden, problem.weight, problem.labels)
    return policy_loss(problem.inputs(*numbers), problem.config).loss


def plain(problem: Problem) -> Tensor:
    """All logits at once."""
    logits = (problem.hidden @ problem.weight.T).float()
    logprobs = torch.log_softmax(logits, -1)
    del logits
    with torch.set_grad_enabled(problem.entropy_coef != 0):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(-1, problem.labels[..., None]).squeeze(-1)
    return policy_loss(problem.inputs(chosen, entropy), problem.config).loss


def liger(problem: Problem) -> Tensor:
    """Liger's fused loss, which gives no entropy; one row of tokens at a time, as it does unless told otherwise."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, loss_type="bnpo", epsilon_low=1.0, epsilon_high=CLIP_HIGH
    )
    return loss(
        problem.hidden,
        problem.weight,
        problem.labels,
        torch.ones_like(problem.labels),
        problem.advantages,
        old_per_token_logps=problem.rollout_logprobs,
    )[0]


VARIANTS: dict[str, Callable[[Problem], Tensor]] = {
    "plain": plain,
    "two steps": two_steps,
    "Liger": liger,
}


def measure(variant: str, shape: Shape) -> dict[str, float]:
    """Seconds and bytes of a forward and backward pass, in this process; and the loss and gradient it gave."""
    torch.set_num_threads(shape.threads)
    problem = Problem.of(shape)
    for _ in range(shape.warm_up):
        _pass(variant, problem)
    if shape.device == "cpu":
        small = Problem.of(Shape(**asdict(shape) | {"rows": 1, "row_tokens": 64, "vocabulary": 512}))
        _pass(variant, small)
        Path("/proc/self/clear_refs").write_text("5")  # sets the mark of the highest resident memory back
    else:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    before = _status_bytes("VmRSS")
    clock = time.process_time if shape.device == "cpu" else time.perf_counter
    started = clock()
    for _ in range(shape.passes):
        loss = _pass(variant, problem)
    if shape.device == "cuda":
        torch.cuda.synchronize()
    seconds = (clock() - started) / shape.passes
    memory = torch.cuda.max_memory_allocated() if shape.device == "cuda" else _status_bytes("VmHWM") - before
    assert problem.hidden.grad is not None
    norm = problem.hidden.grad.float().norm().item()
    return {"seconds": seconds, "bytes": memory, "loss": loss.item(), "gradient_norm": norm}


def _pass(variant: str, problem: Problem) -> Tensor:
    problem.hidden.grad = problem.weight.grad = None
    loss = VARIANTS[variant](problem)
    loss.backward()
    return loss.detach()


def _status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def rounds(variants: list[str], shape: Shape, repetitions: int) -> Iterator[dict[str, dict[str, float]]]:
    """Each variant once a round, each in a fresh process."""
    for _ in range(repetitions):
        figures = {}
        for variant in variants:
            command = [sys.executable, __file__, "--worker", variant, json.dumps(asdict(shape))]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode == 0:
                figures[variant] = json.loads(done.stdout.splitlines()[-1])
            else:
                print(f"{variant}: exit code {done.returncode}")
        yield figures


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(measure(sys.argv[2], Shape(**json.loads(sys.argv[3])))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", type=int, help="sequences; 4 on a CPU, 16 on a GPU")
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, help="1,024 on a CPU, 4,096 on a GPU")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="float32, on a GPU bfloat16")
    parser.add_argument("--entropy-coef", type=float, default=0.0, help="with one, the entropy is in the loss too")
    parser.add_argument("--frozen", action="store_true", help="no gradient for the weight")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    shape = Shape(
        device=given.device,
        rows=given.rows or (16 if on_gpu else 4),
        row_tokens=given.row_tokens,
        vocabulary=given.vocabulary,
        hidden=given.hidden or (4096 if on_gpu else 1024),
        dtype=given.dtype or ("bfloat16" if on_gpu else "float32"),
        threads=given.threads,
        warm_up=2 if on_gpu else 0,
        passes=5 if on_gpu else 1,
        entropy_coef=given.entropy_coef,
        frozen=given.frozen,
    )
    variants = [
        each for each in given.variants if each != "Liger" or (on_gpu and importlib.util.find_spec("liger_kernel"))
    ]
    print(
        f"{shape.rows} × {shape.row_tokens} tokens, {shape.vocabulary} words, hidden {shape.hidden}, {shape.dtype}, "
        f"{shape.device}, {shape.threads} threads; target: {TARGETS[shape.device]}"
    )
    taken = list(rounds(variants, shape, given.repetitions))
    print(f"{'':12}{'time':>10}{'memory':>12}{'× plain: time':>16}{'memory':>9}{'loss':>13}{'|gradient|':>13}")
    for variant in variants:
        figures = [each[variant] for each in taken if variant in each]
        if not figures:
            continue

        def median(name: str, figures: list[dict[str, float]] = figures) -> float:
            return statistics.median(each[name] for each in figures)

        def ratio(name: str, variant: str = variant) -> str:
            pairs = [each[variant][name] / each["plain"][name] for each in taken if {variant, "plain"} <= each.keys()]
            return f"{statistics.median(pairs):.2f}" if pairs else "-"

        print(
            f"{variant:12}{median('seconds'):8.3f} s{median('bytes') / 1e9:9.2f} GB{ratio('seconds'):>16}"
            f"{ratio('bytes'):>9}{median('loss'):13.6f}{median('gradient_norm'):13.6f}"
        )


if __name__ == "__main__":
    main()
