"""Draws curves as rows of cells: panes with labels, bands and signs, and the x axis.

Drawn in braille by our own canvas: plotting libraries have no bands behind curves, no theme styles, and repaint
everything for every change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.content import Content, Span

from grpo_engine.wire.metrics import Band
from grpo_tui.ui.widgets.lines import NUM_SHARES, Styled, fit, line
from grpo_tui.ui.widgets.main.metrics_panel import band_text
from grpo_tui.view.metrics.braille import COLUMNS, ROWS, Canvas, thinned
from grpo_tui.view.metrics.curves import (
    Curve,
    Pane,
    Scale,
    beyond,
    clipped,
    own_scale,
    panes_of,
    smoothed,
    tick_texts,
    ticks,
    x_ticks,
)
from grpo_tui.view.metrics.names import unit_of
from grpo_tui.view.metrics.state import PlotView, XAxis

FREE = " ┈"
"""Cells that the cursor may take."""
OWN_MARK, OTHER_MARK = "●", "○"
AXIS_WORDS = {XAxis.STEP: "step", XAxis.TIME: "elapsed", XAxis.VERSION: "policy version"}
ROWS_A_TICK = 3
COLUMNS_A_TICK = 14


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
    words_from: int
    """The column from which words stand that nothing may cross."""

    def with_cursor(self, column: int | None) -> Content:
        """The row, with the cursor where nothing is drawn."""
        if column is None or column >= self.words_from or self.text[column] not in FREE:
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


def curve_style(number: int) -> str:
    """The colour of a curve, by its number from 1."""
    return f".share-{(number - 1) % NUM_SHARES}"


def metric_text(name: str) -> str:
    """`train/step_time (s)`."""
    unit = unit_of(name)
    return f"{name} ({unit})" if unit else name


def drawn_of(curves: list[Curve], plots: PlotView, whole: tuple[float, float], width: int, num_rows: int) -> Drawn:
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
    for curve in pane.curves:
        _draw_errors(curve, pane, plots, geometry, canvas)
    for curve in sorted(pane.curves, key=lambda each: each.run is None):  # this run's curves over the other's
        _draw(curve, pane, plots, geometry, canvas, marks)
    labels = _labels(pane, height)
    rows = []
    for row in range(height):
        text = [" "] * geometry.columns
        spans: list[Span] = []
        words_from = geometry.columns
        if pane.band is not None and pane.scale is not None:
            words_from = _put_band(pane.band, pane.scale, row, height, text, spans)
        for column in range(words_from):
            sign, style = marks.get((column, row)) or canvas.cell(column, row)
            if sign != " ":
                text[column] = sign
                spans.append(Span(column, column + 1, style))
        label = labels.get(row, "")
        head = f"{fit(label, geometry.left - 1, right=True)}{'┤' if label else '│'}"
        rows.append(Row(head=line((head, ".muted")), text=text, spans=_joined(spans), words_from=words_from))
    return [*title, *rows]


def _draw(
    curve: Curve, pane: Pane, plots: PlotView, geometry: Geometry, canvas: Canvas,
    marks: dict[tuple[int, int], tuple[str, str]],
) -> None:  # fmt: skip
    scale = pane.scale or own_scale([each for each in pane.curves if each.number == curve.number], geometry.window,
                                    is_log=plots.is_log)  # fmt: skip
    style = curve_style(curve.number)
    points = [(point.x, point.y) for point in curve.points]
    if plots.smoothing > 0 and not curve.is_sparse:
        if curve.run is None and not curve.errors:
            _draw_dots(points, scale, geometry, canvas, ".faint")
        even = [(point.x, point.y) for point in curve.points if not point.is_extreme]
        means = smoothed([y for _, y in even], plots.smoothing)
        points = [(x, y) for (x, _), y in zip(even, means, strict=True)]
    _draw_line(points, scale, geometry, canvas, style, is_dashed=curve.run is not None)
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
            if cell is not None and marks.get(cell, ("", style))[1] == style:  # free, or a measurement of its own
                marks[cell] = (str(curve.number), style)


def _draw_errors(curve: Curve, pane: Pane, plots: PlotView, geometry: Geometry, canvas: Canvas) -> None:
    """Fill the range of the standard error with a dot among eight."""
    if not curve.errors:
        return
    scale = pane.scale or own_scale([curve], geometry.window, is_log=plots.is_log)
    dot_of = _mapper(scale, geometry, canvas)
    edges = []
    for sign in (-1, 1):
        edge = curve.edge(sign)
        means = smoothed([y for _, y in edge], 0.0 if curve.is_sparse else plots.smoothing)
        edges.append([dot_of(x, y) for (x, _), y in zip(edge, means, strict=True) if y is not None])
    ranges = [(low, high) for low, high in zip(*edges, strict=True) if low is not None and high is not None]
    for left, right in zip(ranges, ranges[1:] or ranges, strict=False):
        (x0, low0), (_, high0) = left
        (x1, low1), (_, high1) = right
        for x in range(max(0, x0), min(x1, canvas.num_columns - 1) + 1):
            share = (x - x0) / (x1 - x0) if x1 > x0 else 0.0
            top, bottom = round(high0 + (high1 - high0) * share), round(low0 + (low1 - low0) * share)
            for y in range(max(0, top), min(bottom, canvas.num_rows - 1) + 1):
                if x % 2 == 0 and (x + y) % 4 == 0:
                    canvas.dot(x, y, curve_style(curve.number))


def _draw_dots(
    points: Sequence[tuple[float, float | None]], scale: Scale, geometry: Geometry, canvas: Canvas, style: str
) -> None:
    """Single measurements as dots: a line would fill the plot around the smoothed curve."""
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
    return column_of(x, geometry) or 0, _row(place, height)


def _row(place: float, height: int) -> int:
    """The row of cells in which the dot of a place is."""
    return round((1 - place) * (height * ROWS - 1)) // ROWS


def column_of(x: float, geometry: Geometry) -> int | None:
    low, high = geometry.window
    if not low <= x <= high:
        return None
    return round((x - low) / (high - low) * (geometry.columns * COLUMNS - 1)) // COLUMNS


def _put_band(band: Band, scale: Scale, row: int, height: int, text: list[str], spans: list[Span]) -> int:
    """The healthy values of a row behind the curve; their ends as dotted lines, the upper one named.

    Returns:
        The column from which its name stands.
    """
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
    if not rows or row != rows[0] or len(text) <= len(words) + 4:
        return len(text)
    text[-len(words) :] = words
    return len(text) - len(words)


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


def _labels(pane: Pane, height: int) -> dict[int, str]:
    """Round numbers by the row at which they stand."""
    if pane.scale is None:
        return {0: "max", height - 1: "min"}
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


def _pane_title(pane: Pane, geometry: Geometry) -> Row:
    first = pane.curves[0]
    note = _band_note(pane)
    title = fit(f"{first.number} {metric_text(first.name)}{f' · {note}' if note else ''}", geometry.columns)
    return Row(
        head=Content(" " * geometry.left), text=[*title], spans=[Span(0, 1, curve_style(first.number))], words_from=0
    )


def axis_rows(geometry: Geometry, plots: PlotView, width: int) -> list[Content]:
    """The line below with its ticks, then their labels and what the axis is."""
    word = AXIS_WORDS[plots.x]
    text = ["─"] * geometry.columns
    labels: list[tuple[int, str]] = []
    free_from = 0
    for value, label in x_ticks(geometry.window, plots.x, max(1, geometry.columns // COLUMNS_A_TICK)):
        column = column_of(value, geometry)
        if column is None:
            continue
        text[column] = "┬"
        start = min(max(0, geometry.left + column - len(label) // 2), width - len(label))
        if start >= free_from:
            labels.append((start, label))
            free_from = start + len(label) + 2
    cursor = None if plots.cursor is None else column_of(plots.cursor, geometry)
    axis: list[str | Styled] = [(" " * (geometry.left - 1) + "└", ".muted")]
    if cursor is None:
        axis.append(("".join(text), ".muted"))
    else:
        axis += [("".join(text[:cursor]), ".muted"), ("▲", ".accent"), ("".join(text[cursor + 1 :]), ".muted")]
    row, at = _labelled(labels, word, width)
    return [line(*axis), line((row[:at], ".muted"), (word, ".faint"), (row[at + len(word) :], ".muted"))]


def _labelled(labels: Sequence[tuple[int, str]], word: str, width: int) -> tuple[str, int]:
    """The row of labels, and the place in it of the last gap that is wide enough for the word.

    Where no gap is, the last labels are left out.
    """
    row = " " * (width + 1)
    for start, label in labels:
        row = f"{row[:start]}{label}{row[start + len(label) :]}"
    gap = row.rfind(" " * (len(word) + 3))
    if gap < 0 and labels:
        return _labelled(labels[:-1], word, width)
    return row[:width], gap + 2
