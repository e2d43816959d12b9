"""The alignment screen: how far trainer and inference are apart on the same tokens, where, and why."""

from __future__ import annotations

import asyncio

from textual.app import ComposeResult

from grpo_tui.ui.keys import Key, bindings
from grpo_tui.ui.messages import StateChanged
from grpo_tui.ui.screens.base import FileScreen
from grpo_tui.ui.widgets.alignment_body import AlignmentBody
from grpo_tui.view.alignment.reader import AlignmentReader
from grpo_tui.view.alignment.state import (
    AlignmentChange,
    GroupsMeasured,
    NewestWanted,
    Page,
    PageTurned,
    StepMoved,
    TokensScrolled,
    WindowTurned,
)
from grpo_tui.view.state import ViewState

LOOK_PAUSE_S = 1.0
"""Between two looks at the file, while the screen is in sight."""

ON_ALIGNMENT = (
    Key(key="h", shown="h", action="screen.turn_window", label="history",
        help="steps that are compared: the last 10, one, or all"),
    Key(key="left", shown="←", action="screen.move_step(-1)", label="step back",
        help="end the window one step earlier"),
    Key(key="right", shown="→", action="screen.move_step(1)", label="on",
        help="end the window one step later"),
    Key(key="shift+left,ctrl+left", shown="⇧←", action="screen.move_step(-10)", label="10 back", is_in_footer=False,
        help="end the window ten steps earlier (ctrl+← too)"),
    Key(key="shift+right,ctrl+right", shown="⇧→", action="screen.move_step(10)", label="10 on", is_in_footer=False,
        help="end the window ten steps later (ctrl+→ too)"),
    Key(key="end", shown="End", action="screen.newest", label="newest", is_in_footer=False,
        help="end the window at the newest step, and follow"),
    Key(key="tab", shown="tab", action="screen.turn_page", label="page",
        help="next page: charts, worst tokens, position and version (a wide screen shows all)"),
    Key(key="up,k", shown="↑ k", action="screen.scroll_tokens(-1)", label="up", is_in_footer=False,
        help="scroll up in the worst tokens"),
    Key(key="down,j", shown="↓ j", action="screen.scroll_tokens(1)", label="down", is_in_footer=False,
        help="scroll down in the worst tokens"),
    Key(key="pageup", shown="PgUp", action="screen.scroll_tokens(-8)", label="up", is_in_footer=False,
        help="eight tokens up"),
    Key(key="pagedown", shown="PgDn", action="screen.scroll_tokens(8)", label="down", is_in_footer=False,
        help="eight tokens down"),
)  # fmt: skip


class AlignmentScreen(FileScreen):
    """Verdict, histogram, ratios, worst tokens, position and version."""

    PLACE = "alignment"
    KEYS = ON_ALIGNMENT
    BINDINGS = bindings(ON_ALIGNMENT)

    def __init__(self, state: ViewState) -> None:
        super().__init__(state)
        self._reader = AlignmentReader(state.run_folder)

    def body(self) -> ComposeResult:
        """One part, which arranges itself."""
        yield AlignmentBody()

    def read_request(self, state: ViewState) -> object:
        """The steps, and the moment."""
        return state.alignment.window, state.alignment.until_step, state.until

    async def look(self) -> None:
        """Measure the groups that the state asks for: at once after a key, else every second."""
        while True:
            await self.wait_for_request(LOOK_PAUSE_S)
            state = self._state
            view = state.alignment
            measured = await asyncio.to_thread(
                self._reader.look, view.window, view.until_step, state.history.lines, until_time=state.until
            )
            if measured is not None:
                self._change(GroupsMeasured(measured=measured, settings=self._reader.settings))

    def _change(self, change: AlignmentChange) -> None:
        self.app.post_message(StateChanged(change))

    def action_turn_window(self) -> None:
        """The next kind of window."""
        self._change(WindowTurned())

    def action_move_step(self, by: int) -> None:
        """End the window so many steps later."""
        self._change(StepMoved(by=by))

    def action_newest(self) -> None:
        """End the window at the newest step."""
        self._change(NewestWanted())

    def action_turn_page(self, page: str = "") -> None:
        """Another page of a narrow screen, the next one where none is named."""
        self._change(PageTurned(page=Page(page) if page else None))

    def action_scroll_tokens(self, by: int) -> None:
        """Move along the worst tokens."""
        self._change(TokensScrolled(by=by))
