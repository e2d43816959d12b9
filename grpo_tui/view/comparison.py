"""Runs beside each other: reward and evaluations at the end, at their best and at the same step; settings. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo_engine.wire.metrics import MetricsLine
from grpo_tui.view.metrics.names import measured_as, our_name
from grpo_tui.view.metrics.summary import (
    REWARD,
    WINDOW,
    Score,
    Summary,
    evaluated_names,
    names_of,
    score_at,
    summarized,
)
from grpo_tui.view.settings import differing_settings

MAX_SPANS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run with its metrics."""

    run: str
    profile: str
    state: str
    lines: Sequence[MetricsLine]
    """Of every step, in rising order."""
    resolved: Mapping[str, Any]
    """Its profile after overlays; empty where it cannot be read."""

    @property
    def last_step(self) -> int | None:
        """The last that was trained or evaluated; None before the first."""
        return self.lines[-1].step if self.lines else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """A metric over the same steps of all runs."""

    name: str
    spans: tuple[tuple[int, int], ...]
    """First and last step of each."""
    means: tuple[tuple[float | None, ...], ...]
    """For each span, the mean of each run; None where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameStep:
    """An evaluation at the last step at which all runs have it."""

    name: str
    step: int
    scores: tuple[Score, ...]
    differences: tuple[Score, ...]
    """To the first run. The error is that of independent samples of prompts: too large where both runs were evaluated
    on the same prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What several runs come to; lists have an entry for each run, in the given order."""

    rewards: tuple[Summary | None, ...]
    """Means over `WINDOW` steps."""
    evaluations: dict[str, tuple[Summary | None, ...]]
    same_step: tuple[SameStep, ...]
    aligned: tuple[Aligned, ...]
    settings: dict[str, list[Any]]
    """Those that differ."""


def compare(runs: Sequence[ComparedRun], metrics: Sequence[str] = ()) -> Comparison:
    """Put runs beside each other.

    Args:
        metrics: to align by step besides the reward, by our names or the runs' own.
    """
    scores = list(dict.fromkeys(name for run in runs for name in evaluated_names(names_of(run.lines))))
    wanted = dict.fromkeys([REWARD, *(our_name(name) or name for name in metrics)])
    aligned = [_aligned(runs, name) for name in wanted]
    documents = [run.resolved for run in runs if run.resolved]
    return Comparison(
        rewards=tuple(_summary(run, REWARD, WINDOW) for run in runs),
        evaluations={name: tuple(summarized(run.lines, name) for run in runs) for name in scores},
        same_step=tuple(found for name in scores if (found := _at_same_step(runs, name)) is not None),
        aligned=tuple(each for each in aligned if each is not None),
        settings=differing_settings([run.resolved for run in runs]) if len(documents) == len(runs) else {},
    )


def _summary(run: ComparedRun, name: str, window: int) -> Summary | None:
    own = measured_as(name, names_of(run.lines)) or name
    return summarized(run.lines, own, window)


def _at_same_step(runs: Sequence[ComparedRun], name: str) -> SameStep | None:
    by_run = [{score.step: score for line in run.lines if (score := score_at(line, name)) is not None} for run in runs]
    common = set.intersection(*(set(scores) for scores in by_run))
    if not common:
        return None
    step = max(common)
    scores = tuple(found[step] for found in by_run)
    return SameStep(
        name=name, step=step, scores=scores, differences=tuple(_difference(score, scores[0]) for score in scores[1:])
    )


def _difference(score: Score, first: Score) -> Score:
    errors = (score.error, first.error)
    error = None if None in errors else math.hypot(*(each for each in errors if each is not None))
    return Score(step=score.step, value=score.value - first.value, error=error)


def _aligned(runs: Sequence[ComparedRun], name: str) -> Aligned | None:
    """A metric over spans of the steps that all runs have done; None where they have none in common."""
    measured: list[dict[int, float]] = []
    for run in runs:
        own = measured_as(name, names_of(run.lines)) or name
        measured.append({line.step: line.metrics[own] for line in run.lines if own in line.metrics})
    steps = sorted(set().union(*measured))
    if not all(measured) or not steps:
        return None
    last = min(max(values) for values in measured)
    steps = [step for step in steps if step <= last]
    num = min(MAX_SPANS, len(steps))
    parts = [steps[place * len(steps) // num : (place + 1) * len(steps) // num] for place in range(num)]
    means = tuple(tuple(_mean([values[s] for s in part if s in values]) for values in measured) for part in parts)
    return Aligned(name=name, spans=tuple((part[0], part[-1]) for part in parts), means=means)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
