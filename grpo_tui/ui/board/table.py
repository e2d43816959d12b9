"""The parts of the board: what there is, the list, the selected row in words, the last answer, the keys."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rich.cells import cell_len
from textual import events
from textual.content import Content
from textual.message import Message
from textual.style import Style

from grpo_tui.ui.glyphs import RUN_GLYPHS, RUN_STYLES, SEVERITY_GLYPHS, SEVERITY_STYLES, SPARK_BARS
from grpo_tui.ui.keys import Key
from grpo_tui.ui.widgets.lines import Lines, Styled, Wheel, fit, line, rule, spread, wrapped
from grpo_tui.view.board.state import Board, BoardRun, Order, Row, rows, selected_row
from grpo_tui.view.diagnosis import GRAVITY
from grpo_tui.view.format import DAY_S, UNKNOWN, age_text, count_text
from grpo_tui.view.metrics.history import bar_heights, bucketed
from grpo_tui.view.metrics.names import value_text
from grpo_tui.view.metrics.summary import REWARD, score_text

MARK = "◆"
STATE_WIDTH, REWARD_WIDTH, WARNINGS_WIDTH, LEFT_WIDTH = 11, 7, 3, 6
MIN_NAME, MAX_NAME = 20, 44
MIN_SPARK, MAX_SPARK = 8, 40
ABOUT_ROWS = 3
CLOCK = "%H:%M:%S"
LEAST = ("slash", "O", "S", "X", "L")
"""Keys that the last line leaves out first."""
MOST = ("question_mark", "q", "escape,tab")
"""Keys that it leaves out never: the help names the others."""
NO_RUNS = "no run on this host: U starts one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column right of the sparkline; those of a lower rank are shown first."""

    title: str
    width: int
    rank: int


WARNINGS = Column(title="", width=WARNINGS_WIDTH, rank=0)
LEFT = Column(title="left", width=LEFT_WIDTH, rank=1)
GPUS = Column(title="gpus", width=7, rank=2)
AGE = Column(title="age", width=6, rank=3)
PROFILE = Column(title="profile", width=16, rank=4)
ORDER = (WARNINGS, GPUS, LEFT, AGE, PROFILE)


class BoardHeader(Lines[Board]):
    """One line over everything."""

    DEFAULT_CSS = """
    BoardHeader { height: 1; background: $panel; padding: 0 1; }
    """

    def lines(self, state: Board, width: int, height: int) -> list[Content]:
        """`grpo-tui  50 runs, 2 live, 1 sweep`, and on the right the filter, the marks and the order."""
        parts = [count_text(len(state.runs), "run"), f"{sum(run.is_live for run in state.runs)} live"]
        parts += [count_text(len(state.sweeps), "sweep")] if state.sweeps else []
        left: list[str | Styled] = [("grpo-tui", ".strong"), ("  " + ", ".join(parts), ".muted")]
        left = left if state.is_read else [("grpo-tui", ".strong"), ("  reading runs …", ".busy")]
        if state.is_read_only:
            left.append(("  read-only", ".accent"))
        right: list[str | Styled] = []
        if state.query and not state.is_typing:
            right.append((f"  filter: {state.query}", ".accent"))
        if state.marked:
            right.append((f"  {len(state.marked)} marked", ".accent"))
        way = ", inverted" if state.is_reversed else ""
        right.append((f"  by {'age' if state.order is Order.NEWEST else state.order}{way}", ".muted"))
        return [spread(width, left, right)]


class BoardTable(Lines[Board], Wheel):
    """One row a run or sweep; a click selects, a second one opens."""

    ON_WHEEL = ("screen.move(-1)", "screen.move(1)")
    DEFAULT_CSS = """
    BoardTable { padding: 0 1; height: 1fr; }
    """

    @dataclass
    class Clicked(Message):
        """A row was clicked."""

        key: str

    def __init__(self) -> None:
        super().__init__()
        self._top = 0
        self._shown: list[Row] = []

    def lines(self, state: Board, width: int, height: int) -> list[Content]:
        """The titles, then the rows around the selected one."""
        found = rows(state)
        room = height - 1
        selected = selected_row(state)
        place = next((n for n, row in enumerate(found) if selected is not None and row.key == selected.key), 0)
        self._top = max(0, min(self._top, place, len(found) - room))
        if place >= self._top + room:
            self._top = place - room + 1
        self._shown = found[self._top : self._top + room]
        layout = _layout(found, width)
        titles = self._titles(layout, len(found), room)
        if not found:
            return [titles, line((f"  {_nothing(state)}", ".muted"))]
        key = None if selected is None else selected.key
        return [titles, *(_row(row, state, layout, width, is_selected=row.key == key) for row in self._shown)]

    def on_click(self, event: events.Click) -> None:
        """Select the row under the pointer."""
        place = event.get_content_offset_capture(self).y - 1
        if 0 <= place < len(self._shown):
            self.post_message(self.Clicked(key=self._shown[place].key))

    def _titles(self, layout: _Layout, num: int, room: int) -> Content:
        name = f"run ({self._top + 1}–{self._top + len(self._shown)} of {num})" if num > room else "run"
        titles = "   " + fit(name, layout.name) + " " + fit("state", STATE_WIDTH) + " "
        titles += fit("step", layout.step, right=True) + " " + fit("reward", REWARD_WIDTH, right=True) + " "
        titles += fit("", layout.spark)
        for column in layout.columns:
            titles += " " + fit(column.title, column.width, right=column is not PROFILE)
        return line((titles, ".title"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    name: int
    step: int
    spark: int
    columns: tuple[Column, ...]


def _layout(found: Sequence[Row], width: int) -> _Layout:
    """Columns by rank while name and sparkline keep their least; then those two share what is left."""
    step = max([4, *(len(_step(run)) for row in found for run in row.runs)])
    fixed = 3 + 1 + STATE_WIDTH + 1 + step + 1 + REWARD_WIDTH + 1
    runs = [run for row in found for run in row.runs]
    empty = {GPUS: not any(run.gpus for run in runs), LEFT: not any(run.is_live for run in runs)}
    room = width - fixed - MIN_NAME - MIN_SPARK
    columns: list[Column] = []
    for column in sorted(ORDER, key=lambda one: one.rank):
        if empty.get(column, False):
            continue
        if room < column.width + 1:
            break
        room -= column.width + 1
        columns.append(column)
    longest = max((cell_len(_name(row)) for row in found), default=0)
    name = max(MIN_NAME, min(MAX_NAME, longest, MIN_NAME + room))
    return _Layout(
        name=name,
        step=step,
        spark=max(0, min(MAX_SPARK, MIN_SPARK + room - (name - MIN_NAME))),
        columns=tuple(column for column in ORDER if column in columns),
    )


def _nothing(state: Board) -> str:
    if not state.is_read:
        return "reading runs …"
    return f"no run matches “{state.query}”: esc shows all" if state.query else NO_RUNS


def _name(row: Row) -> str:
    if row.run is None:
        assert row.sweep is not None
        return f"{'+' if row.is_folded else '−'} {row.sweep.name}"
    return f"  {row.run.label or row.run.name}" if row.is_inside else row.run.name


def _row(row: Row, state: Board, layout: _Layout, width: int, *, is_selected: bool) -> Content:
    is_marked = bool(row.runs) and all(run.key in state.marked for run in row.runs)
    cells: list[str | Styled] = [
        ("▌" if is_selected else " ", ".busy"),
        (MARK if is_marked else " ", ".accent"),
        " ",
        (fit(_name(row), layout.name), ".strong" if row.is_live or row.sweep is not None else ""),
        " ",
    ]
    cells += _sweep_cells(row) if row.sweep is not None else _run_cells(row.runs[0], layout, state.now)
    told = line(*_merged(cells)).truncate(width, ellipsis=True)
    return told.pad_right(max(0, width - told.cell_length)).stylize(".selected") if is_selected else told


def _merged(cells: Sequence[str | Styled]) -> list[str | Styled]:
    """Neighbours of one style as one piece, blanks with either: a row of fewer pieces is painted faster."""
    pieces: list[Styled] = []
    for cell in cells:
        text, style = (cell, "") if isinstance(cell, str) else cell
        if pieces and (style == pieces[-1][1] or not text.strip()):
            pieces[-1] = pieces[-1][0] + text, pieces[-1][1]
        else:
            pieces.append((text, style))
    return list(pieces)


def _sweep_cells(row: Row) -> list[str | Styled]:
    """`● 4/9  2 live  best lr=0.0003 0.812 ± 0.010`: how many have ended, and the best settings."""
    sweep = row.sweep
    assert sweep is not None
    ended = sum(not run.is_live for run in row.runs)
    total = UNKNOWN if sweep.num_points is None else str(sweep.num_points)
    live = sum(run.is_live for run in row.runs)
    is_done = not live and not sweep.is_running and ended == sweep.num_points
    sign, style = ("●", ".ok") if row.is_live else ("✓", ".ok") if is_done else ("■", ".muted")
    not_run = (sweep.num_points or 0) - len(row.runs)
    words = f"{live} live" if live else f"{not_run} not run" if not_run > 0 else "sweep"
    best: list[str | Styled] = []
    if sweep.best is not None:
        best = [("  best ", ".muted"), (f"{sweep.best_label} ", ""), (score_text(sweep.best), ".strong")]
    return [(fit(f"{sign} {ended}/{total}", STATE_WIDTH), style), (f" {words}", ".muted"), *best]


def _run_cells(run: BoardRun, layout: _Layout, now: float) -> list[str | Styled]:
    quiet = "" if run.is_live else ".muted"
    reward = value_text(REWARD, run.reward)
    cells: list[str | Styled] = [
        (fit(_state_text(run), STATE_WIDTH), _state_style(run)),
        " ",
        (fit(_step(run), layout.step, right=True), quiet),
        " ",
        (fit(reward, REWARD_WIDTH, right=True), ".strong"),
        " ",
        (_spark(run.rewards, layout.spark), ".spark" if run.is_live else ".muted"),
    ]
    for column in layout.columns:
        cells += [" ", _cell(run, column, now)]
    return cells


def _cell(run: BoardRun, column: Column, now: float) -> Styled:
    if column is WARNINGS:
        if not run.warnings:
            return " " * column.width, ""
        worst = min(run.warnings, key=lambda warning: GRAVITY[warning.severity]).severity
        style = SEVERITY_STYLES[worst] if run.is_live else ".muted"
        return fit(f"{SEVERITY_GLYPHS[worst]}{len(run.warnings)}", column.width, right=True), style
    quiet = "" if run.is_live else ".muted"
    text = {
        LEFT: lambda: age_text(run.progress.time_left_s) if run.progress.time_left_s is not None else "",
        GPUS: lambda: spans(run.gpus),
        AGE: lambda: _age_text(run, now),
        PROFILE: lambda: run.profile,
    }[column]()
    return fit(text, column.width, right=column is not PROFILE), quiet


def _step(run: BoardRun) -> str:
    """`43/150`."""
    step = UNKNOWN if run.progress.step is None else f"{run.progress.step:,}"
    return step if run.progress.steps is None else f"{step}/{run.progress.steps:,}"


def _state_text(run: BoardRun) -> str:
    return f"{'·' if run.state is None else RUN_GLYPHS[run.state]} {run.state_word}"


def _state_style(run: BoardRun) -> str:
    return ".muted" if run.state is None else RUN_STYLES[run.state]


def _age_text(run: BoardRun, now: float) -> str:
    """Since it began: `12m`, `1h02m`, `3d`."""
    if run.started_at is None:
        return UNKNOWN
    age_s = max(0.0, now - run.started_at)
    return age_text(age_s) if age_s < 2 * DAY_S else f"{age_s // DAY_S:.0f}d"


@lru_cache(maxsize=2048)
def _spark(rewards: tuple[tuple[int, float], ...], width: int) -> str:
    """Bars; cached, since a key draws every row again."""
    bars = ""
    for height in bar_heights(bucketed(rewards, width), len(SPARK_BARS)):
        bars += bars[-1:] if height is None else SPARK_BARS[height]  # between two places the last value still holds
    return fit(bars, width)


def spans(numbers: Sequence[int]) -> str:
    """`0-3,6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


class AboutRow(Lines[Board]):
    """The selected row in words: where it is, why it ended, its first warning."""

    DEFAULT_CSS = """
    AboutRow { padding: 0 1; }
    """

    def lines(self, state: Board, width: int, height: int) -> list[Content]:
        """A title, then at most `ABOUT_ROWS` rows."""
        row = selected_row(state)
        if row is None:
            return []
        if row.sweep is not None:
            folder = row.sweep.folder
            facts = [f"sweep of {count_text(row.sweep.num_points or 0, 'point')}", str(folder)]
            hint = "" if row.is_live else f"grpo-tui sweep status {row.sweep.name} · grpo-tui sweep resume …"
            told = [rule(width, row.sweep.name, "enter: its curves")]
            return [*told, *_folded(" · ".join(facts), width, height - 2), line((hint, ".faint"))]
        run = row.runs[0]
        began = "" if run.started_at is None else f"began {time.strftime(CLOCK, time.localtime(run.started_at))}"
        lasted = ""
        if run.started_at is not None:
            until = run.ended_at or state.now
            lasted = f"{'up' if run.is_live else 'lasted'} {age_text(max(0.0, until - run.started_at))}"
        facts = [part for part in (run.label, run.profile, began, lasted, run.services) if part]
        title = rule(width, run.name, str(run.folder.parent) if width >= 100 else "")
        is_warned = any(warning.id.startswith("failed:") for warning in run.warnings)  # they say the same, and more
        words: list[Styled] = [(f"✗ {run.note}", ".error")] if run.note and not is_warned else []
        words += [
            (f"{SEVERITY_GLYPHS[warning.severity]} {warning.text}", SEVERITY_STYLES[warning.severity])
            for warning in sorted(run.warnings, key=lambda warning: GRAVITY[warning.severity])
        ]
        messages = [line((part, style)) for text, style in words for part in wrapped(text.partition("\n")[0], width)]
        told = [title, *_folded(" · ".join(facts), width, height - 1 - len(messages)), *messages]
        if len(told) > height:
            told = [*told[: height - 1], line(("… w: all of it", ".muted"))]
        return told


def _folded(text: str, width: int, num_rows: int) -> list[Content]:
    """Words in as many rows as there are, at least one; the last one is cut."""
    rows = wrapped(text, width)
    whole = max(1, num_rows) - 1
    parts = [*rows[:whole], " ".join(rows[whole:])]
    return [line((part, ".muted")).truncate(width, ellipsis=True) for part in parts if part]


class AnswerLine(Lines[Board]):
    """The answer to the last key, or a hint."""

    DEFAULT_CSS = """
    AnswerLine { height: 1; padding: 0 1; }
    """

    def lines(self, state: Board, width: int, height: int) -> list[Content]:
        """One line."""
        if state.said:
            return [line((state.said, ".accent")).truncate(width, ellipsis=True)]
        if state.marked:
            many = count_text(len(state.marked), "run")
            return [line((f"{many} marked: tab shows their curves, D ends them, x removes the marks", ".accent"))]
        return [line(("enter opens · space marks, tab compares · U starts a profile · ? help", ".faint"))]


class KeysLine(Lines[Board]):
    """The keys, clickable; the last ones are dropped where there is no room."""

    DEFAULT_CSS = """
    KeysLine { height: 1; background: $panel; padding: 0 1; }
    KeysLine > .key { color: $text-accent; text-style: bold; }
    """
    COMPONENT_CLASSES = {"key"}

    def __init__(self, keys: Sequence[Key]) -> None:
        super().__init__()
        self._keys = keys

    def inputs(self, state: Board) -> tuple[object, ...]:
        """A read-only board has fewer."""
        return (state.is_read_only,)

    def lines(self, state: Board, width: int, height: int) -> list[Content]:
        """`enter open  space mark …`."""
        keys = [key for key in self._keys if key.is_in_footer and not (key.changes_run and state.is_read_only)]
        while sum(len(key.shown) + len(key.label) + 2 for key in keys) - 1 > width and (
            least := [key for key in keys if key.key in LEAST] or [key for key in keys if key.key not in MOST]
        ):
            keys.remove(least[-1])
        items = [
            Content.assemble((key.shown, ".key"), " ", (key.label, ".muted")).stylize(
                Style.from_meta({"@click": key.action})
            )
            for key in keys
        ]
        gap = 2 if sum(item.cell_length + 2 for item in items) - 2 <= width else 1
        return [Content(" " * gap).join(items).truncate(width)]
