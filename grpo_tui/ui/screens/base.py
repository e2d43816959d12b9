"""Bases of all screens of a run: header, body, timeline, activity and keys, drawn from one state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar, Literal

from textual import events
from textual.app import ComposeResult

from grpo_tui.ui.keys import PLACES, Key
from grpo_tui.ui.messages import MovedInTime, StateChanged
from grpo_tui.ui.text_screen import TextScreen
from grpo_tui.ui.waiting import wait_at_most
from grpo_tui.ui.widgets.frame.activity_line import ActivityLine
from grpo_tui.ui.widgets.frame.header import HeaderLine, TabsLine
from grpo_tui.ui.widgets.frame.keys_bar import KeysBar
from grpo_tui.ui.widgets.frame.travel_bar import TravelBar, TravelInput
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.view.state import MessageShown, ViewState
from grpo_tui.view.timeline.state import Closed, Jumped, Moved, TypingBegan


class RunScreen(TextScreen):
    """Base of the screens that the keys 1 to 6 lead to.

    A screen declares `PLACE` and `KEYS`, composes its `body`, and extends `draw` for parts other than `Lines`. It is
    drawn only while it is shown, and starts reading in `on_screen_resume` or later.
    """

    PLACE: ClassVar[str]
    """One of `grpo_tui.ui.keys.PLACES`."""
    KEYS: ClassVar[Sequence[Key]] = ()
    """Keys of this screen alone; its BINDINGS are `bindings(KEYS)`."""

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
        """The widgets between header and activity line; one of them takes the free rows."""
        raise NotImplementedError

    def set_state(self, state: ViewState) -> None:
        """Set the state before the screen is shown, so that its first read is for the current state."""
        self._state = state

    def draw(self, state: ViewState) -> None:
        """Draw a state; parts whose lines did not change paint nothing."""
        self._state = state
        for part in self.query(Lines):
            part.draw(state)

    def show_message(self, text: str) -> None:
        """Answer a key."""
        self.post_message(StateChanged(MessageShown(severity="info", text=text)))

    # --- keys of the timeline --------------------------------------------------------------------------------------

    def action_travel_move(self, by: int) -> None:
        """Move by `by` small steps."""
        self.post_message(MovedInTime(Moved(by=by)))

    def action_travel_jump(self, to: Literal["event", "step", "end"], direction: Literal[-1, 1]) -> None:
        """Jump to the next or previous event or step, or to an end of the run."""
        self.post_message(MovedInTime(Jumped(to=to, direction=direction)))

    def action_travel_type(self) -> None:
        """Ask for a time or a step."""
        self.query_one(TravelInput).open()
        self.post_message(MovedInTime(TypingBegan()))

    def action_travel_close(self) -> None:
        """Back to the present, or to the end of a run that is over."""
        if self._state.travel.is_run_over:
            self.show_message("the run is over: this is its end; ← and [ go back from here, q leaves")
        self.post_message(MovedInTime(Closed()))

    def on_resize(self, event: events.Resize) -> None:
        """Parts handle their own resize; a screen that divides rows among parts overrides this."""


class FileScreen(RunScreen):
    """Base of screens that read files: at once when the state asks for something else, and regularly while shown."""

    def __init__(self, state: ViewState) -> None:
        super().__init__(state)
        self._wanted = asyncio.Event()
        self._is_in_sight = False

    async def look(self) -> None:
        """Read in a loop, with `wait_for_request` between two reads."""
        raise NotImplementedError

    def read_request(self, state: ViewState) -> object:
        """The part of the state that decides what is read."""
        raise NotImplementedError

    def on_mount(self) -> None:
        """Start the read loop."""
        self.run_worker(self.look(), name=self.PLACE)

    def on_screen_resume(self) -> None:
        """Read at once."""
        self._is_in_sight = True
        self._wanted.set()

    def on_screen_suspend(self) -> None:
        """Stop reading while another screen is shown."""
        self._is_in_sight = False

    def draw(self, state: ViewState) -> None:
        """Draw a state, and read if it asks for something else."""
        if self.read_request(self._state) != self.read_request(state):
            self._wanted.set()
        super().draw(state)

    async def wait_for_request(self, pause_s: float | None) -> None:
        """Return when something else is requested, or after `pause_s` while the screen is shown."""
        await wait_at_most(self._wanted, pause_s if self._is_in_sight else None)
        self._wanted.clear()
