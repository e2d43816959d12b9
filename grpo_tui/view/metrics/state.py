"""What the metrics screen knows beyond the history: what is searched, marked and shown, and how. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar, assert_never

from grpo_tui.view.metrics.history import MetricHistory

T = TypeVar("T")
SMOOTHINGS = (0.0, 0.6, 0.9, 0.98)
"""Weights of what came before in the exponential mean; 0 is none."""
MAX_MARKED = 6
"""Curves that a person can tell apart, and a terminal has colours for."""


class XAxis(StrEnum):
    """What the plot runs along."""

    STEP = "step"
    TIME = "time"
    VERSION = "version"


class YAxis(StrEnum):
    """How several metrics share the height."""

    AUTO = "auto"
    """One axis where their ranges are alike, else panes, else each its own range, as there is room."""
    SHARED = "one axis"
    PANES = "panes"
    OWN = "own ranges"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """Another run, drawn beside this one."""

    run: str
    history: MetricHistory
    branched_at: int | None = None
    """The step at which this run branched off it; None: it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotView:
    """What the metrics screen shows, beyond the history."""

    query: str = ""
    is_searching: bool = False
    """Whether the query is being typed."""
    selected: str | None = None
    """None: the first of the list."""
    marked: tuple[str, ...] = ()
    """Drawn over each other, in this order; with none, the selected one is drawn."""
    x: XAxis = XAxis.STEP
    y: YAxis = YAxis.AUTO
    smoothing: float = 0.0
    is_log: bool = False
    shows_band: bool = False
    """Whether the height reaches to the ends of the healthy band, however far from the curve they are."""
    window: tuple[float, float] | None = None
    """The part of the x axis in sight, in its units; None is all of it, growing with the run."""
    cursor: float | None = None
    """A place on the x axis."""
    is_wide: bool = False
    """Whether the plot has the whole width, without the list."""
    compared: ComparedRun | None = None
    reading: str | None = None
    """The run that is being read to be compared."""


class PlotChange:
    """Base of all that changes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchChanged(PlotChange):
    """Letters were typed into the search, or it was opened, taken or left."""

    query: str
    is_searching: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSelected(PlotChange):
    """The selection moved to a metric."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionMoved(PlotChange):
    """The selection moved by so many rows: two notches of a wheel may come before the first is drawn."""

    by: int
    names: tuple[str, ...]
    """Of the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricMarked(PlotChange):
    """A metric was marked, or its mark taken away."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarksCleared(PlotChange):
    """All marks were taken away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XAxisTurned(PlotChange):
    """The next x axis; the window and the cursor are in units of the old one, and go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YAxisTurned(PlotChange):
    """The next way to share the height."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothingTurned(PlotChange):
    """The next strength of smoothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogScaleTurned(PlotChange):
    """Logarithmic, or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandTurned(PlotChange):
    """The whole healthy band in sight, or only where the curve is near it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthTurned(PlotChange):
    """With the list, or without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSet(PlotChange):
    """Another part of the x axis."""

    window: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorSet(PlotChange):
    """The cursor moved, or went."""

    cursor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonBegan(PlotChange):
    """Another run was chosen, and is being read."""

    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRead(PlotChange):
    """The other run was read; None: no comparison any more."""

    compared: ComparedRun | None


AnyPlotChange = (
    SearchChanged | MetricSelected | SelectionMoved | MetricMarked | MarksCleared | XAxisTurned | YAxisTurned
    | SmoothingTurned | LogScaleTurned | BandTurned | WidthTurned | WindowSet | CursorSet
    | ComparisonBegan | ComparisonRead
)  # fmt: skip


def after(plots: PlotView, change: PlotChange) -> PlotView:
    """What it is after a change."""
    assert isinstance(change, AnyPlotChange)
    match change:
        case SearchChanged():
            return replace(plots, query=change.query, is_searching=change.is_searching)
        case MetricSelected():
            return replace(plots, selected=change.name)
        case SelectionMoved(by=by, names=names):
            if not names:
                return plots
            place = names.index(plots.selected) + by if plots.selected in names else max(0, by)
            return replace(plots, selected=names[min(max(place, 0), len(names) - 1)])
        case MetricMarked():
            if change.name in plots.marked:
                return replace(plots, marked=tuple(name for name in plots.marked if name != change.name))
            return replace(plots, marked=(*plots.marked, change.name)[:MAX_MARKED])
        case MarksCleared():
            return replace(plots, marked=())
        case XAxisTurned():
            return replace(plots, x=_next(tuple(XAxis), plots.x), window=None, cursor=None)
        case YAxisTurned():
            return replace(plots, y=_next(tuple(YAxis), plots.y))
        case SmoothingTurned():
            return replace(plots, smoothing=_next(SMOOTHINGS, plots.smoothing))
        case LogScaleTurned():
            return replace(plots, is_log=not plots.is_log)
        case BandTurned():
            return replace(plots, shows_band=not plots.shows_band)
        case WidthTurned():
            return replace(plots, is_wide=not plots.is_wide)
        case WindowSet():
            return replace(plots, window=change.window)
        case CursorSet():
            return replace(plots, cursor=change.cursor)
        case ComparisonBegan():
            return replace(plots, reading=change.run)
        case ComparisonRead():
            return replace(plots, reading=None, compared=change.compared)
        case _:
            assert_never(change)


def _next(choices: tuple[T, ...], now: T) -> T:
    return choices[(choices.index(now) + 1) % len(choices)]
