"""Curves of metrics: their points along an axis, smoothed, summed up, and scaled onto axes with round numbers. Pure."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grpo_engine.wire.metrics import Band
from grpo_tui.view.format import duration_text
from grpo_tui.view.metrics.history import MetricHistory
from grpo_tui.view.metrics.names import band_of, found, in_groups, is_evaluation, unit_of
from grpo_tui.view.metrics.state import PlotView, XAxis

NEAR_BAND = 3.0
"""The y axis includes an end of the healthy band if that makes its range at most this many times larger."""
ALIKE = 5.0
"""In automatic mode metrics share an axis while the range of each is at least 1/5 of the range of all."""
PADDING = 0.04
"""Of the height, above and below the curve."""
STEPS_OF_TIME_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
MIN_PANE_ROWS = 6
LEAST = sys.float_info.min
"""Smaller numbers have fewer digits: 1.15 times the least of them is itself, and no power of ten is below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement; `y` is None where a step was done and the value was no finite number, or not measured."""

    x: float
    y: float | None
    step: int
    time: float
    policy_version: int
    is_extreme: bool = False
    """Whether it is there as the least or the greatest of many that were thinned: no part of a mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric of one run."""

    name: str
    number: int
    """Of the metric, counted from 1: its sign on the plot, and its colour."""
    run: str | None = None
    """None: the run of the screen."""
    points: tuple[Point, ...] = ()
    is_sparse: bool = False
    """Measured every so many steps: single marks are drawn."""
    band: Band | None = None
    """In which its values are healthy."""
    errors: tuple[float, ...] = ()
    """Of a mean over runs, the standard error at each point; empty where there is none."""

    @property
    def measured(self) -> list[tuple[float, float]]:
        """(x, y) of the points that have a value."""
        return [(point.x, point.y) for point in self.points if point.y is not None]

    def edge(self, sign: Literal[-1, 1]) -> list[tuple[float, float]]:
        """(x, y) of the lower or upper end of its error; none without errors."""
        return [
            (point.x, point.y + sign * error)
            for point, error in zip(self.points, self.errors, strict=False)
            if point.y is not None
        ]

    def figures(self, window: tuple[float, float]) -> Figures | None:
        """What it comes to within a window; None where nothing was measured."""
        low, high = window
        seen = [point for point in self.points if point.y is not None and low <= point.x <= high]
        even = [point.y for point in seen if point.y is not None and not point.is_extreme]
        return figures([point.y for point in seen if point.y is not None], even)

    def at(self, x: float) -> Point | None:
        """The last measurement at `x` or before it; None before the first."""
        before = [point for point in self.points if point.y is not None and point.x <= x + 1e-9 * max(1.0, abs(x))]
        return max(before, key=lambda point: point.x) if before else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a curve comes to."""

    last: float
    mean: float
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How values are placed between 0 and 1."""

    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float | None:
        """0 at the low end, 1 at the high one, beyond them outside; None for what a logarithm cannot show."""
        if self.is_log:
            if value <= 0:
                return None
            return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pane:
    """Curves that share a height."""

    curves: tuple[Curve, ...]
    scale: Scale | None
    """None: each curve has its own, from its least to its most."""
    band: Band | None = None

    @property
    def unit(self) -> str:
        """Of the axis; nothing where curves of several units share it."""
        units = {unit_of(curve.name) for curve in self.curves}
        return units.pop() if len(units) == 1 and self.scale is not None else ""


def listed(history: MetricHistory, query: str) -> list[str]:
    """The metrics that a query finds, the best first; without one all of them, in their groups."""
    return found(query, in_groups({name for line in history.lines for name in line.metrics}))


def plotted(history: MetricHistory, plots: PlotView) -> tuple[str, ...]:
    """The marked metrics, else the selected one, else the first of the list."""
    if plots.marked:
        return plots.marked
    return (plots.selected,) if plots.selected else tuple(listed(history, plots.query)[:1])


def curve_of(history: MetricHistory, name: str, number: int, x: XAxis, run: str | None = None) -> Curve:
    """The curve of one metric along an axis; time counts from the first line of the run."""
    lines, extremes, band = history.lines, history.extremes.get(name, ()), band_of(name, history.bands)
    measured = [place for place, line in enumerate(lines) if name in line.metrics]
    if not measured and not extremes:
        return Curve(name=name, number=number, run=run, band=band)
    first, last = (measured[0], measured[-1]) if measured else (0, len(lines))
    is_sparse = is_evaluation(name) or len(measured) * 2 < last + 1 - first
    began = lines[0].time
    points = [
        Point(
            x=_x_of(line.step, line.time - began, line.policy_version, x),
            y=line.metrics.get(name),
            step=line.step,
            time=line.time,
            policy_version=line.policy_version,
        )
        for line in lines[first:]
        if not is_sparse or name in line.metrics
    ]
    if extremes:
        points += [
            Point(
                x=_x_of(one.step, one.time - began, one.policy_version, x),
                y=one.value,
                step=one.step,
                time=one.time,
                policy_version=one.policy_version,
                is_extreme=True,
            )
            for one in extremes
        ]
        points.sort(key=lambda point: point.step)
    return Curve(name=name, number=number, run=run, points=tuple(points), is_sparse=is_sparse, band=band)


def continued(own: Curve, parents: Curve, *, after: int) -> Curve:
    """The curve of a branch with what it inherited: its parent's points up to the step at which it branched off."""
    inherited = tuple(point for point in parents.points if point.step <= after)
    return replace(own, points=inherited + own.points, is_sparse=own.is_sparse or parents.is_sparse)


def _x_of(step: int, elapsed_s: float, policy_version: int, x: XAxis) -> float:
    return {XAxis.STEP: float(step), XAxis.TIME: elapsed_s, XAxis.VERSION: float(policy_version)}[x]


def clipped(
    points: Sequence[tuple[float, float | None]], window: tuple[float, float]
) -> list[list[tuple[float, float]]]:
    """The pieces of a line through the points that lie within the window, cut at its edges and at gaps."""
    low, high = window
    if all(low <= x <= high for x, _ in points):
        together = itertools.groupby(points, key=lambda point: point[1] is None)
        return [[(x, y) for x, y in piece if y is not None] for is_gap, piece in together if not is_gap]
    pieces: list[list[tuple[float, float]]] = [[]]
    before: tuple[float, float] | None = None
    for x, y in points:
        if y is None:
            pieces.append([])
            before = None
            continue
        if before is not None:
            crossed = [edge for edge in (low, high) if min(before[0], x) < edge < max(before[0], x)]
            if crossed and not low <= before[0] <= high:
                pieces.append([])
            for edge in sorted(crossed, reverse=x < before[0]):
                pieces[-1].append((edge, before[1] + (y - before[1]) * (edge - before[0]) / (x - before[0])))
        if low <= x <= high:
            pieces[-1].append((x, y))
        before = (x, y)
    return [piece for piece in pieces if piece]


def smoothed(values: Sequence[float | None], weight: float) -> list[float | None]:
    """An exponential mean that begins at the first value, and not at 0; gaps stay gaps."""
    mean, total, result = 0.0, 0.0, list[float | None]()
    for value in values:
        if value is None:
            result.append(None)
            continue
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        result.append(mean / total)
    return result


def figures(values: Sequence[float], even: Sequence[float] = ()) -> Figures | None:
    """None for no values.

    Args:
        even: those of the values that a mean is made of; none for all.
    """
    if not values:
        return None
    counted = even or values
    mean = math.fsum(value / len(counted) for value in counted)
    return Figures(last=values[-1], mean=mean, least=min(values), most=max(values))


# --- scales ----------------------------------------------------------------------------------------------------------


def x_range(curves: Iterable[Curve], *, is_growing: bool = False) -> tuple[float, float] | None:
    """From the first point to the last; None without any.

    Args:
        is_growing: of a run that goes on: the end is rounded up, so that a plot holds still while points come.
    """
    xs = [point.x for curve in curves for point in curve.points]
    if not xs:
        return None
    low, high = min(xs), max(xs)
    if is_growing and high > low:
        step = round_step((high - low) / 16)
        high = math.ceil(high / step) * step
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def panes_of(
    curves: Sequence[Curve], window: tuple[float, float], *, is_log: bool, shows_band: bool, how: str, num_rows: int
) -> tuple[list[Pane], str]:
    """Share out the height, and say how in words that go into a title.

    Args:
        how: "auto", "one axis", "panes" or "own ranges".
        num_rows: rows that all panes have together.
    """
    by_number: dict[int, list[Curve]] = {}
    for curve in curves:
        by_number.setdefault(curve.number, []).append(curve)
    groups = [tuple(group) for group in by_number.values()]
    if len(groups) <= 1:
        return [_pane(tuple(curves), window, is_log=is_log, shows_band=shows_band)], ""
    chosen = how
    if how == "auto":
        fits = num_rows // len(groups) >= MIN_PANE_ROWS
        chosen = "one axis" if _are_alike(groups, window) else "panes" if fits else "own ranges"
    if chosen == "panes" and num_rows // len(groups) < 3:
        chosen = "own ranges"
    if chosen == "one axis":
        return [_pane(tuple(curves), window, is_log=is_log, shows_band=shows_band)], "one axis for all"
    if chosen == "panes":
        panes = [_pane(group, window, is_log=is_log, shows_band=shows_band) for group in groups]
        return panes, "one pane each"
    return [Pane(curves=tuple(curves), scale=None)], "each over its own range"


def own_scale(curves: Sequence[Curve], window: tuple[float, float], *, is_log: bool) -> Scale:
    """A scale from the least to the most of these curves within the window."""
    return _scale(_values(curves, window), (), is_log=is_log, shows_band=False)


def _pane(curves: tuple[Curve, ...], window: tuple[float, float], *, is_log: bool, shows_band: bool) -> Pane:
    bands = {curve.band for curve in curves}
    band = bands.pop() if len(bands) == 1 else None
    ends = [] if band is None else [end for end in (band.low, band.high) if end is not None]
    scale = _scale(_values(curves, window), ends, is_log=is_log, shows_band=shows_band)
    return Pane(curves=curves, scale=scale, band=band)


def _values(curves: Iterable[Curve], window: tuple[float, float]) -> list[float]:
    low, high = window
    reached = [place for curve in curves for place in [*curve.measured, *curve.edge(-1), *curve.edge(1)]]
    return [y for x, y in reached if low <= x <= high]


def _scale(values: Sequence[float], ends: Sequence[float], *, is_log: bool, shows_band: bool) -> Scale:
    known = [value for value in values if value >= LEAST] if is_log else list(values)
    if not known:
        return Scale(low=0.1, high=1.0, is_log=True) if is_log else Scale(low=0.0, high=1.0)
    if is_log:
        low, high = min(known), max(known)
        ends = [end for end in ends if end > 0]
        if shows_band and ends:
            low, high = min(low, *ends), max(high, *ends)
        return Scale(low=low / 1.15, high=high * 1.15, is_log=True)
    low, high = min(known), max(known)
    extent = high - low or max(abs(high), 1e-12) * 0.1
    if ends and (shows_band or max(high, *ends) - min(low, *ends) <= NEAR_BAND * extent):
        low, high = min(low, *ends), max(high, *ends)
    elif ends:
        for end in ends:  # the nearer one alone may fit
            if max(high, end) - min(low, end) <= NEAR_BAND * extent:
                low, high = min(low, end), max(high, end)
    padding = (high - low or extent) * PADDING
    if high == low:
        padding = extent / 2
    return Scale(low=low - padding, high=high + padding)


def _are_alike(groups: Sequence[Sequence[Curve]], window: tuple[float, float]) -> bool:
    extents = []
    for group in groups:
        values = _values(group, window)
        if values:
            extents.append((min(values), max(values)))
    if len({unit_of(group[0].name) for group in groups}) > 1 or not extents:
        return False
    whole = max(high for _, high in extents) - min(low for low, _ in extents)
    return all((high - low) * ALIKE >= whole for low, high in extents)


# --- round numbers ---------------------------------------------------------------------------------------------------


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    if least < LEAST or not math.isfinite(least):
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def ticks(scale: Scale, max_count: int) -> list[float]:
    """Round values within the scale, at most `max_count`."""
    if max_count < 1:
        return []
    if scale.is_log:
        return _log_ticks(scale, max_count)
    return _multiples(scale.low, scale.high, round_step((scale.high - scale.low) / max_count))[:max_count]


def _log_ticks(scale: Scale, max_count: int) -> list[float]:
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    for factors in ((1, 2, 5), (1,)):
        found = [
            factor * 10.0**power
            for power in range(first, last + 1)
            for factor in factors
            if scale.low <= factor * 10.0**power <= scale.high
        ]
        if len(found) <= max_count:
            return found
    return found[:: math.ceil(len(found) / max_count)]


def x_ticks(window: tuple[float, float], x: XAxis, max_count: int) -> list[tuple[float, str]]:
    """Round places of the x axis with their labels: whole steps, or whole seconds, minutes and hours."""
    low, high = window
    if max_count < 1:
        return []
    least = (high - low) / max_count
    if x is XAxis.TIME:
        step = next((float(each) for each in STEPS_OF_TIME_S if each >= least), round_step(least))
        return [(place, duration_text(place) if place else "0") for place in _multiples(low, high, step)]
    return [(place, f"{place:,.0f}") for place in _multiples(low, high, max(1.0, round_step(least)))]


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_texts(values: Sequence[float], *, is_log: bool) -> list[str]:
    """Labels with as many decimals as tell them apart: `0.05`, `0.10`; `12,000`; `1e-05` for the very small."""
    if not values:
        return []
    size = max(abs(value) for value in values)
    if is_log or size >= 1e7 or 0 < size < 1e-3:
        return [f"{value:.3g}" if value and 1e-3 <= abs(value) < 1e7 else f"{value:.1e}" if value else "0"
                for value in values]  # fmt: skip
    step = min((abs(b - a) for a, b in itertools.pairwise(values)), default=size or 1.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return [f"{value + 0.0:,.{decimals}f}" for value in values]


def beyond(band: Band, scale: Scale) -> Literal["above", "below", ""]:
    """Where the healthy values are that the scale does not reach; nothing where it reaches some."""
    if band.low is not None and scale.high < band.low:
        return "above"
    return "below" if band.high is not None and scale.low > band.high else ""
