"""Marked runs as curves: runs that differ in their seeds alone are one, their mean with its standard error. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from grpo_tui.run_files.resolved import flat
from grpo_tui.view.metrics.curves import Curve, Point, curve_of
from grpo_tui.view.metrics.history import MetricHistory
from grpo_tui.view.metrics.names import in_groups, is_evaluation, measured_as
from grpo_tui.view.metrics.state import XAxis
from grpo_tui.view.metrics.summary import REWARD, WINDOW, Score, evaluated_names, summarized
from grpo_tui.view.settings import compared_settings, is_seed

MAX_CURVES = 9
"""Each has a digit as its sign."""
MAX_PLACES = 400
"""Of a mean over runs along its axis; more steps are averaged first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedRun:
    """A run whose curves are drawn."""

    name: str
    history: MetricHistory
    resolved: Mapping[str, Any]
    """Its settings; empty where they cannot be read."""
    label: str = ""
    """The settings of its point in a sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs with the same settings and different seeds; most often one run."""

    runs: tuple[MarkedRun, ...]
    settings: Mapping[str, Any]
    """Those in which groups differ, by dotted key; None: it has no such setting."""


def groups_of(runs: Sequence[MarkedRun]) -> list[Group]:
    """Put runs together that differ only in their seeds. Two runs with the same seed are never one group."""
    differing = compared_settings([run.resolved for run in runs])
    found: dict[str, list[MarkedRun]] = {}
    settings: dict[str, Mapping[str, Any]] = {}
    for place, run in enumerate(runs):
        own = {key: values[place] for key, values in differing.items()}
        seeds = sorted((key, repr(value)) for key, value in flat(run.resolved) if is_seed(key))
        key = json.dumps(own, sort_keys=True, default=str) if run.resolved else f"unknown {place}"
        others = (each.resolved for each in found.get(key, ()))
        if not seeds or any(seeds == sorted((k, repr(v)) for k, v in flat(other) if is_seed(k)) for other in others):
            key = f"{key} {place}"
        found.setdefault(key, []).append(run)
        settings[key] = own
    return [Group(runs=tuple(members), settings=settings[key]) for key, members in found.items()]


def metrics_of(runs: Sequence[MarkedRun]) -> list[str]:
    """What can be drawn: the reward, evaluations, then everything else that any of the runs measured."""
    names = {name for run in runs for name in _names(run)}
    reward = measured_as(REWARD, names)
    first = [*([REWARD] if reward is not None else []), *evaluated_names(names)]
    rest = [name for name in in_groups(names) if name not in (*first, reward) and not name.endswith("_se")]
    return [*first, *rest]


def curve_over(group: Group, name: str, number: int, x: XAxis) -> Curve:
    """The curve of a metric: of one run, or the mean over runs at the steps that at least two of them have done."""
    curves = [curve_of(run.history, _own_name(run, name), number, x) for run in group.runs]
    curves = [curve for curve in curves if curve.points]
    if len(curves) < 2:
        single = curves[0] if curves else Curve(name=name, number=number)
        return replace(single, name=name)
    measured = [[point for point in curve.points if point.y is not None and not point.is_extreme] for curve in curves]
    steps = sorted({point.step for points in measured for point in points})
    width = max(1, -(-(steps[-1] + 1 - steps[0]) // MAX_PLACES)) if len(steps) > MAX_PLACES else 1
    by_place: dict[int, list[list[Point]]] = {}
    for points in measured:
        for place, inside in groupby(points, key=lambda point: point.step // width):
            by_place.setdefault(place, []).append(list(inside))
    means: list[Point] = []
    errors: list[float] = []
    for _, parts in sorted(by_place.items()):
        if len(parts) < 2:
            continue
        values = [fmean(point.y for point in part if point.y is not None) for part in parts]
        last = parts[0][-1]
        means.append(replace(last, x=fmean(point.x for part in parts for point in part), y=fmean(values)))
        errors.append(stdev(values) / sqrt(len(values)))
    is_sparse = all(curve.is_sparse for curve in curves)
    return replace(curves[0], name=name, points=tuple(means), errors=tuple(errors), is_sparse=is_sparse)


def scores_of(group: Group, name: str) -> tuple[Score | None, Score | None]:
    """A metric at the end and at its best: the mean over the runs, with its standard error over them.

    The error of a single run is that of its evaluation over prompts.
    """
    window = 1 if is_evaluation(name) else WINDOW
    sums = [summarized(run.history.lines, _own_name(run, name), window) for run in group.runs]
    found = [each for each in sums if each is not None]
    return _mean([each.final for each in found]), _mean([each.best for each in found])


def _mean(scores: Sequence[Score]) -> Score | None:
    if len(scores) < 2:
        return scores[0] if scores else None
    values = [score.value for score in scores]
    return Score(step=max(score.step for score in scores), value=fmean(values), error=stdev(values) / sqrt(len(values)))


def _names(run: MarkedRun) -> set[str]:
    return {name for line in run.history.lines for name in line.metrics}


def _own_name(run: MarkedRun, name: str) -> str:
    return measured_as(name, _names(run)) or name
