"""What every screen of a run has: the run on top, its own body, what happens, and keys; drawn from the one state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar, Literal

from textual import events
from textual.app import ComposeResult
from textual.screen import Screen

from grpo_tui.ui.keys import PLACES, Key
from grpo_tui.ui.messages import Travelled
from grpo_tui.ui.waiting import wait_at_most
from grpo_tui.ui.widgets.activity_line import ActivityLine
from grpo_tui.ui.widgets.header import HeaderLine
from grpo_tui.ui.widgets.keys_bar import KeysBar
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.ui.widgets.tabs_line import TabsLine
from grpo_tui.ui.widgets.travel_bar import TravelBar, TravelInput
from grpo_tui.view.state import ViewState
from grpo_tui.view.travel import Closed, Jumped, Moved, TypingBegan


class RunScreen(Screen[None]):
    """Base of the screens that the keys 1 to 6 lead to.

    A screen says its `PLACE` and `KEYS`, composes its `body`, and extends `draw` where parts other than `Lines` have
    something to show. It is drawn only while it is in sight; what it reads it asks for in `on_screen_resume` or later.
    """

    AUTO_FOCUS = None
    PLACE: ClassVar[str]
    """One of `grpo_tui.ui.keys.PLACES`."""
    KEYS: ClassVar[Sequence[Key]] = ()
    """Those that work on this screen alone; its BINDINGS are `bindings(KEYS)`."""

    def __init__(self, state: ViewState) -> None:
        super().__init__()
        self._state = state

    def compose(self) -> ComposeResult:
        """The frame around the body."""
        yield HeaderLine()
        yield TabsLine(self.PLACE)
        yield from self.body()
        yield TravelInput()
        yield TravelBar()
        yield ActivityLine(chooses_services=PLACES[0] == self.PLACE)
        yield KeysBar(self.KEYS)

    def body(self) -> ComposeResult:
        """What stands between the header and the line of what happens; one part of it takes the free rows."""
        raise NotImplementedError

    def see(self, state: ViewState) -> None:
        """Know how things stand before it comes into sight: what it reads first is for now, not for when it left."""
        self._state = state

    def draw(self, state: ViewState) -> None:
        """Show another state; parts whose lines are the same paint nothing."""
        self._state = state
        for part in self.query(Lines):
            part.draw(state)

    # --- the keys of the line of time ------------------------------------------------------------------------------

    def action_travel_move(self, by: int) -> None:
        """So many small steps on, or back."""
        self.post_message(Travelled(Moved(by=by)))

    def action_travel_jump(self, to: Literal["event", "step", "end"], direction: Literal[-1, 1]) -> None:
        """To the next or the previous event or step, or to an end of the run."""
        self.post_message(Travelled(Jumped(to=to, direction=direction)))

    def action_travel_type(self) -> None:
        """Ask for a time or a step."""
        self.query_one(TravelInput).open()
        self.post_message(Travelled(TypingBegan()))

    def action_travel_close(self) -> None:
        """Back to the present."""
        self.post_message(Travelled(Closed()))

    def on_resize(self, event: events.Resize) -> None:
        """Parts say their lines anew by themselves; a screen that shares out rows does it here."""


class LookingScreen(RunScreen):
    """Base of screens that read files of their own: at once what is asked for, and now and then while in sight."""

    def __init__(self, state: ViewState) -> None:
        super().__init__(state)
        self._wanted = asyncio.Event()
        self._is_in_sight = False

    async def look(self) -> None:
        """Read for ever, with `until_wanted` between two looks."""
        raise NotImplementedError

    def asked_of(self, state: ViewState) -> object:
        """What in the state says what is to be read."""
        raise NotImplementedError

    def on_mount(self) -> None:
        """Begin to read."""
        self.run_worker(self.look(), name=self.PLACE)

    def on_screen_resume(self) -> None:
        """Look again."""
        self._is_in_sight = True
        self._wanted.set()

    def on_screen_suspend(self) -> None:
        """Read no more while another screen is shown."""
        self._is_in_sight = False

    def draw(self, state: ViewState) -> None:
        """Show another state, and read what it asks for."""
        if self.asked_of(self._state) != self.asked_of(state):
            self._wanted.set()
        super().draw(state)

    async def until_wanted(self, pause_s: float | None) -> None:
        """Return when something was asked for, or after a while in sight."""
        await wait_at_most(self._wanted, pause_s if self._is_in_sight else None)
        self._wanted.clear()
