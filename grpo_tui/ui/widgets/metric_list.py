"""All metrics of a run in their groups, with their latest values; marked ones carry the number of their curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual import events
from textual.content import Content

from grpo_tui.ui.messages import StateChanged
from grpo_tui.ui.widgets.lines import Lines, Wheel, fit, line, rule
from grpo_tui.ui.widgets.main.metrics_panel import judge
from grpo_tui.ui.widgets.plot_drawing import curve_style
from grpo_tui.view.metrics.curves import listed, plotted
from grpo_tui.view.metrics.history import MetricHistory
from grpo_tui.view.metrics.names import band_of, group_of, our_name, value_text
from grpo_tui.view.metrics.state import MetricMarked, MetricSelected
from grpo_tui.view.state import ViewState

VALUE_WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A metric, or the title of a group where `name` is None."""

    name: str | None
    text: str


class MetricList(Lines, Wheel):
    """Scrolls with the selection."""

    ON_WHEEL = ("screen.select(-1)", "screen.select(1)")

    DEFAULT_CSS = """
    MetricList { padding: 0 1; height: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._top = 0
        self._shown: list[Row] = []

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Rebuilt after each step, search or mark."""
        plots = state.plots
        return (state.history, plots.query, plots.is_searching, plots.selected, plots.marked)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """A title, then as many rows as fit around the selected one."""
        plots = state.plots
        names = listed(state.history, plots.query)
        total = len(names) if not plots.query else len(listed(state.history, ""))
        if not names:
            self._shown = []
            title = rule(width, "metrics", f"0 of {total}" if plots.query else "")
            why = f"no metric matches “{plots.query}”: esc shows all" if plots.query else "none yet"
            return [title, line((fit(f"  {why}", width), ".muted"))]
        rows = _rows(names, is_grouped=not plots.query)
        selected = plots.selected if plots.selected in names else names[0]
        place = next(number for number, row in enumerate(rows) if row.name == selected)
        room = height - 1
        first = place - 1 if place and rows[place - 1].name is None else place
        self._top = max(0, min(self._top, first, len(rows) - room))
        if place >= self._top + room:
            self._top = place - room + 1
        self._shown = rows[self._top : self._top + room]
        seen = [names.index(row.name) for row in self._shown if row.name is not None]
        note = _note(seen, len(names), total, len(plots.marked), width - 14)
        title = rule(width, "metrics", note)
        drawn = plotted(state.history, plots)
        return [title, *(_line(row, selected, drawn, bool(plots.marked), state.history, width) for row in self._shown)]

    def on_click(self, event: events.Click) -> None:
        """Select a metric; a click on the sign before it marks it."""
        place = event.get_content_offset_capture(self)
        row = self._shown[place.y - 1] if 0 < place.y <= len(self._shown) else None
        if row is None or row.name is None:
            return
        self.post_message(StateChanged(MetricSelected(name=row.name)))
        if place.x < 3:
            self.post_message(StateChanged(MetricMarked(name=row.name)))


def _note(seen: Sequence[int], num_found: int, total: int, num_marked: int, room: int) -> str:
    """Which are in sight where not all are, and how many there are."""
    parts = [f"{num_found} found of {total}" if num_found < total else f"all {total}"]
    if seen and len(seen) < num_found:
        parts = [f"{seen[0] + 1}–{seen[-1] + 1} of {num_found}"]
    if num_marked:
        parts.append(f"{num_marked} marked")
    note = ", ".join(parts)
    return note if len(note) <= room else parts[0]


def _fit(text: str, width: int) -> str:
    """Cut in the middle: names of one group differ at their ends."""
    if len(text) > width > 3:
        text = text[: width // 2] + "…" + text[len(text) - (width - width // 2 - 1) :]
    return fit(text, width)


def _rows(names: Sequence[str], *, is_grouped: bool) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        group = group_of(name)
        if is_grouped and group and (not rows or _group(rows[-1]) != group):
            rows.append(Row(name=None, text=group))
        rows.append(Row(name=name, text=name.removeprefix(f"{group}/") if is_grouped and group else name))
    return rows


def _group(row: Row) -> str:
    return row.text if row.name is None else group_of(row.name)


def _line(
    row: Row, selected: str, drawn: Sequence[str], is_marked: bool, history: MetricHistory, width: int
) -> Content:  # fmt: skip
    if row.name is None:
        return line((fit(row.text, width), ".title"))
    value = next((each.metrics[row.name] for each in reversed(history.lines) if row.name in each.metrics), None)
    verdict = judge(value, band_of(row.name, history.bands))
    number = drawn.index(row.name) + 1 if row.name in drawn else 0
    sign = (str(number) if is_marked and number else "·" if number else " ", curve_style(number) if number else "")
    ours = our_name(row.name)
    text = f"{row.text} = {ours}" if ours not in (None, row.name) else row.text
    shown = line(
        ("▌" if row.name == selected else " ", ".accent"),
        sign,
        " ",
        _fit(text, width - VALUE_WIDTH - 6),
        (" " + fit(value_text(row.name, value), VALUE_WIDTH, right=True), verdict.style or ".strong"),
        (f" {verdict.sign}", verdict.style),
    )
    return shown.stylize(".selected") if row.name == selected else shown
