"""What a simulated run comes to, and the server speed that makes it come to what was recorded. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from grpo_engine.retrying import never
from grpo_engine.simulate.figures import Figures
from grpo_engine.simulate.layout import Layout
from grpo_engine.simulate.recording import Recording
from grpo_engine.simulate.stack import Step, simulate

_ROUNDS = 24
_WIDEST = 1e4
"""By how much a server may be faster or slower than its form says."""
_CLOSE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Means over the counted steps of one simulated run."""

    layout: Layout
    interval_s: float
    """Seconds a step."""
    tokens_per_s: float
    """Of completions that are trained on."""
    sequences_per_s: float
    trainer_busy: float
    """Share of a step in which the trainer has a batch."""
    generation_busy: float
    """Share of the time in which environments have something to do."""
    staleness_mean: float
    staleness_max: float
    """The mean over steps of the oldest token in each, in versions."""
    stalest: int
    """The oldest token of all."""
    dropped_per_step: float
    """Groups that were too old."""

    @property
    def trainer_waits(self) -> float:
        """Share of the time."""
        return 1 - self.trainer_busy

    @property
    def generation_waits(self) -> float:
        """Share of the time."""
        return 1 - self.generation_busy


def run(layout: Layout, figures: Figures, *, is_late: Callable[[], bool] = never) -> Result:
    """Simulate.

    Raises:
        NoBatch, TooMany, TooLong: as `simulate`.
    """
    return summed_up(layout, simulate(layout, figures, is_late=is_late))


def summed_up(layout: Layout, steps: Sequence[Step]) -> Result:
    """The means over steps."""
    interval_s = (steps[-1].ended_at - steps[0].ended_at) / (len(steps) - 1)
    since_s = sum(step.since_s for step in steps)
    return Result(
        layout=layout,
        interval_s=interval_s,
        tokens_per_s=fmean(step.num_tokens for step in steps) / interval_s,
        sequences_per_s=layout.batch_size / interval_s,
        trainer_busy=fmean(step.trainer_busy for step in steps),
        generation_busy=sum(step.generation_s for step in steps) / since_s if since_s else 1.0,
        staleness_mean=fmean(step.staleness_mean for step in steps),
        staleness_max=fmean(step.staleness_max for step in steps),
        stalest=max(step.staleness_max for step in steps),
        dropped_per_step=fmean(step.num_dropped for step in steps),
    )


def calibrated(
    recording: Recording, layout: Layout, figures: Figures, *, is_late: Callable[[], bool] = never
) -> Figures:
    """The figures with a server as fast as it must have been, since no run records it by itself.

    The run is simulated as it was recorded. Where environments waited for the trainer, the time in which they had
    something to do must come out; where they never did, the throughput.

    Raises:
        NoBatch, TooMany, TooLong: as `simulate`.
    """
    goes_by_busy = recording.generation_busy is not None and recording.generation_busy < 1 - _CLOSE
    goal_s = recording.generation_s if goes_by_busy else recording.interval_s
    server = figures.server
    slow, fast = 1.0 / _WIDEST, _WIDEST
    for _ in range(_ROUNDS):  # bisection: while training is the slower side, a step says nothing of how far to go
        factor = math.sqrt(slow * fast)
        figures = replace(figures, server=server.scaled(factor))
        result = run(layout, figures, is_late=is_late)
        came_to_s = result.interval_s * (result.generation_busy if goes_by_busy else 1.0)
        if abs(came_to_s / goal_s - 1) < _CLOSE:
            break
        slow, fast = (factor, fast) if came_to_s > goal_s else (slow, factor)
    return figures
