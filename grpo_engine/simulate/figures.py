"""Speeds and lengths that a simulation is given: of servers, trainer, weight updates, completions. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

Batching = Literal["continuous", "whole"]
"""`continuous`: requests join and leave at every token, as in vLLM. `whole`: a batch is decoded until its longest
completion ends, and requests wait meanwhile, as in the torch engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpeed:
    """How fast one inference server decodes."""

    points: tuple[tuple[int, float], ...]
    """Tokens a second of all requests together, by the number of sequences that are decoded, in rising order."""
    max_running: int = 256
    """Sequences that are decoded together; the rest waits."""
    batching: Batching = "continuous"
    recomputed_per_s: float = math.inf
    """Tokens a second of what runs that are computed again after a weight update; infinite where nothing is."""

    def tokens_per_s(self, num_running: int) -> float:
        """Of all together: linear between two points, in proportion below the first, constant beyond the last.

        >>> ServerSpeed(points=((1, 100.0), (9, 500.0))).tokens_per_s(5)
        300.0
        """
        place = bisect_right(self.points, num_running, key=lambda point: point[0])
        if place == 0:
            return self.points[0][1] * num_running / self.points[0][0]
        if place == len(self.points):
            return self.points[-1][1]
        (low, slow), (high, fast) = self.points[place - 1 : place + 1]
        return slow + (fast - slow) * (num_running - low) / (high - low)

    def rates(self) -> tuple[float, ...]:
        """Tokens a second of each sequence, by the number of those that run, from 0 on."""
        return (0.0, *(self.tokens_per_s(count) / count for count in range(1, self.max_running + 1)))

    def scaled(self, factor: float) -> ServerSpeed:
        """The same curve, so many times as fast."""
        return replace(self, points=tuple((count, speed * factor) for count, speed in self.points))


BESIDE_SAMPLING = 1.41
"""SmolLM2-135M on one H200 under MPS: a step of 0.155 s by turns, 0.219 s beside vLLM (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpeed:
    """How long one step takes, its weight update not included."""

    tokens_per_s: float
    """Of one rank with its device to itself, prompts included; ranks share the tokens of a step evenly."""
    fetch_s: float = 0.0
    """Of the request for a batch that is there."""
    between_s: float = 0.0
    """From the update to the next request: recording, checkpoints."""
    variation: tuple[float, ...] = (1.0,)
    """Times of recorded steps divided by their mean; each step takes one of them."""
    efficiency: float = 1.0
    """Speed of a rank among several, relative to one alone."""
    beside_sampling: float = BESIDE_SAMPLING
    """Times as long a step takes while a server decodes on its device; only where the layout shares devices."""

    def step_s(self, num_tokens: int, num_ranks: int) -> float:
        """Without variation."""
        return num_tokens / (self.tokens_per_s * num_ranks * (self.efficiency if num_ranks > 1 else 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of prompts and completions: recorded groups, or a log-normal distribution."""

    groups: tuple[tuple[int, ...], ...] = ()
    """Completions of recorded groups; one is drawn for each simulated group."""
    mean: float = 0.0
    """Without recorded groups, of a completion before `longest` cuts it."""
    spread: float = 0.5
    """Of the logarithm."""
    longest: int = 1 << 30
    prompt: int = 0

    def draw(self, num_samples: int, random: Random) -> tuple[int, ...]:
        """Tokens of the completions of one group."""
        if self.groups:
            group = random.choice(self.groups)
            drawn = group if len(group) == num_samples else tuple(random.choices(group, k=num_samples))
            return tuple(min(length, self.longest) for length in drawn)
        centre = math.log(self.mean) - self.spread**2 / 2
        return tuple(
            max(1, min(self.longest, round(random.lognormvariate(centre, self.spread)))) for _ in range(num_samples)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All that is measured, and all that is assumed, of one stack."""

    server: ServerSpeed
    trainer: TrainerSpeed
    lengths: Lengths
    update_s: float
    """In which servers stand still for a weight update, after the decode step or batch in progress."""
    reward_s: float = 0.0
    """From the last completion of a group to its post."""
    sources: tuple[str, ...] = field(default=())
    """Where each figure is from, for people."""


SERVER_8B: Sequence[tuple[int, float]] = ((1, 202.0), (8, 1611.0), (64, 9957.0))
"""Stock vLLM 0.26 on one H200, the 8B Llama shape in bf16, with log-probabilities: docs/benchmarks.md."""
TORCH_SHAPE: Sequence[tuple[int, float]] = (
    (8, 3_200.0),
    (32, 10_500.0),
    (64, 17_000.0),
    (128, 22_700.0),
    (256, 29_000.0),
)
"""The torch engine with `local/tiny` on one core, in CPU time. Only its form is used: a recording has the speed."""
TRAINER_8B = 8_090.0
"""Tokens a second of a rank in a full fine-tuning of that shape, two ranks, AdamW, with updates: docs/many-gpus.md."""
UPDATE_8B_S = 0.040
"""`shared_vllm` under 64 running requests: docs/benchmarks.md."""
