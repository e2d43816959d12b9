"""Curves of runs over each other, of seeds their mean with its standard error, and the settings that differ."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.content import Content

from grpo_engine.wire.run_folder import METRICS_FILE
from grpo_tui.run_files.resolved import read_resolved
from grpo_tui.ui.board.keys import ON_CURVES
from grpo_tui.ui.board.table import KeysLine
from grpo_tui.ui.keys import bindings
from grpo_tui.ui.pages import keys_page, page_width
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.text_screen import TextScreen
from grpo_tui.ui.widgets.lines import Lines, Styled, fit, line, rule, spread
from grpo_tui.ui.widgets.plot_drawing import axis_rows, curve_style, drawn_of, metric_text
from grpo_tui.view.board.seeds import MAX_CURVES, Group, MarkedRun, curve_over, groups_of, metrics_of, scores_of
from grpo_tui.view.board.state import Board, BoardRun
from grpo_tui.view.format import UNKNOWN, count_text
from grpo_tui.view.metrics import state as plot_view
from grpo_tui.view.metrics.curves import Curve, x_range
from grpo_tui.view.metrics.names import meaning_of
from grpo_tui.view.metrics.other_runs import read_lineage
from grpo_tui.view.metrics.state import SMOOTHINGS, PlotChange, PlotView, YAxis
from grpo_tui.view.metrics.summary import Score, score_text

POLL_S = 5.0
"""Between two looks at live runs."""
SCORE_WIDTH = 15
MAX_VALUE = 16
MAX_NAME = 32
MIN_PLOT_ROWS = 6
HIGHEST = "◀"
"""Behind the highest last value."""
ONE_AXIS = PlotView(y=YAxis.SHARED, smoothing=SMOOTHINGS[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvesView:
    """What the curves are drawn from."""

    groups: tuple[Group, ...] = ()
    left_out: int = 0
    """Groups that have no room: those with the lowest rewards."""
    metrics: tuple[str, ...] = ()
    metric: str = ""
    plots: PlotView = ONE_AXIS
    note: str = "reading metrics …"
    """Why nothing is drawn."""
    said: str = ""


def read_changed(runs: Sequence[BoardRun], sizes: dict[Path, int]) -> dict[Path, MarkedRun]:
    """Metrics and settings of those runs whose metrics have another size than before. Blocks while it reads.

    Args:
        sizes: of their metrics when they were read; is changed.
    """
    changed: dict[Path, MarkedRun] = {}
    for run in runs:
        try:
            size = (run.folder / METRICS_FILE).stat().st_size
            if sizes.get(run.folder) == size:
                continue
            history = read_lineage(run.folder)
        except OSError:  # it has none yet
            continue
        try:
            resolved = read_resolved(run.folder)
        except ValueError:
            resolved = {}
        sizes[run.folder] = size
        changed[run.folder] = MarkedRun(name=run.name, history=history, resolved=resolved, label=run.label)
    return changed


def viewed(view: CurvesView, runs: Sequence[MarkedRun]) -> CurvesView:
    """The curves of runs that were read; of too many groups those with the highest metric."""
    runs = [run for run in runs if run.history.lines]
    if not runs:
        return replace(view, groups=(), note="none of these runs has measured anything yet")
    metrics = metrics_of(runs)
    metric = view.metric if view.metric in metrics else metrics[0]
    groups = groups_of(runs)
    left_out = max(0, len(groups) - MAX_CURVES)
    if left_out:
        groups = sorted(groups, key=lambda group: _value(scores_of(group, metric)[0]), reverse=True)[:MAX_CURVES]
    by_settings = sorted(groups, key=lambda group: [_rank(value) for value in group.settings.values()])
    return replace(view, groups=tuple(by_settings), left_out=left_out, metrics=tuple(metrics), metric=metric, note="")


def _rank(value: Any) -> tuple[bool, float, str]:
    """Numbers in their order, then everything else."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else 0.0, "" if is_number else str(value)


def _value(score: Score | None) -> float:
    return float("-inf") if score is None else score.value


class CurvesTitle(Lines[CurvesView]):
    """One line over everything."""

    DEFAULT_CSS = """
    CurvesTitle { height: 1; background: $panel; padding: 0 1; }
    """

    def lines(self, state: CurvesView, width: int, height: int) -> list[Content]:
        """`grpo-tui  curves of 9 runs`, and on the right which metric of how many."""
        num_runs = sum(len(group.runs) for group in state.groups)
        left: list[str | Styled] = [("grpo-tui", ".strong"), (f"  curves of {count_text(num_runs, 'run')}", ".muted")]
        if state.left_out:
            left.append((f"  {state.left_out} with the lowest values are not drawn", ".warning"))
        right: list[str | Styled] = []
        if state.metrics:
            place = state.metrics.index(state.metric) + 1
            right = [(f"  {state.metric}", ".accent"), (f"  {place} of {len(state.metrics)}", ".muted")]
        return [spread(width, left, right)]


class CurvesPanel(Lines[CurvesView]):
    """The plot, and below it a row for each curve: its settings that differ, and what it came to."""

    DEFAULT_CSS = """
    CurvesPanel { padding: 0 1; height: 1fr; }
    """

    def lines(self, state: CurvesView, width: int, height: int) -> list[Content]:
        """Title, plot, axis, table."""
        if not state.groups:
            return [rule(width, "curves"), line((f"  {state.note}", ".muted"))]
        plots = state.plots
        curves = [
            curve_over(group, state.metric, number, plots.x) for number, group in enumerate(state.groups, start=1)
        ]
        whole = x_range(curves)
        table = table_of(state, width)
        if whole is None:
            return [rule(width, "curves"), line((f"  {state.metric}: not measured", ".muted")), *table]
        meaning = meaning_of(state.metric) if height >= 20 + len(table) else ""
        meant = [line((f"  {meaning}", ".muted")).truncate(width, ellipsis=True)] if meaning else []
        num_rows = max(MIN_PLOT_ROWS, height - len(table) - len(meant) - 3)
        drawn = drawn_of(curves, plots, whole, width, num_rows)
        return [
            rule(width, metric_text(state.metric), _how(state, curves)),
            *(row.with_cursor(None) for row in drawn.rows),
            *axis_rows(drawn.geometry, plots, width),
            *meant,
            *table,
        ]


def _how(state: CurvesView, curves: Sequence[Curve]) -> str:
    parts = ["mean over seeds, dotted: ± standard error"] if any(curve.errors for curve in curves) else []
    is_smooth = state.plots.smoothing and not all(curve.is_sparse for curve in curves)
    parts += [f"smoothed {state.plots.smoothing:g}"] if is_smooth else []
    parts += ["log"] if state.plots.is_log else []
    return " · ".join(parts)


def table_of(state: CurvesView, width: int) -> list[Content]:
    """A row for each curve; the settings that do not fit are counted in the title."""
    keys = list(state.groups[0].settings)
    columns = {key: [shown_setting(group.settings[key]) for group in state.groups] for key in keys}
    names = [_name(group) for group in state.groups]
    scores = [scores_of(group, state.metric) for group in state.groups]
    room = width - 2 - 5 - 2 * (SCORE_WIDTH + 2)
    name_width = max(8, min(MAX_NAME, max(map(cell_len, names)), room - (20 if keys else 0)))
    room -= name_width
    shown: dict[str, int] = {}
    titles = _short_names(keys)
    for key in keys:
        wanted = min(MAX_VALUE, max(cell_len(titles[key]), *(cell_len(value) for value in columns[key]))) + 2
        if wanted > room:
            break
        shown[key], room = wanted, room - wanted
    hidden = len(keys) - len(shown)
    head = "  " + fit("run", name_width) + "".join("  " + fit(titles[key], shown[key] - 2) for key in shown)
    head += fit("runs", 5, right=True)
    head += "".join(" " + fit(title, SCORE_WIDTH, right=True) + " " for title in ("last", "best"))
    note = f"{count_text(hidden, 'more setting')}: d" if hidden else ""
    rows = [spread(width, [(head, ".title")], [(note, ".accent")])]
    best = max((_value(final) for final, _ in scores), default=0.0)
    for number, group in enumerate(state.groups, start=1):
        final, most = scores[number - 1]
        is_best = len(state.groups) > 1 and final is not None and final.value == best
        cells: list[str | Styled] = [(f"{number} ", curve_style(number)), fit(names[number - 1], name_width)]
        cells += ["  " + fit(columns[key][number - 1], shown[key] - 2) for key in shown]
        cells.append((fit(str(len(group.runs)), 5, right=True), ".muted"))
        cells.append((" " + fit(score_text(final), SCORE_WIDTH, right=True), ".strong" if is_best else ""))
        cells.append((f" {HIGHEST}" if is_best else "  ", ".accent"))
        cells.append((fit(score_text(most), SCORE_WIDTH, right=True), ".muted"))
        rows.append(line(*cells))
    return rows


def shown_setting(value: Any) -> str:
    """A value of a setting; a dash where a run has none."""
    return UNKNOWN if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: short if last.count(short) == 1 else key.removeprefix("services.")
        for key, short in zip(keys, last, strict=True)
    }


def _name(group: Group) -> str:
    """Of one run its name, of several what they have in common."""
    if len(group.runs) == 1:
        return group.runs[0].name
    first = group.runs[0].name.rpartition("-")[0]
    while first and not all(run.name.startswith(first) for run in group.runs):
        first = first.rpartition("-")[0]
    return f"{first}…" if first else f"{group.runs[0].name} …"


class CurvesScreen(TextScreen):
    """Over the board; reads the runs that it was opened with, and live ones again."""

    KEYS = ON_CURVES
    BINDINGS = bindings(ON_CURVES)
    DEFAULT_CSS = """
    CurvesScreen { layout: vertical; background: $background; }
    CurvesScreen CurvesPanel { height: 1fr; }
    """

    def __init__(self, runs: Sequence[BoardRun]) -> None:
        super().__init__()
        self._runs = runs
        self._view = CurvesView()

    def compose(self) -> ComposeResult:
        """Title, plot with table, keys."""
        yield CurvesTitle()
        yield CurvesPanel()
        yield KeysLine(ON_CURVES)

    def on_mount(self) -> None:
        """Read the runs."""
        self._draw()
        self.run_worker(self._look(), name="curves")

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.call_after_refresh(self._draw)

    async def _look(self) -> None:
        read: dict[Path, MarkedRun] = {}
        sizes: dict[Path, int] = {}
        is_live = True
        while is_live:
            changed = await asyncio.to_thread(read_changed, self._runs, sizes)
            read |= changed
            if changed or not read:
                self._show(viewed(self._view, [read[run.folder] for run in self._runs if run.folder in read]))
            is_live = any(run.is_live for run in self._runs)
            await asyncio.sleep(POLL_S)

    def _show(self, view: CurvesView) -> None:
        self._view = view
        self._draw()

    def _draw(self) -> None:
        if not self.is_mounted:
            return
        for part in self.query(Lines):
            if isinstance(part, KeysLine):
                part.draw(Board())
            else:
                part.draw(self._view)

    def show_message(self, text: str) -> None:
        """Answer a key."""
        self.notify(text, markup=False)

    def action_turn_metric(self, by: int) -> None:
        """Draw another metric."""
        if self._view.metrics:
            place = (self._view.metrics.index(self._view.metric) + by) % len(self._view.metrics)
            self._show(replace(self._view, metric=self._view.metrics[place]))

    def action_turn(self, change: str) -> None:
        """Change how the plot is drawn."""
        turned: PlotChange = getattr(plot_view, change)()
        self._show(replace(self._view, plots=plot_view.after(self._view.plots, turned)))

    def action_details(self) -> None:
        """Open every setting in which the curves differ."""
        rows: list[Content] = []
        groups = self._view.groups
        for key in groups[0].settings if groups else ():
            rows.append(Content.styled(key, "bold"))
            rows += [
                Content(f"  {number} {shown_setting(group.settings[key])}")
                for number, group in enumerate(groups, start=1)
            ]
        if not rows:
            rows = [Content("These runs have the same settings, other than seeds, ports and folders.")]
        self.app.push_screen(ReadingScreen("settings", Content("\n").join(rows)))

    def action_help(self) -> None:
        """Open the help page."""
        page = keys_page({"keys of the curves": self.KEYS}, page_width(self.size.width))
        self.app.push_screen(ReadingScreen("grpo-tui", page))
