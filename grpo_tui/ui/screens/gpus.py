"""The GPU screen: memory of every GPU by process, its history, and the likely cause when one is full."""

from __future__ import annotations

import asyncio
from pathlib import Path

from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll

from grpo_tui.ui.keys import Key, bindings
from grpo_tui.ui.messages import StateChanged
from grpo_tui.ui.screens.base import RunScreen
from grpo_tui.ui.widgets.frame.travel_bar import rows_taken
from grpo_tui.ui.widgets.gpu_report import TWO_COLUMNS, GpuReport
from grpo_tui.view.gpus.reader import read_memory_plan, read_samples
from grpo_tui.view.gpus.state import CommandsTurned, PastRead, PlanRead, SpanTurned
from grpo_tui.view.machines import all_gpus
from grpo_tui.view.state import ViewState

KEYS = (
    Key(key="n", shown="n", action="screen.go_to_block(1)", label="next",
        help="go to the next GPU; host memory comes last"),
    Key(key="p", shown="p", action="screen.go_to_block(-1)", label="previous", is_in_footer=False,
        help="go to the previous GPU"),
    Key(key="h", shown="h", action="screen.turn_span", label="history",
        help="time span of the history: whole run, last hour, 10 minutes, or minute"),
    Key(key="W", shown="W", action="screen.turn_commands", label="wrap",
        help="wrap long command lines, or one row each"),
    Key(key="down,j", shown="↓ j", action="screen.scroll_report(1)", label="down", is_in_footer=False,
        help="scroll down"),
    Key(key="up,k", shown="↑ k", action="screen.scroll_report(-1)", label="up", is_in_footer=False,
        help="scroll up"),
    Key(key="pagedown", shown="PgDn", action="screen.turn_page(1)", label="page on", is_in_footer=False,
        help="one page down"),
    Key(key="pageup", shown="PgUp", action="screen.turn_page(-1)", label="page back", is_in_footer=False,
        help="one page up"),
)  # fmt: skip
LOW, HIGH = 30, 44
"""Rows of the terminal at which charts grow."""
NUM_OTHER_ROWS = 28
"""Those of a usual block and of the frame, without the chart."""
NUM_ROWS_OF_HOST = 14
"""The same where the machine's own memory is all there is."""
NUM_HOST_ROWS = 24
"""Its chart needs no more."""


class ReportScroll(VerticalScroll, can_focus=False):
    """Scrolls the report."""

    DEFAULT_CSS = """
    ReportScroll {
        height: 1fr; scrollbar-size-vertical: 1;
        scrollbar-background: $background; scrollbar-background-hover: $background;
        scrollbar-background-active: $background; scrollbar-color: $foreground 20%;
        scrollbar-color-hover: $foreground 40%; scrollbar-color-active: $foreground 40%;
    }
    """

    @property
    def rows_in_sight(self) -> range:
        """Of what is scrolled."""
        top = self.scroll_offset.y
        return range(top, top + self.size.height)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Update the blocks that scroll into view."""
        super().watch_scroll_y(old_value, new_value)
        for part in self.query(GpuReport):
            part.in_sight = self.rows_in_sight
            part.look_again()


class GpusScreen(RunScreen):
    """One block a GPU; it scrolls."""

    PLACE = "gpus"
    KEYS = KEYS
    BINDINGS = bindings(KEYS)

    def body(self) -> ComposeResult:
        """The report."""
        with ReportScroll():
            yield GpuReport()

    def on_screen_resume(self) -> None:
        """Read the memory plan, which a new supervisor may have rewritten, and once the earlier samples."""
        self.run_worker(self._read_files(self._state.run_folder), name="gpu files", exclusive=True)

    async def _read_files(self, run_folder: Path) -> None:
        self.post_message(StateChanged(PlanRead(plan=await asyncio.to_thread(read_memory_plan, run_folder))))
        if not self._state.gpus.has_past:
            self.post_message(StateChanged(PastRead(samples=await asyncio.to_thread(read_samples, run_folder))))

    def draw(self, state: ViewState) -> None:
        """Show another state."""
        for part in self.query(GpuReport):  # none while the screen is taken down
            part.chart_rows = self._chart_rows(state)
            part.in_sight = self.query_one(ReportScroll).rows_in_sight
        super().draw(state)

    def _chart_rows(self, state: ViewState) -> int:
        width, height = self.size
        num_gpus = None if state.status is None else len(all_gpus(state.status))
        if num_gpus == 0:
            return min(NUM_HOST_ROWS, max(5, height - rows_taken(state, height) - NUM_ROWS_OF_HOST))
        if width >= TWO_COLUMNS and num_gpus == 1:
            return min(20, max(8, height - NUM_OTHER_ROWS))  # all blocks stand beside each other
        return 5 if height < LOW else 8 if height < HIGH else 10

    def on_resize(self, event: events.Resize) -> None:
        """Charts are as high as the terminal allows."""
        if self.is_mounted:  # a size may come before there is a part to give it to
            self.draw(self._state)

    def action_go_to_block(self, by: int) -> None:
        """Bring the next block, or the one before, to the top."""
        scroll, starts = self.query_one(ReportScroll), self.query_one(GpuReport).starts
        here = scroll.scroll_offset.y
        further = [start for start in starts if (start > here if by > 0 else start < here)]
        if further:
            scroll.scroll_to(y=further[0] if by > 0 else further[-1], animate=False)

    def action_turn_span(self) -> None:
        """Show more or less of the history."""
        self.post_message(StateChanged(SpanTurned()))

    def action_turn_commands(self) -> None:
        """Show command lines in full, or one line each."""
        self.post_message(StateChanged(CommandsTurned()))

    def action_scroll_report(self, rows: int) -> None:
        """Move by a few rows."""
        self.query_one(ReportScroll).scroll_relative(y=2 * rows, animate=False)

    def action_turn_page(self, pages: int) -> None:
        """Move by a page."""
        scroll = self.query_one(ReportScroll)
        scroll.scroll_relative(y=pages * max(1, scroll.size.height - 2), animate=False)
