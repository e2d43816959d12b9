"""The parts of the log screen: list of logs, title, lines, filters and input line.

Lines keep their own colours; matches and the cursor are marked on top.
"""

from __future__ import annotations

from datetime import datetime

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.content import Content
from textual.style import Style
from textual.widgets import Input

from grpo_tui.ui.messages import StateChanged
from grpo_tui.ui.widgets.lines import NUM_SHARES, Lines, Styled, fit, line, rule
from grpo_tui.view.format import bytes_text
from grpo_tui.view.logs.folding import beginning, fold
from grpo_tui.view.logs.reader import LogLine
from grpo_tui.view.logs.search import Level, marker
from grpo_tui.view.logs.state import CursorSet, Followed, LogsView, Prompt, Resized, Scrolled, cut_at, num_rows
from grpo_tui.view.state import ViewState

ALL_WORD = "all by time"
WHEEL_LINES = 3
MOST_NAME_COLUMNS = 12
CURSOR_SIGN, SELECTED_SIGN = "▌", "│"
PLACEHOLDERS = {
    Prompt.SEARCH: "search for text or a regular expression; enter searches, n and N repeat",
    Prompt.FILTER: "show only lines that match a text or a regular expression; empty shows all",
    Prompt.TIME: "go to a time: 14:03:05, 14:03, 2026-01-31 14:03, or -10m",
}

PROMPT_WORDS = {
    Prompt.SEARCH: "search: enter searches, esc cancels",
    Prompt.FILTER: "filter: enter or esc closes, empty shows all",
    Prompt.TIME: "time (14:03:05, -10m): enter goes there, esc cancels",
}


class LogServices(Lines):
    """All logs, and each one; a click chooses."""

    DEFAULT_CSS = """
    LogServices { height: 1; padding: 0 1; }
    LogServices > .here { color: $text-accent; text-style: bold underline; }
    """
    COMPONENT_CLASSES = {"here"}

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """The names."""
        return (state.logs.services, state.logs.chosen)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """`log  all by time  api  vllm …`, the one that is shown marked."""
        row = line(("log", ".muted"))
        for place, name in enumerate((None, *state.logs.services)):
            style = ".here" if name == state.logs.chosen else _colour(place - 1) if name else ".muted"
            word = Content.assemble((name or ALL_WORD, style))
            row = row + Content("  ") + word.stylize(Style.from_meta({"@click": f"screen.choose({name!r})"}))
        return [row.truncate(width, ellipsis=True)]


class LogsTitle(Lines):
    """Whose log, where in it, and whether the end is followed."""

    DEFAULT_CSS = "LogsTitle { height: 1; padding: 0 1; }"

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Not the clock."""
        return (state.logs, state.until)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """`─ log trainer ────────── 14:03:05 · 43 % of 2.0 GB · following ─`."""
        logs = state.logs
        name = f"log {logs.chosen}" if logs.chosen else "all logs by time"
        return [rule(width, name, " · ".join(_where(logs, state.until)))]

    async def on_click(self) -> None:
        """Follow the end, or hold still."""
        await self.run_action("screen.follow")


class LogPage(Lines):
    """The lines in sight."""

    COMPONENT_CLASSES = {"match"}
    DEFAULT_CSS = """
    LogPage { height: 1fr; padding: 0 1; }
    LogPage > .match { background: $warning-muted; text-style: bold underline; }
    LogPage:ansi > .match { background: ansi_default; text-style: bold underline reverse; }
    """

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Not the clock."""
        return (state.logs, state.status)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """From the first in sight on, as many as there is room for."""
        logs = state.logs
        if logs.columns != room_for_text(logs, width) or logs.rows != height:
            self.post_message(StateChanged(Resized(columns=room_for_text(logs, width), rows=height)))
        if not logs.lines:
            return [line((words, ".muted")) for words in _words_for_nothing(logs)]
        rows: list[Content] = []
        selection = logs.selection
        for place in range(logs.top, len(logs.lines)):
            if len(rows) >= height:
                break
            gutter = (CURSOR_SIGN if place == logs.cursor else SELECTED_SIGN if place in selection else " ", ".accent")
            made = _content(logs.lines[place], logs, gutter, width)
            rows += [row.stylize_before(".selected") for row in made] if place in selection else made
        return rows

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Back by some lines."""
        event.stop()
        self.post_message(StateChanged(Scrolled(by=-WHEEL_LINES)))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """On by some lines."""
        event.stop()
        self.post_message(StateChanged(Scrolled(by=WHEEL_LINES)))

    def on_mouse_down(self) -> None:
        """Hold still while text is selected."""
        if self._state is not None and self._state.logs.is_following:
            self.post_message(StateChanged(Followed(is_following=False)))

    def on_click(self, event: events.Click) -> None:
        """Put the cursor on the line."""
        if self._state is None:
            return
        logs, y = self._state.logs, event.y
        for place in range(logs.top, len(logs.lines)):
            y -= num_rows(logs.lines[place], logs)
            if y < 0:
                self.post_message(StateChanged(CursorSet(place=place)))
                return


class LogNarrowing(Lines):
    """Active filters, search and progress; empty if there are none."""

    DEFAULT_CSS = "LogNarrowing { height: 1; padding: 0 1; }"

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Not the clock."""
        return (state.logs,)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """`only errors · only lines with “loss” · “nan”: match 3 of 17`."""
        return [line(*narrowing(state.logs)).truncate(width, ellipsis=True)]


class LogPrompt(Input, can_focus=False):
    """One line to type in; it can have the focus only while it is open, or it would take every letter."""

    BINDINGS = []
    DEFAULT_CSS = """
    LogPrompt { height: 1; margin: 0 1; display: none; }
    LogPrompt.-open { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(compact=True)


def narrowing(logs: LogsView) -> list[str | Styled]:
    """The parts of that line; none where all lines are shown and nothing is searched."""
    parts: list[str | Styled] = []
    if logs.fault:
        parts.append((logs.fault, ".warning"))
    elif logs.prompt is not None:
        parts.append((PROMPT_WORDS[logs.prompt], ".muted"))
    if logs.level is not Level.ALL:
        parts.append((f"only {logs.level}", ".accent"))
    if logs.pattern:
        parts.append((f"only lines with “{logs.pattern}”", ".accent"))
    if logs.searched:
        parts.append((_count_words(logs), ".accent"))
    if logs.mark is not None:
        num = len(logs.selection)
        parts.append((f"{num} line{'s' * (num != 1)} selected: y copies", ".accent"))
    if logs.is_wrapped:
        parts.append(("wrapped", ".muted"))
    if logs.shift:
        parts.append((f"shifted by {logs.shift} columns", ".muted"))
    if logs.busy:
        parts.append((logs.busy, ".busy"))
    between: list[str | Styled] = []
    for part in parts:
        between += [(" · ", ".faint"), part] if between else [part]
    return between


def _colour(place: int) -> str:
    return f".share-{place % NUM_SHARES}"


def _name_columns(logs: LogsView) -> int:
    """For the name before each line, where lines of several logs are shown."""
    if logs.chosen is not None:
        return 0
    return min(MOST_NAME_COLUMNS, max((cell_len(name) for name in logs.services), default=0)) + 1


def room_for_text(logs: LogsView, width: int) -> int:
    """Columns left for a line's text, beside the cursor's sign and the name of the service."""
    return max(1, width - 1 - _name_columns(logs))


def _content(each: LogLine, logs: LogsView, gutter: Styled, width: int) -> list[Content]:
    name_columns, columns = _name_columns(logs), room_for_text(logs, width)
    name: list[str | Styled] = []
    if name_columns:
        name = [(fit(logs.services[each.source], name_columns - 1) + " ", _colour(each.source))]
    most = max(1, logs.rows)
    num_cells = (most + 1) * columns if logs.is_wrapped else logs.shift + columns + 1
    text = _text(beginning(each.text, num_cells))
    if (regex := marker(logs.searched)) is not None:
        for found in regex.finditer(text.plain):
            text = text.stylize(".match", found.start(), found.end())
    if not logs.is_wrapped:
        shown = text if not logs.shift else _from_column(text, logs.shift)
        return [
            Content.assemble(gutter, *name, end="")
            + shown.truncate(columns, ellipsis=True).pad_right(max(0, columns - shown.cell_length))
        ]
    rows: list[Content] = []
    pieces = fold(text.plain, columns, most)
    for piece in pieces[:most]:
        before = Content.assemble(gutter, *(name if not rows else [" " * name_columns]), end="")
        part = text[piece]
        if len(rows) == most - 1 and len(pieces) > most:  # a line of more rows than the page has
            part = text[piece.start : piece.stop + columns + 1].truncate(columns, ellipsis=True)
        elif part.cell_length > columns:
            part = part[:-1]  # the blank at which it was folded
        rows.append(before + part.pad_right(max(0, columns - part.cell_length)))
    return rows


def _text(text: str) -> Content:
    if "\x1b" not in text:
        return Content(text)
    return Content.from_rich_text(Text.from_ansi(text, no_wrap=True, end=""))


def _from_column(text: Content, column: int) -> Content:
    """What is left of a line that is moved to the left; a sign says that something is there."""
    plain, cells, place = text.plain, 0, 0
    while place < len(plain) and cells < column + 1:
        cells += cell_len(plain[place])
        place += 1
    return Content.assemble(("…", ".muted"), end="") + text[place:] if plain else text


def _where(logs: LogsView, until: float | None) -> list[str]:
    words: list[str] = []
    if logs.line is not None and logs.line.time is not None:
        words.append(datetime.fromtimestamp(logs.line.time).strftime("%H:%M:%S"))
    cut = cut_at(logs, logs.cursor + 1)
    if logs.extent is not None and cut is not None and logs.extent.num_bytes > 0:
        share = (sum(cut) - sum(logs.extent.starts)) / logs.extent.num_bytes
        size = bytes_text(logs.extent.num_bytes)
        words.append(f"{size} in all" if logs.is_following else f"{100 * min(max(share, 0.0), 1.0):.0f} % of {size}")
    if until is not None:
        words.append("at that time")
    elif logs.is_following:
        words.append("following")
    else:
        words.append("paused: f follows")
    return words


def _count_words(logs: LogsView) -> str:
    what = f"“{logs.searched}”"
    if logs.count is None:
        return what
    number = f"match {logs.count.number:,} of " if logs.count.number else ""
    so_far = "" if logs.count.is_done else " so far"
    num = logs.count.num_matches
    lines = "lines" if num != 1 or number else "line"
    return f"{what}: {number}{num:,} {lines}{so_far}"


def _words_for_nothing(logs: LogsView) -> list[str]:
    whose = f"the log of {logs.chosen}" if logs.chosen else "every log"
    if not logs.services:
        return ["  no log yet: waiting for the list of services"]
    if not (logs.has_all_before and logs.has_all_after):
        return ["  reading …"]
    if logs.tests:
        return [f"  no matching line in {whose}; & changes the filter, l the level"]
    return [f"  {whose} is empty so far"]
