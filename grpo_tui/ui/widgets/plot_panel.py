"""Curves of metrics over each other, full size: the plot, its keys and its mouse, and the table of its curves."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.cells import cell_len
from textual import events
from textual.content import Content

from grpo_tui.ui.messages import StateChanged
from grpo_tui.ui.widgets.lines import Lines, Styled, fit, line, rule, wrapped
from grpo_tui.ui.widgets.main.metrics_panel import judge
from grpo_tui.ui.widgets.plot_drawing import Drawn, Geometry, axis_rows, column_of, curve_style, drawn_of, metric_text
from grpo_tui.view.format import duration_text
from grpo_tui.view.metrics.curves import Curve, continued, curve_of, plotted, x_range
from grpo_tui.view.metrics.history import MetricHistory
from grpo_tui.view.metrics.names import meaning_of, value_text
from grpo_tui.view.metrics.state import CursorSet, PlotView, WindowSet, XAxis
from grpo_tui.view.state import ViewState

ZOOM = 2.0
PAN = 0.25
DASHES = "┄"
"""Before what is of another run."""
VALUE_WIDTH = 9
MIN_NAME_WIDTH = 18
ROWS_WITH_MEANING = 16
"""Rows from which a line says what the metric is."""
NOT_YET = "no step yet: metrics appear after the trainer's first step"


class PlotPanel(Lines):
    """The plot, its axes, and the table of its curves."""

    DEFAULT_CSS = """
    PlotPanel { padding: 0 1; }
    PlotPanel > .band { background: $success 12%; }
    PlotPanel:ansi > .band { background: ansi_default; }
    PlotPanel > .band-edge { color: $text-success; }
    """
    COMPONENT_CLASSES = {"band", "band-edge"}

    def __init__(self) -> None:
        super().__init__()
        self.geometry: Geometry | None = None
        """None while nothing is drawn."""
        # Cached: moving the cursor rebuilds neither the curves nor their drawing.
        self._history: MetricHistory | None = None
        self._curves_of: tuple[object, ...] = ()
        self._curves: list[Curve] = []
        self._drawn_as: tuple[object, ...] = ()
        self._drawn: Drawn | None = None

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Rebuilt after each step and each key of this screen."""
        return (state.history, state.plots, state.has_ended)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """Title, panes, axis, cursor, table."""
        plots, names = state.plots, plotted(state.history, state.plots)
        curves = self._curves_for(state, names)
        whole = x_range(curves, is_growing=not state.has_ended)
        if whole is None:
            self.geometry = None
            why = f"{', '.join(names)}: not measured in this run" if state.history.lines else NOT_YET
            return [rule(width, "plot"), *(line((f"  {row}", ".muted")) for row in wrapped(why, width - 2))]
        own = [curve for curve in curves if curve.run is None]
        rows = table(curves, plots, plots.window or whole, width)[: max(2, height // 3)]
        told = [cursor_line(own, plots)] if plots.cursor is not None else []
        meaning = meaning_of(names[0]) if len(names) == 1 and height >= ROWS_WITH_MEANING else ""
        meant = [line((f"  {meaning}", ".muted")).truncate(width, ellipsis=True)] if meaning else []
        num_rows = max(3, height - len(rows) - len(told) - len(meant) - 3)
        drawn = self._drawn_for(curves, plots, whole, width, num_rows)
        self.geometry = drawn.geometry
        cursor = None if plots.cursor is None else column_of(plots.cursor, drawn.geometry)
        return [
            _title(names, plots, drawn.how, width),
            *(row.with_cursor(cursor) for row in drawn.rows),
            *axis_rows(drawn.geometry, plots, width),
            *meant,
            *told,
            *rows,
        ]

    def _curves_for(self, state: ViewState, names: tuple[str, ...]) -> list[Curve]:
        plots = state.plots
        if self._history is not state.history or self._curves_of != (plots.compared, names, plots.x):
            self._history, self._curves_of = state.history, (plots.compared, names, plots.x)
            self._curves = _curves(state, names)
        return self._curves

    def _drawn_for(
        self, curves: list[Curve], plots: PlotView, whole: tuple[float, float], width: int, num_rows: int
    ) -> Drawn:
        how = (plots.window, plots.y, plots.is_log, plots.smoothing, plots.shows_band, whole, width, num_rows)
        if self._drawn is None or self._drawn_as != how or self._drawn.curves is not curves:
            self._drawn, self._drawn_as = drawn_of(curves, plots, whole, width, num_rows), how
        return self._drawn

    # --- the window and the cursor, for keys and the mouse ---------------------------------------------------------

    def zoomed(self, factor: float, around: float | None = None) -> WindowSet | None:
        """The window so many times as narrow, around the cursor, else its middle."""
        if self.geometry is None or self._state is None:
            return None
        low, high = self.geometry.window
        cursor = self._state.plots.cursor
        centre = around if around is not None else cursor if cursor is not None else (low + high) / 2
        centre = min(max(centre, low), high)
        return self._within(centre - (centre - low) / factor, centre + (high - centre) / factor)

    def panned(self, by: float) -> WindowSet | None:
        """The window moved by a part of its width."""
        if self.geometry is None:
            return None
        low, high = self.geometry.window
        first, last = self.geometry.whole
        shift = min(max((high - low) * by, first - low), last - high)
        return self._within(low + shift, high + shift)

    def _within(self, low: float, high: float) -> WindowSet | None:
        assert self.geometry is not None
        first, last = self.geometry.whole
        if high - low < (last - first) * 1e-4:
            return None
        low, high = max(low, first), min(high, last)
        is_whole = high - low >= (last - first) * (1 - 1e-9)
        return WindowSet(window=None if is_whole else (low, high))

    def cursor_moved(self, columns: int) -> CursorSet | None:
        """The cursor at the next measurement at least so many columns further; the first key sets it at the last."""
        if self.geometry is None or self._state is None or not self.geometry.places:
            return None
        low, high = self.geometry.window
        seen = [x for x in self.geometry.places if low <= x <= high] or list(self.geometry.places)
        cursor = self._state.plots.cursor
        if cursor is None:
            return CursorSet(cursor=seen[-1])
        wanted = cursor + columns * (high - low) / self.geometry.columns
        if columns > 0:
            return CursorSet(cursor=next((x for x in seen if x >= wanted and x > cursor), seen[-1]))
        return CursorSet(cursor=next((x for x in reversed(seen) if x <= wanted and x < cursor), seen[0]))

    def cursor_near(self, x: float) -> CursorSet | None:
        """The cursor at the measurement that is nearest."""
        if self.geometry is None or not self.geometry.places:
            return None
        return CursorSet(cursor=min(self.geometry.places, key=lambda place: abs(place - x)))

    def on_click(self, event: events.Click) -> None:
        """Put the cursor there."""
        if self.geometry is not None:
            self._post(self.cursor_near(self.geometry.x_at(event.get_content_offset_capture(self).x)))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Zoom in around the pointer; with shift or control go left."""
        self._scrolled(event, ZOOM)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Zoom out around the pointer; with shift or control go right."""
        self._scrolled(event, 1 / ZOOM)

    def _scrolled(self, event: events.MouseEvent, factor: float) -> None:
        event.stop()
        if self.geometry is None:
            return
        if event.shift or event.ctrl:
            self._post(self.panned(-PAN if factor > 1 else PAN))
        else:
            self._post(self.zoomed(factor, self.geometry.x_at(event.get_content_offset_capture(self).x)))

    def _post(self, change: WindowSet | CursorSet | None) -> None:
        if change is not None:
            self.post_message(StateChanged(change))


def _curves(state: ViewState, names: Sequence[str]) -> list[Curve]:
    plots = state.plots
    curves = [curve_of(state.history, name, number, plots.x) for number, name in enumerate(names, start=1)]
    if plots.compared is None:
        return curves
    other = plots.compared
    others = [curve_of(other.history, name, number, plots.x, other.run) for number, name in enumerate(names, start=1)]
    if other.branched_at is not None and plots.x is not XAxis.TIME:  # each run's time begins with its own first step
        pairs = zip(curves, others, strict=True)
        curves = [continued(own, parents, after=other.branched_at) for own, parents in pairs]
    return curves + others


def _title(names: Sequence[str], plots: PlotView, how: str, width: int) -> Content:
    title = " + ".join(names)
    notes = [how] if how else []
    if plots.smoothing:
        notes.append(f"smoothed {plots.smoothing:g}")
    if plots.is_log:
        notes.append("logarithmic")
    if plots.window is not None:
        notes.append("zoomed: 0 shows all")
    if plots.reading is not None:
        notes.append(f"reading {plots.reading} …")
    elif plots.compared is not None:
        notes.append(f"{DASHES} {plots.compared.run}")
    note = " · ".join(notes)
    room = max(width // 2 - 4, width - cell_len(note) - 8)
    if cell_len(title) > room:
        title = fit(title, room)
    left_over = width - cell_len(title) - 8
    return rule(width, title, fit(note, left_over) if cell_len(note) > left_over else note)


def cursor_line(own: Sequence[Curve], plots: PlotView) -> Content:
    """`at step 120 · 04:15:33 · 4m48s since the first step · policy version 118`."""
    assert plots.cursor is not None
    points = [point for curve in own for point in curve.points if point.y is not None]
    if not points:
        return line(("not measured in this run", ".muted"))
    point = min(points, key=lambda each: abs(each.x - plots.cursor))  # type: ignore[operator]
    began = min(each.time for each in points)
    clock = time.strftime("%H:%M:%S", time.localtime(point.time))
    return line(
        ("▲ ", ".accent"),
        (f"step {point.step:,}", ".strong"),
        (f" · {clock} · {duration_text(point.time - began)} in · policy version {point.policy_version:,}", ".muted"),
    )


def table(curves: Sequence[Curve], plots: PlotView, window: tuple[float, float], width: int) -> list[Content]:
    """One line a curve: its value at the cursor, and what it comes to within the window."""
    wanted = ["last", "min", "max", "mean"]
    if plots.cursor is not None:
        wanted.insert(0, "▲ cursor")
    names = wanted[: max(1, (width - MIN_NAME_WIDTH) // VALUE_WIDTH)]
    names = [name for name in ("▲ cursor", "last", "mean", "min", "max") if name in names]
    name_width = width - VALUE_WIDTH * len(names)
    where = "in sight" if plots.window is not None else "over the run"
    header = line((fit(f"  {where}", name_width), ".faint"),
                  *((fit(name, VALUE_WIDTH, right=True), ".muted") for name in names))  # fmt: skip
    rows = [header]
    for curve in sorted(curves, key=lambda each: (each.number, each.run is not None)):
        sums = curve.figures(window)
        at = None if plots.cursor is None else curve.at(plots.cursor)
        values: dict[str, float | None] = {"▲ cursor": at.y if at else None}
        if sums is not None:
            values |= {"last": sums.last, "mean": sums.mean, "min": sums.least, "max": sums.most}
        sign = str(curve.number) if curve.run is None else DASHES
        label = metric_text(curve.name) if curve.run is None else curve.run
        cells: list[Styled] = []
        for name in names:
            value = values.get(name)
            verdict = judge(value, curve.band) if name != "mean" else judge(None, None)
            cells.append(
                (
                    fit(value_text(curve.name, value), VALUE_WIDTH, right=True),
                    verdict.style if verdict.style == ".warning" else "",
                )
            )
        rows.append(line((f"{sign} ", curve_style(curve.number)), fit(label, name_width - 2), *cells))
    return rows
