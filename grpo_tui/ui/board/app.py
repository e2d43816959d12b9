"""The board, in the order in which things happen: read, reduce, draw, act on keys.

A thread reads all runs every two seconds; one handler reduces what it found and what keys ask for into the state, which
the parts draw. Opening a run leaves this app: the command line shows the run, and opens the board again where it was.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Input

from grpo_engine.errors import GrpoError
from grpo_tui.sweeps.files import ask_to_stop
from grpo_tui.ui.board.keys import ON_BOARD, ON_CURVES
from grpo_tui.ui.board.table import ABOUT_ROWS, AboutRow, AnswerLine, BoardHeader, BoardTable, KeysLine
from grpo_tui.ui.keys import bindings
from grpo_tui.ui.text_screen import TextScreen
from grpo_tui.ui.themes import DARK, ThemedApp
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.view.board import state as view
from grpo_tui.view.board.state import Board, BoardRun, BoardSweep

POLL_S = 2.0
NEEDED_LATER = ("grpo_tui.ui.board.curves", "grpo_tui.ui.connection", "grpo_tui.client.launch", "grpo_tui.ui.app")
"""What keys need, and the first frame does not: imported once that is drawn."""
SIGNS = (
    "Signs: ◆ marked, ▲ ✗ warnings and errors with their number; − and + stand before sweeps that are unfolded and "
    "folded. The sparkline is the reward over the whole run, scaled to its own range; reward is the mean of its last "
    "10 steps.",
    "Runs are those in ./logs, and all of this user on this host that were started since it was booted.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the user left the board for."""

    run_folder: Path | None
    """The run to open; None: choose a profile to start."""


class Reader(Protocol):
    """Reads all runs; `BoardReader` from their files, tests from memory."""

    def read(self) -> tuple[tuple[BoardRun, ...], tuple[BoardSweep, ...]]:
        """Runs and sweeps as they are now; blocks while it reads."""


class FilterInput(Input, can_focus=False):
    """One line for the filter; it can have the focus only while it is open, or it would take every letter."""

    BINDINGS = [
        Binding("escape", "screen.back", "end the filter", show=False),
        Binding("up", "screen.move(-1)", "up", show=False),
        Binding("down", "screen.move(1)", "down", show=False),
    ]
    DEFAULT_CSS = """
    FilterInput { height: 1; margin: 0 1; display: none; }
    FilterInput.-open { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(placeholder="words of a run's name, profile, state, sweep or settings", compact=True)


class BoardScreen(TextScreen):
    """The list, and below it the selected row in words."""

    KEYS = ON_BOARD
    BINDINGS = bindings(ON_BOARD)
    DEFAULT_CSS = """
    BoardScreen { layout: vertical; background: $background; }
    """

    def compose(self) -> ComposeResult:
        """The parts from top to bottom."""
        yield BoardHeader()
        yield FilterInput()
        yield BoardTable()
        about = AboutRow()
        about.styles.height = ABOUT_ROWS + 1
        yield about
        yield AnswerLine()
        yield KeysLine(ON_BOARD)

    def draw(self, board: Board) -> None:
        """Draw a state; parts whose lines did not change paint nothing."""
        for typed in self.query(FilterInput):
            if board.is_typing != typed.has_class("-open"):
                typed.set_class(board.is_typing, "-open")
                typed.value, typed.can_focus = board.query, board.is_typing
                self.set_focus(typed if board.is_typing else None)
        for part in self.query(Lines):
            part.draw(board)

    def show_message(self, text: str) -> None:
        """Answer a key."""
        self._change(view.Said(text=text))

    @property
    def _app(self) -> BoardApp:
        assert isinstance(self.app, BoardApp)
        return self.app

    @property
    def _board(self) -> Board:
        return self._app.board

    def _change(self, change: view.Change) -> None:
        self._app.apply(change)

    # --- keys that change what is shown ----------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        """Select the row so many rows further."""
        self._change(view.Moved(by=by))

    @on(BoardTable.Clicked)
    def _clicked(self, event: BoardTable.Clicked) -> None:
        row = view.selected_row(self._board)
        if row is not None and row.key == event.key:
            self.action_open()
        else:
            self._change(view.Selected(key=event.key))

    def action_mark(self) -> None:
        """Mark the selected row, and go to the next one."""
        self._change(view.MarkTurned())
        self._change(view.Moved(by=1))

    def action_clear(self) -> None:
        """Remove all marks."""
        self._change(view.MarksCleared())

    def action_fold(self, is_folded: bool) -> None:
        """Hide or show the runs of the sweep."""
        self._change(view.Folded(is_folded=is_folded))

    def action_sort(self) -> None:
        """The next order."""
        self._change(view.OrderTurned())

    def action_reverse(self) -> None:
        """The other way round."""
        self._change(view.OrderTurned(is_reversed=True))

    def action_filter(self) -> None:
        """Type a filter."""
        self._change(view.Filtered(query=self._board.query, is_typing=True))

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        if self._board.is_typing and event.value != self._board.query:
            self._change(view.Filtered(query=event.value, is_typing=True))

    @on(Input.Submitted)
    def _taken(self) -> None:
        self._change(view.Filtered(query=self._board.query))

    def action_back(self) -> None:
        """End the filter, then remove the marks."""
        if self._board.is_typing or self._board.query:
            self._change(view.Filtered(query=""))
        else:
            self._change(view.MarksCleared())

    # --- keys that lead elsewhere ----------------------------------------------------------------------------------

    def action_open(self) -> None:
        """Open the selected run, or the curves of the selected sweep."""
        row = view.selected_row(self._board)
        if row is None:
            return
        if row.run is None:
            self._show_curves(row.runs)
        elif row.run.state is None and not row.run.is_live:
            self.show_message(f"{row.run.name} cannot be opened: {row.run.note}")
        else:
            self._app.leave(Choice(run_folder=row.run.folder))

    def action_curves(self) -> None:
        """Curves of the marked runs, or of those of the selected row."""
        self._show_curves(self._board.chosen)

    def _show_curves(self, runs: Sequence[BoardRun]) -> None:
        from grpo_tui.ui.board.curves import CurvesScreen

        if runs:
            self.app.push_screen(CurvesScreen(runs))
        else:
            self.show_message("no run of this sweep has started yet")

    def action_start(self) -> None:
        """Choose a profile."""
        if not self._refuses():
            self._app.leave(Choice(run_folder=None))

    def action_warnings(self) -> None:
        """Open every warning of the selected run."""
        from grpo_tui.ui.pages import copied_commands, page_width, warnings_page
        from grpo_tui.ui.screens.reading import ReadingScreen

        row = view.selected_row(self._board)
        if row is None or row.run is None:
            self.show_message("select a run: w shows its warnings")
            return
        warnings = row.run.warnings
        page = warnings_page(warnings, page_width(self.size.width))
        self.app.push_screen(ReadingScreen(f"warnings of {row.run.name}", page, commands=copied_commands(warnings)))

    def action_help(self) -> None:
        """Open the help page."""
        from grpo_tui.ui.pages import keys_page, page_width
        from grpo_tui.ui.screens.reading import ReadingScreen

        groups = {"keys of the board": ON_BOARD, "keys of the curves": ON_CURVES}
        self.app.push_screen(ReadingScreen("grpo-tui", keys_page(groups, page_width(self.size.width), SIGNS)))

    def action_leave(self) -> None:
        """Leave; all runs keep running."""
        self._app.leave(None)

    # --- ending ----------------------------------------------------------------------------------------------------

    def action_end(self) -> None:
        """End the chosen runs, and a sweep that is chosen itself, after a confirmation that names them."""
        from grpo_tui.ui.questions import about_ending_runs
        from grpo_tui.ui.screens.confirm import ConfirmScreen

        if self._refuses():
            return
        row = view.selected_row(self._board)
        sweep = row.sweep if row is not None and not self._board.marked else None
        sweep = sweep if sweep is not None and sweep.is_running else None
        live = [run for run in self._board.chosen if run.is_live]
        if not live and sweep is None:
            self.show_message("nothing to end: these runs have ended already")
            return
        question = about_ending_runs(live, sweep)

        def act(is_yes: bool | None) -> None:
            if is_yes:
                self.run_worker(self._end(live, sweep), name="end")

        self.app.push_screen(ConfirmScreen(question.text, question.named), act)

    async def _end(self, runs: Sequence[BoardRun], sweep: BoardSweep | None) -> None:
        """A sweep that runs ends its runs itself."""
        if sweep is not None and (await asyncio.to_thread(ask_to_stop, sweep.folder)) is not None:
            self.show_message(f"sweep {sweep.name} ends its runs")
            return
        faults = [fault for fault in await asyncio.gather(*map(_end_run, runs)) if fault]
        self.show_message("; ".join(faults) or f"ending {', '.join(run.name for run in runs)}")

    def _refuses(self) -> bool:
        if self._board.is_read_only:
            self.show_message("read-only board (opened with --read-only): the key does nothing")
        return self._board.is_read_only


async def _end_run(run: BoardRun) -> str:
    """Ask the supervisor of a run to end it; returns why it cannot."""
    from grpo_tui.ui.connection import LocalRun

    try:
        reply = await LocalRun(run.folder).command("down")
    except (GrpoError, OSError) as error:
        return f"{run.name}: {error}"
    return "" if reply.ok else f"{run.name}: {reply.error or 'refused, no reason given'}"


class BoardApp(ThemedApp[Choice]):
    """Returns what the user chose, or None if the user left."""

    TITLE = "grpo-tui"
    CSS_PATH = "../grpo.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [
        Binding("ctrl+q", "quit", "leave", show=False, priority=True, tooltip="leave; all runs keep running"),
        Binding("ctrl+c", "copy_or_leave", "copy", show=False, priority=True, tooltip="copy the selection, or leave"),
    ]

    def __init__(
        self,
        reader: Reader,
        board: Board,
        *,
        clock: Callable[[], float] = time.time,
        theme: str = DARK,
        is_ascii: bool = False,
    ) -> None:
        """Show a board.

        Args:
            reader: called in a thread, one call at a time.
            board: as it was left, or a new one.
        """
        super().__init__(theme=theme, is_ascii=is_ascii)
        self.board = board
        self._reader = reader
        self._clock = clock
        self._is_draw_due = True

    def get_default_screen(self) -> Screen[None]:
        """The board; its curves and pages lie over it."""
        return BoardScreen()

    def on_mount(self) -> None:
        """Read all runs, again and again."""
        self.run_worker(self._look(), name="board")
        self.call_later(self._draw)

    async def _look(self) -> None:
        modules = [*NEEDED_LATER]
        while True:
            runs, sweeps = await asyncio.to_thread(self._reader.read)
            self.apply(view.RunsRead(runs=runs, sweeps=sweeps, now=self._clock()))
            await asyncio.sleep(POLL_S)
            while modules:
                await asyncio.to_thread(importlib.import_module, modules.pop(0))

    def apply(self, change: view.Change) -> None:
        """Reduce a change into the state, and schedule one draw for all pending changes."""
        self.board = view.after(self.board, change)
        if not self._is_draw_due:
            self._is_draw_due = True
            self.call_later(self._draw)

    def _draw(self) -> None:
        board = self.screen_stack[0] if self.is_running else None
        if not isinstance(board, BoardScreen):  # widgets are being removed
            return
        if not board.is_mounted:
            board.call_later(self._draw)  # runs once it is mounted
            return
        self._is_draw_due = False
        board.draw(self.board)

    async def action_quit(self) -> None:
        """Leave."""
        self.leave()

    def action_copy_or_leave(self) -> None:
        """Copy the selected text; without any close what is in front of the board, or leave."""
        screen = self.screen
        if text := screen.get_selected_text():
            self.copy_to_clipboard(text)
            return
        if isinstance(screen, BoardScreen):
            self.leave()
        else:
            screen.dismiss()
