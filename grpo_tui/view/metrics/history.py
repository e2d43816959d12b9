"""What the optimizer steps measured, over the whole run, in bounded memory. Pure.

The newest lines are kept one by one; older ones are thinned to one in 2, 4, 8… steps, evenly over the run, so that
a sparkline of a million steps costs what one of a thousand does. Evaluations are few and dear: they are kept. Of the
lines that go, the least and the greatest value of each metric stay, so that no spike is lost.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from grpo_engine.wire.metrics import HEALTHY_BANDS, Band, MetricsLine
from grpo_tui.run_files.metrics import append_step
from grpo_tui.view.metrics.names import is_evaluation

MAX_LINES = 2000
"""Some 3 kB each."""
RECENT_LINES = 256
"""Never thinned: diagnosis looks at these."""
MAX_EVALUATIONS = MAX_LINES // 4
"""Of the lines before the recent ones; more are thinned too, among themselves."""
STRIDES_A_SPIKE = 8
"""Over so many strides the least and the greatest of a metric are kept: some 120 of each in a long run."""
STANDS_OUT = 2.0
"""A value is a spike where it is so many times as far from its neighbours as nine tenths of the buckets are wide."""


class Measured(NamedTuple):
    """One value of one metric."""

    step: int
    time: float
    policy_version: int
    value: float


_STEP, _VALUE, _STEP_AND_VALUE = itemgetter(0), itemgetter(3), itemgetter(0, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricHistory:
    """Steps in rising order; those before the recent ones are at least `stride` steps apart, evaluations apart."""

    lines: tuple[MetricsLine, ...] = ()
    stride: int = 1
    extremes: Mapping[str, tuple[Measured, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """By metric, the least and the greatest of what the thinned lines had, in rising order of steps."""
    bands: Mapping[str, Band] = field(default_factory=lambda: MappingProxyType(HEALTHY_BANDS))
    """The healthy bands of this run."""

    @property
    def last(self) -> MetricsLine | None:
        """The newest line, or None before the first step."""
        return self.lines[-1] if self.lines else None

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric, where it was measured."""
        kept = [(line.step, line.metrics[name]) for line in self.lines if name in line.metrics]
        extremes = self.extremes.get(name)
        return sorted([*map(_STEP_AND_VALUE, extremes), *kept], key=_STEP) if extremes else kept

    def has(self, name: str) -> bool:
        """Whether the metric was measured lately."""
        return any(name in line.metrics for line in self.lines[-RECENT_LINES:])


def extended(history: MetricHistory, new_lines: Sequence[MetricsLine]) -> MetricHistory:
    """Append lines, each as `append_step` does."""
    lines, extremes = list(history.lines), history.extremes
    if new_lines:
        extremes = extremes_until(extremes, step=min(line.step for line in new_lines) - 1)
    for line in new_lines:
        append_step(lines, line)
    stride = history.stride
    if len(lines) > MAX_LINES:
        kept = _thinned(lines, stride)
        while len(kept) > MAX_LINES * 3 // 4:
            stride *= 2
            kept = _thinned(kept, stride)
        steps = {line.step for line in kept}
        gone = [line for line in lines if line.step not in steps]
        lines, extremes = kept, _with_extremes(extremes, gone, STRIDES_A_SPIKE * stride)
    return replace(history, lines=tuple(lines), stride=stride, extremes=extremes)


def extremes_until(
    extremes: Mapping[str, tuple[Measured, ...]], *, step: float = float("inf"), time: float = float("inf")
) -> Mapping[str, tuple[Measured, ...]]:
    """Those that were measured by then; the same object where all were."""
    if all(not found or (found[-1].step <= step and found[-1].time <= time) for found in extremes.values()):
        return extremes
    return MappingProxyType(
        {name: tuple(one for one in found if one.step <= step and one.time <= time) for name, found in extremes.items()}
    )


def _with_extremes(
    before: Mapping[str, tuple[Measured, ...]], gone: Sequence[MetricsLine], width: int
) -> dict[str, tuple[Measured, ...]]:
    """The least and the greatest of each metric over every `width` steps, of those before and of lines that go."""
    new: dict[str, list[Measured]] = {}
    for _, bucket in itertools.groupby(gone, key=lambda line: line.step // width):
        ends: dict[str, tuple[float, MetricsLine, float, MetricsLine]] = {}
        for line in bucket:
            for name, value in line.metrics.items():
                known = ends.get(name)
                if known is None:
                    ends[name] = value, line, value, line
                elif value < known[0]:
                    ends[name] = value, line, known[2], known[3]
                elif value > known[2]:
                    ends[name] = known[0], known[1], value, line
        for name, (least, at_least, most, at_most) in ends.items():
            found = new.setdefault(name, [])
            found.append(Measured(at_least.step, at_least.time, at_least.policy_version, least))
            if at_most is not at_least:
                found.append(Measured(at_most.step, at_most.time, at_most.policy_version, most))
    return {name: _ends([*before.get(name, ()), *new.get(name, ())], width) for name in {**before, **new}}


def _ends(values: list[Measured], width: int) -> tuple[Measured, ...]:
    """Of each `width` steps the least and the greatest, in rising order of steps."""
    values.sort(key=_STEP)
    ends: list[Measured] = []
    begin, num = 0, len(values)
    while begin < num:
        end, edge = begin + 1, (values[begin].step // width + 1) * width
        while end < num and values[end].step < edge:
            end += 1
        if end - begin > 2:
            inside = values[begin:end]
            least, most = min(inside, key=_VALUE), max(inside, key=_VALUE)
            ends += [least, most] if least.step < most.step else [most, least] if most.step < least.step else [least]
        else:
            ends += values[begin:end]
        begin = end
    return tuple(ends)


def _thinned(lines: Sequence[MetricsLine], stride: int) -> list[MetricsLine]:
    old, recent = lines[:-RECENT_LINES], lines[-RECENT_LINES:]
    names = set().union(*(line.metrics for line in old))  # 2,000 lines have 50 of them in all
    of_evaluations = set(filter(is_evaluation, names))
    evaluations = [line for line in old if not line.metrics.keys().isdisjoint(of_evaluations)] if of_evaluations else []
    evaluated = {line.step for line in evaluations}
    apart = 1
    while len(evaluations) > MAX_EVALUATIONS:
        apart *= 2
        evaluations = _spaced(evaluations, apart)
    others = _spaced([line for line in old if line.step not in evaluated], stride)
    return [*sorted([*others, *evaluations], key=lambda line: line.step), *recent]


def _spaced(lines: Sequence[MetricsLine], stride: int) -> list[MetricsLine]:
    """Lines that are at least `stride` steps apart, whichever steps are written; doing it again changes nothing."""
    kept: list[MetricsLine] = []
    for line in lines:
        if not kept or line.step - kept[-1].step >= stride:
            kept.append(line)
    return kept


def bucketed(series: Sequence[tuple[int, float]], num_buckets: int) -> list[float | None]:
    """What is usual in equal spans of steps, the oldest first, or its spike; None where nothing was measured.

    A series with fewer steps than buckets gets one bucket a step, so that a young run is not stretched.
    """
    if not series or num_buckets <= 0:
        return []
    first, last = series[0][0], series[-1][0]
    span = last - first + 1
    num_buckets = min(num_buckets, span)
    steps, values = [step for step, _ in series], [value for _, value in series]
    edges = [bisect_left(steps, first - -place * span // num_buckets) for place in range(num_buckets + 1)]
    buckets = [values[start:end] for start, end in itertools.pairwise(edges)]
    spreads = sorted(max(bucket) - min(bucket) for bucket in buckets if len(bucket) > 1)
    far = STANDS_OUT * spreads[-1 - len(spreads) // 10] if spreads else 0.0
    return [_told(bucket, far) if bucket else None for bucket in buckets]


def _told(bucket: Sequence[float], far: float) -> float:
    """The mean of a bucket, or the one value in it that is far from the others."""
    total, least, most = sum(bucket), min(bucket), max(bucket)
    farthest = most if most - total / len(bucket) > total / len(bucket) - least else least
    others = (total - farthest) / max(1, len(bucket) - 1)
    return farthest if len(bucket) > 1 and abs(farthest - others) > far else total / len(bucket)


def bar_heights(values: Sequence[float | None], num_heights: int, *, shown: Sequence[float] = ()) -> list[int | None]:
    """Map values onto 0 … num_heights − 1 between their least and their greatest; a flat series lies low.

    Args:
        values: one a bar, None for an empty bar.
        num_heights: of a bar.
        shown: values that the scale reaches at least, such as the ends of a healthy band, so that harmless noise
            inside it looks as small as it is.
    """
    known = [value for value in values if value is not None]
    if not known:
        return [None] * len(values)
    low, high = min([*known, *shown]), max([*known, *shown])
    extent = high - low
    if extent <= 1e-12 * max(abs(low), abs(high), 1e-12):
        return [None if value is None else 0 for value in values]
    top = num_heights - 1
    return [None if value is None else round((value - low) / extent * top) for value in values]


def band_heights(values: Sequence[float | None], band: Band, num_heights: int) -> list[int | None]:
    """Map values onto 0 … num_heights − 1 from the low end of a band to its high end; −1 below it, num_heights above.

    A band that is open below begins at 0; one that is open above reaches to the greatest value.
    """
    known = [value for value in values if value is not None]
    low = 0.0 if band.low is None else band.low
    high = max([*known, low]) if band.high is None else band.high
    extent = max(high - low, 1e-12)

    def height(value: float) -> int:
        if not band.holds(value):
            return num_heights if value > high else -1
        return min(max(int((value - low) / extent * num_heights), 0), num_heights - 1)

    return [None if value is None else height(value) for value in values]
