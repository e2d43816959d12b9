"""Which settings are hopeless, by asynchronous successive halving (ASHA; Li et al. 2018, arXiv 1810.05934). Pure.

Rungs are at `min_steps`, `min_steps · eta`, `min_steps · eta²` … steps. When a run reaches a rung, its settings are
compared with all that have reached it before: unless their reward is among the best 1/eta there, they are hopeless, and
their runs end. Nothing is waited for: the first settings at a rung go on.

A verdict follows from the metrics of the runs alone: each run is judged by what was known when it reached the rung. So
a sweep that goes on after a kill comes to the same verdicts. Runs of one combination of settings with several seeds
count as one, by their mean, and end together: to end single seeds would leave the lucky ones in the table.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import floor
from statistics import fmean

from pydantic import Field

from grpo_engine.config import Config
from grpo_engine.wire.metrics import MetricsLine
from grpo_tui.view.metrics.summary import WINDOW, reward_name, summarized


class Halving(Config):
    """The rule by which a sweep ends hopeless points early."""

    eta: float = Field(3.0, ge=2.0, le=100.0)
    """At each rung the best 1/eta go on; the next rung is eta times as far."""
    min_steps: int = Field(20, ge=1)
    """Optimizer steps to the first rung."""

    def rungs(self, last_step: int) -> list[int]:
        """The steps of all rungs up to a step, in rising order."""
        rungs, step = [], float(self.min_steps)
        while round(step) <= last_step:
            rungs.append(round(step))
            step *= self.eta
        return rungs


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRung:
    """A run at a rung."""

    time: float
    """When it got there, in Unix seconds."""
    reward: float
    """Mean over the last steps up to it."""


Climbed = Mapping[int, AtRung]
"""A run at each rung that it has reached, by step."""


def climbed(lines: Sequence[MetricsLine], halving: Halving) -> dict[int, AtRung]:
    """A run at its rungs, from the metrics of all its steps; nothing where it measures no reward."""
    name = reward_name(lines)
    if name is None:
        return {}
    found: dict[int, AtRung] = {}
    for rung in halving.rungs(lines[-1].step):
        summary = summarized([line for line in lines if line.step <= rung], name, WINDOW)
        if summary is not None:
            reached = next(line for line in lines if line.step >= rung)
            found[rung] = AtRung(time=reached.time, reward=summary.final.value)
    return found


def verdicts(runs: Sequence[tuple[Hashable, Climbed]], eta: float) -> dict[Hashable, str]:
    """The hopeless settings, and why.

    Args:
        runs: the settings of each run, and the run at its rungs.
    """
    hopeless: dict[Hashable, str] = {}
    arrivals = [(at.time, rung, place) for place, (_, run) in enumerate(runs) for rung, at in run.items()]
    for time, rung, place in sorted(arrivals):
        settings = runs[place][0]
        if settings not in hopeless and (why := _judged(runs, settings, rung, time, eta)) is not None:
            hopeless[settings] = why
    return hopeless


def _judged(
    runs: Sequence[tuple[Hashable, Climbed]], settings: Hashable, rung: int, time: float, eta: float
) -> str | None:
    """Why settings are hopeless, by what was known at a rung at a time; None where they are not."""
    rewards: dict[Hashable, list[float]] = {}
    for key, run in runs:
        if (at := run.get(rung)) is not None and at.time <= time:
            rewards.setdefault(key, []).append(at.reward)
    means = {key: fmean(values) for key, values in rewards.items()}
    num_better = sum(mean > means[settings] for mean in means.values())
    num_kept = max(1, floor(len(means) / eta))
    if num_better < num_kept:
        return None
    place, best = f"number {num_better + 1} of {len(means)}", "the best one goes"
    if num_kept > 1:
        best = f"the best {num_kept} go"
    return f"reward {means[settings]:.3f} at step {rung} was {place} there, of which {best} on"
