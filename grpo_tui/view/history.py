"""What the optimizer steps measured, over the whole run, in bounded memory. Pure.

The newest lines are kept one by one; older ones are thinned to one in 2, 4, 8… steps, evenly over the run, so that
a sparkline of a million steps costs what one of a thousand does. Evaluations are few and dear: they are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_engine.wire.metrics import Band, MetricsLine
from grpo_tui.view.metric_names import is_evaluation

MAX_LINES = 2000
"""Some 3 kB each."""
RECENT_LINES = 256
"""Never thinned: diagnosis looks at these."""
MAX_EVALUATIONS = MAX_LINES // 4
"""Of the lines before the recent ones; more are thinned too, among themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricHistory:
    """Steps in rising order; those before the recent ones are at least `stride` steps apart, evaluations apart."""

    lines: tuple[MetricsLine, ...] = ()
    stride: int = 1

    @property
    def last(self) -> MetricsLine | None:
        """The newest line, or None before the first step."""
        return self.lines[-1] if self.lines else None

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric, where it was measured."""
        return [(line.step, line.metrics[name]) for line in self.lines if name in line.metrics]

    def has(self, name: str) -> bool:
        """Whether the metric was measured lately."""
        return any(name in line.metrics for line in self.lines[-RECENT_LINES:])


def extended(history: MetricHistory, new_lines: Sequence[MetricsLine]) -> MetricHistory:
    """Append lines; a trainer that resumed repeats steps, and then its newer measurement counts.

    Two lines of one step that measure different things, as an evaluation that is written by itself, become one.
    """
    lines = list(history.lines)
    for line in new_lines:
        while lines and lines[-1].step > line.step:
            lines.pop()
        if lines and lines[-1].step == line.step:
            before = lines.pop()
            if before.metrics.keys().isdisjoint(line.metrics):
                line = line.model_copy(update={"metrics": {**before.metrics, **line.metrics}})
        lines.append(line)
    stride = history.stride
    if len(lines) > MAX_LINES:
        lines = _thinned(lines, stride)
        while len(lines) > MAX_LINES * 3 // 4:
            stride *= 2
            lines = _thinned(lines, stride)
    return MetricHistory(lines=tuple(lines), stride=stride)


def _thinned(lines: Sequence[MetricsLine], stride: int) -> list[MetricsLine]:
    old, recent = lines[:-RECENT_LINES], lines[-RECENT_LINES:]
    evaluations = [line for line in old if any(map(is_evaluation, line.metrics))]
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
    """Means of a series over equal spans of steps, the oldest first; None where a span has no measurement.

    A series with fewer steps than buckets gets one bucket a step, so that a young run is not stretched.
    """
    if not series or num_buckets <= 0:
        return []
    first, last = series[0][0], series[-1][0]
    span = last - first + 1
    num_buckets = min(num_buckets, span)
    sums = [0.0] * num_buckets
    counts = [0] * num_buckets
    for step, value in series:
        place = (step - first) * num_buckets // span
        sums[place] += value
        counts[place] += 1
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


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
