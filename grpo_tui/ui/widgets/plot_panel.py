"""Curves of metrics over each other, full size: axes with round numbers, healthy bands, a cursor, and a table below.

Drawn in braille by a canvas of our own: a plotting library draws its own axes and colours, and neither bands behind
the curve, nor styles of the theme, nor single lines that are repainted by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual import events
from textual.content import Content, Span

from grpo_engine.wire.metrics import Band
from grpo_tui.ui.messages import Came
from grpo_tui.ui.widgets.lines import NUM_SHARES, Lines, Styled, fit, line, rule
from grpo_tui.ui.widgets.metrics_panel import band_text, judge
from grpo_tui.view.braille import COLUMNS, ROWS, Canvas, thinned
from grpo_tui.view.curves import (
    Curve,
    Pane,
    Scale,
    beyond,
    clipped,
    curve_of,
    figures,
    own_scale,
    panes_of,
    plotted,
    smoothed,
    tick_texts,
    ticks,
    x_range,
    x_ticks,
)
from grpo_tui.view.format import UNKNOWN, duration_text, number_text
from grpo_tui.view.history import MetricHistory
from grpo_tui.view.metric_names import band_of, unit_of
from grpo_tui.view.plot_view import CursorSet, PlotView, WindowSet, XAxis
from grpo_tui.view.state import ViewState

FREE = " ┈"
"""Cells that the cursor may take."""
OWN_MARK, OTHER_MARK, DASHES = "●", "○", "┄"
AXIS_WORDS = {XAxis.STEP: "step", XAxis.TIME: "since the first step", XAxis.VERSION: "policy version"}
VALUE_WIDTH = 9
MIN_NAME_WIDTH = 18
ROWS_A_TICK = 3
COLUMNS_A_TICK = 14
ZOOM = 2.0
PAN = 0.25
NOT_YET = "no step yet: metrics appear here when the trainer has done its first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Where the plot lies in the widget, for the cursor and the mouse."""

    left: int
    columns: int
    window: tuple[float, float]
    whole: tuple[float, float]
    places: tuple[float, ...]
    """Where this run has measurements, in rising order, each once."""

    def x_at(self, column: int) -> float:
        """The place on the axis at the middle of a column of the widget."""
        low, high = self.window
        share = (column - self.left + 0.5) / self.columns
        return low + (high - low) * min(max(share, 0.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a pane: its label, and the cells of the plot."""

    head: Content
    text: list[str]
    spans: list[Span]

    def with_cursor(self, column: int | None) -> Content:
        """The row, with the cursor where nothing is drawn."""
        if column is None or self.text[column] not in FREE:
            return self.head + Content("".join(self.text), self.spans)
        text = [*self.text]
        text[column] = "│"
        return self.head + Content("".join(text), [*self.spans, Span(column, column + 1, ".accent")])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Everything but the cursor and the numbers."""

    curves: list[Curve]
    geometry: Geometry
    rows: list[Row]
    how: str
    """How several metrics share the height, in words; of one, where its band is that is out of sight."""


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
        # A cursor that moves makes neither the curves anew, nor what is drawn of them.
        self._history: MetricHistory | None = None
        self._curves_of: tuple[object, ...] = ()
        self._curves: list[Curve] = []
        self._drawn_as: tuple[object, ...] = ()
        self._drawn: Drawn | None = None

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Made anew with each step, and with each key of this screen."""
        return (state.history, state.plots, state.has_ended)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """Title, panes, axis, cursor, table."""
        plots, names = state.plots, plotted(state.history, state.plots)
        curves = self._curves_for(state, names)
        whole = x_range(curves, is_growing=not state.has_ended)
        if whole is None:
            self.geometry = None
            why = f"{', '.join(names)}: not measured in this run" if state.history.lines else NOT_YET
            return [rule(width, "plot"), line((f"  {why}", ".muted"))]
        own = [curve for curve in curves if curve.run is None]
        table = _table(curves, plots, plots.window or whole, width)[: max(2, height // 3)]
        told = [_cursor_line(own, plots)] if plots.cursor is not None else []
        num_rows = max(3, height - len(table) - len(told) - 3)
        drawn = self._drawn_for(curves, plots, whole, width, num_rows)
        self.geometry = drawn.geometry
        cursor = None if plots.cursor is None else _column(plots.cursor, drawn.geometry)
        return [
            _title(names, plots, drawn.how, width),
            *(row.with_cursor(cursor) for row in drawn.rows),
            *_axis_rows(drawn.geometry, plots, width),
            *told,
            *table,
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
            self._drawn, self._drawn_as = _drawn(curves, plots, whole, width, num_rows), how
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
            self._tell(self.cursor_near(self.geometry.x_at(event.get_content_offset_capture(self).x)))

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
            self._tell(self.panned(-PAN if factor > 1 else PAN))
        else:
            self._tell(self.zoomed(factor, self.geometry.x_at(event.get_content_offset_capture(self).x)))

    def _tell(self, change: WindowSet | CursorSet | None) -> None:
        if change is not None:
            self.post_message(Came(change))


def curve_style(number: int) -> str:
    """The colour of a curve, by its number from 1."""
    return f".share-{(number - 1) % NUM_SHARES}"


def metric_text(name: str) -> str:
    """`train/step_time (s)`."""
    unit = unit_of(name)
    return f"{name} ({unit})" if unit else name


def _curves(state: ViewState, names: Sequence[str]) -> list[Curve]:
    plots = state.plots
    curves = [curve_of(state.history, name, number, plots.x) for number, name in enumerate(names, start=1)]
    if plots.compared is not None:
        other = plots.compared
        curves += [
            curve_of(other.history, name, number, plots.x, other.run) for number, name in enumerate(names, start=1)
        ]
    return curves


# --- the panes -------------------------------------------------------------------------------------------------------


def _drawn(curves: list[Curve], plots: PlotView, whole: tuple[float, float], width: int, num_rows: int) -> Drawn:
    window = plots.window or whole
    panes, how = panes_of(
        curves, window, is_log=plots.is_log, shows_band=plots.shows_band, how=plots.y, num_rows=num_rows
    )
    left = max(_label_width(pane, num_rows // len(panes)) for pane in panes) + 1
    places = sorted({x for curve in curves if curve.run is None for x, _ in curve.measured})
    geometry = Geometry(left=left, columns=max(8, width - left), window=window, whole=whole, places=tuple(places))
    rows: list[Row] = []
    for place, pane in enumerate(panes):
        share = num_rows // len(panes) + (1 if place < num_rows % len(panes) else 0)
        rows += _pane_rows(pane, plots, geometry, share, has_title=len(panes) > 1)
    return Drawn(curves=curves, geometry=geometry, rows=rows, how=how or _band_note(panes[0]))


def _pane_rows(pane: Pane, plots: PlotView, geometry: Geometry, height: int, *, has_title: bool) -> list[Row]:
    """One pane: labels of its height to the left, then the curves before their band."""
    title: list[Row] = []
    if has_title:
        title = [_pane_title(pane, geometry)]
        height -= 1
    canvas = Canvas(geometry.columns, height)
    marks: dict[tuple[int, int], tuple[str, str]] = {}
    for curve in sorted(pane.curves, key=lambda each: each.run is None):  # this run's curves over the other's
        _draw(curve, pane, plots, geometry, canvas, marks)
    labels = _labels(pane, height)
    rows = []
    for row in range(height):
        text = [" "] * geometry.columns
        spans: list[Span] = []
        if pane.band is not None and pane.scale is not None:
            _put_band(pane.band, pane.scale, row, height, text, spans)
        for column in range(geometry.columns):
            sign, style = marks.get((column, row)) or canvas.cell(column, row)
            if sign != " ":
                text[column] = sign
                spans.append(Span(column, column + 1, style))
        label = labels.get(row, "")
        head = f"{fit(label, geometry.left - 1, right=True)}{'┤' if label else '│'}"
        rows.append(Row(head=line((head, ".muted")), text=text, spans=_joined(spans)))
    return [*title, *rows]


def _draw(
    curve: Curve, pane: Pane, plots: PlotView, geometry: Geometry, canvas: Canvas,
    marks: dict[tuple[int, int], tuple[str, str]],
) -> None:  # fmt: skip
    scale = pane.scale or own_scale([each for each in pane.curves if each.number == curve.number], geometry.window,
                                    is_log=plots.is_log)  # fmt: skip
    style = curve_style(curve.number)
    raw = [(point.x, point.y) for point in curve.points]
    values = [y for _, y in raw]
    is_smoothed = plots.smoothing > 0 and not curve.is_sparse
    if is_smoothed:
        if curve.run is None:
            _draw_dots(raw, scale, geometry, canvas, ".faint")
        values = smoothed(values, plots.smoothing)
    points = [(x, y) for (x, _), y in zip(raw, values, strict=True)]
    _draw_line(points, scale, geometry, canvas, style if not curve.is_sparse else ".faint",
               is_dashed=curve.run is not None)  # fmt: skip
    low, high = geometry.window
    seen = [(x, y) for x, y in points if y is not None and low <= x <= high]
    if curve.is_sparse:
        for x, y in seen:
            cell = _cell_of(x, y, scale, geometry, canvas.height)
            if cell is not None:
                marks[cell] = (OWN_MARK if curve.run is None else OTHER_MARK, style)
    if len({each.number for each in pane.curves}) > 1 and curve.run is None:
        for part in (0.98, 0.66, 0.33):
            wanted = low + (high - low) * part
            near = min(seen, key=lambda point: abs(point[0] - wanted), default=None)
            cell = None if near is None else _cell_of(*near, scale, geometry, canvas.height)
            if cell is not None and cell not in marks:
                marks[cell] = (str(curve.number), style)


def _draw_dots(
    points: Sequence[tuple[float, float | None]], scale: Scale, geometry: Geometry, canvas: Canvas, style: str
) -> None:
    """Each measurement by itself: joined ones would fill the plot around the smooth curve."""
    dot_of = _mapper(scale, geometry, canvas)
    for piece in clipped(points, geometry.window):
        for x, y in piece:
            dot = dot_of(x, y)
            if dot is not None:
                canvas.dot(*dot, style)


def _mapper(scale: Scale, geometry: Geometry, canvas: Canvas) -> Callable[[float, float], tuple[int, int] | None]:
    """Where the dot of a point is; far outside is as good as just outside, and a line to there has fewer dots."""
    low, high = geometry.window
    columns_a_unit, last_row = (canvas.num_columns - 1) / (high - low), canvas.num_rows - 1
    lowest, highest = -last_row // 2, last_row + last_row // 2

    def dot_of(x: float, y: float) -> tuple[int, int] | None:
        place = scale.place(y)
        if place is None:
            return None
        return round((x - low) * columns_a_unit), min(max(round((1 - place) * last_row), lowest), highest)

    return dot_of


def _draw_line(
    points: Sequence[tuple[float, float | None]], scale: Scale, geometry: Geometry, canvas: Canvas, style: str, *,
    is_dashed: bool,
) -> None:  # fmt: skip
    if scale.is_log:
        points = [(x, y if y is not None and y > 0 else None) for x, y in points]
    dot_of = _mapper(scale, geometry, canvas)
    for piece in clipped(points, geometry.window):
        dots = [dot_of(x, y) for x, y in piece]
        canvas.polyline(thinned([dot for dot in dots if dot is not None]), style, is_dashed=is_dashed)


def _cell_of(x: float, y: float, scale: Scale, geometry: Geometry, height: int) -> tuple[int, int] | None:
    place = scale.place(y)
    if place is None or not 0 <= place <= 1:
        return None
    return _column(x, geometry) or 0, _row(place, height)


def _row(place: float, height: int) -> int:
    """The row of cells in which the dot of a place is."""
    return round((1 - place) * (height * ROWS - 1)) // ROWS


def _column(x: float, geometry: Geometry) -> int | None:
    low, high = geometry.window
    if not low <= x <= high:
        return None
    return round((x - low) / (high - low) * (geometry.columns * COLUMNS - 1)) // COLUMNS


def _put_band(band: Band, scale: Scale, row: int, height: int, text: list[str], spans: list[Span]) -> None:
    """The healthy values of a row behind the curve; their ends as dotted lines, the upper one named."""
    middle = 1 - (row + 0.5) / height
    low = None if band.low is None else scale.place(band.low)
    high = None if band.high is None else scale.place(band.high)
    if (low is None or middle >= low) and (high is None or middle <= high):
        spans.append(Span(0, len(text), ".band"))
    rows = [_row(end, height) for end in (high, low) if end is not None and 0 <= end <= 1]
    if row in rows:
        text[:] = ["┈"] * len(text)
        spans.append(Span(0, len(text), ".band-edge"))
    words = f" healthy {band_text(band)} "
    if rows and row == rows[0] and len(text) > len(words) + 4:
        text[-len(words) :] = words


def _band_note(pane: Pane) -> str:
    """Where the healthy values are, in words, while no end of the band is in sight."""
    if pane.band is None or pane.scale is None:
        return ""
    ends = [end for end in (pane.band.low, pane.band.high) if end is not None]
    if any(pane.scale.low <= end <= pane.scale.high for end in ends):
        return ""
    where = beyond(pane.band, pane.scale)
    return f"healthy {band_text(pane.band)}{f' is {where}' if where else ''} (b)"


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Neighbours of one style as one span."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].style == span.style and joined[-1].end == span.start:
            joined[-1] = Span(joined[-1].start, span.end, span.style)
        else:
            joined.append(span)
    return joined


# --- labels ----------------------------------------------------------------------------------------------------------


def _labels(pane: Pane, height: int) -> dict[int, str]:
    """Round numbers by the row at which they stand."""
    if pane.scale is None:
        return {0: "most", height - 1: "least"}
    values = ticks(pane.scale, max(2, height // ROWS_A_TICK))
    texts = tick_texts(values, is_log=pane.scale.is_log)
    labels: dict[int, str] = {}
    for value, text in zip(values, texts, strict=True):
        place = pane.scale.place(value)
        if place is not None:
            labels[_row(place, height)] = text
    return labels


def _label_width(pane: Pane, height: int) -> int:
    return max((cell_len(text) for text in _labels(pane, max(3, height)).values()), default=0)


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


def _pane_title(pane: Pane, geometry: Geometry) -> Row:
    first = pane.curves[0]
    note = _band_note(pane)
    title = fit(f"{first.number} {metric_text(first.name)}{f' · {note}' if note else ''}", geometry.columns)
    return Row(head=Content(" " * geometry.left), text=[*title], spans=[Span(0, 1, curve_style(first.number))])


def _axis_rows(geometry: Geometry, plots: PlotView, width: int) -> list[Content]:
    """The line below with its ticks, then their labels and what the axis is."""
    word = AXIS_WORDS[plots.x]
    text = ["─"] * geometry.columns
    labels = [" "] * width
    free_from = 0
    last = width - len(word) - 1
    for value, label in x_ticks(geometry.window, plots.x, max(1, geometry.columns // COLUMNS_A_TICK)):
        column = _column(value, geometry)
        if column is None:
            continue
        text[column] = "┬"
        start = max(0, geometry.left + column - len(label) // 2)
        if start >= free_from and start + len(label) < last:
            labels[start : start + len(label)] = label
            free_from = start + len(label) + 2
    cursor = None if plots.cursor is None else _column(plots.cursor, geometry)
    axis: list[str | Styled] = [(" " * (geometry.left - 1) + "└", ".muted")]
    if cursor is None:
        axis.append(("".join(text), ".muted"))
    else:
        axis += [("".join(text[:cursor]), ".muted"), ("▲", ".accent"), ("".join(text[cursor + 1 :]), ".muted")]
    return [line(*axis), line(("".join(labels[:last]), ".muted"), (f" {word}", ".faint"))]


# --- numbers ---------------------------------------------------------------------------------------------------------


def _cursor_line(own: Sequence[Curve], plots: PlotView) -> Content:
    """`at step 120 · 04:15:33 · 4m48s since the first step · policy 118`."""
    assert plots.cursor is not None
    points = [point for curve in own for point in curve.points if point.y is not None]
    if not points:
        return line(("this run has not measured it", ".muted"))
    point = min(points, key=lambda each: abs(each.x - plots.cursor))  # type: ignore[operator]
    began = min(each.time for each in points)
    clock = time.strftime("%H:%M:%S", time.localtime(point.time))
    return line(
        ("▲ ", ".accent"),
        (f"step {point.step:,}", ".strong"),
        (f" · {clock} · {duration_text(point.time - began)} in · policy {point.policy_version:,}", ".muted"),
    )


def _table(curves: Sequence[Curve], plots: PlotView, window: tuple[float, float], width: int) -> list[Content]:
    """One line a curve: its value at the cursor, and what it comes to within the window."""
    wanted = ["last", "least", "most", "mean"]
    if plots.cursor is not None:
        wanted.insert(0, "▲ cursor")
    names = wanted[: max(1, (width - MIN_NAME_WIDTH) // VALUE_WIDTH)]
    names = [name for name in ("▲ cursor", "last", "mean", "least", "most") if name in names]
    name_width = width - VALUE_WIDTH * len(names)
    where = "in sight" if plots.window is not None else "over the run"
    header = line((fit(f"  {where}", name_width), ".faint"),
                  *((fit(name, VALUE_WIDTH, right=True), ".muted") for name in names))  # fmt: skip
    rows = [header]
    low, high = window
    for curve in sorted(curves, key=lambda each: (each.number, each.run is not None)):
        seen = [y for x, y in curve.measured if low <= x <= high]
        sums = figures(seen)
        at = None if plots.cursor is None else curve.at(plots.cursor)
        values: dict[str, float | None] = {"▲ cursor": at.y if at else None}
        if sums is not None:
            values |= {"last": sums.last, "mean": sums.mean, "least": sums.least, "most": sums.most}
        sign = str(curve.number) if curve.run is None else DASHES
        label = metric_text(curve.name) if curve.run is None else curve.run
        band = band_of(curve.name)
        cells: list[Styled] = []
        for name in names:
            value = values.get(name)
            verdict = judge(value, band) if name != "mean" else judge(None, None)
            text = number_text(value) if value is not None else UNKNOWN
            cells.append((fit(text, VALUE_WIDTH, right=True), verdict.style if verdict.style == ".warning" else ""))
        rows.append(line((f"{sign} ", curve_style(curve.number)), fit(label, name_width - 2), *cells))
    return rows
