"""An open screen over a run without a supervisor: of the present, or of a moment in the past."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar
from unittest import mock

import pytest
from rich.cells import cell_len
from screen_fakes import (
    NOW,
    STARTED,
    FakeConnection,
    changed,
    four_services,
    run_status,
    service,
    write_log,
    write_metrics,
)
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widget import Widget

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.supervisor import RunState, RunStatus, ServiceState, Snapshot, UsageSampled
from grpo_tui.ui import news
from grpo_tui.ui.app import GrpoScreen
from grpo_tui.ui.connection import RunConnection
from grpo_tui.ui.keys import PLACES
from grpo_tui.ui.screens import alignment, logs, rollouts
from grpo_tui.ui.screens.main import MainScreen
from grpo_tui.ui.widgets.frame.header import HeaderLine
from grpo_tui.ui.widgets.frame.travel_bar import TravelBar
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.ui.widgets.main.log_panel import LogLines
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.view.state import Do
from grpo_tui.view.timeline.state import clock_at

SMALL, LARGE = (80, 24), (200, 50)
CRASH_AT = STARTED + 400
POLLS: Mapping[ModuleType, Sequence[str]] = {
    news: ("RECONNECT_S", "METRICS_POLL_S", "TIMELINE_POLL_S", "LOG_POLL_BUSY_S", "LOG_POLL_QUIET_S"),
    alignment: ("LOOK_PAUSE_S",),
    rollouts: ("LOOK_PAUSE_S",),
    logs: ("POLL_BUSY_S", "POLL_QUIET_S"),
}
POLL_S = 0.05
"""Between two reads of a file in tests."""
PartWithText = type[Lines] | type[LogLines]
AnyWidget = TypeVar("AnyWidget", bound=Widget)


class Shown:
    """An open screen, and ways to wait for it and to read it."""

    def __init__(self, app: GrpoScreen, pilot: Pilot[None], connection: RunConnection) -> None:
        self.app = app
        self.pilot = pilot
        self._connection = connection

    @property
    def connection(self) -> FakeConnection:
        assert isinstance(self._connection, FakeConnection)
        return self._connection

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def resize(self, size: tuple[int, int]) -> None:
        """Change the size of the terminal, and wait until the screen has it."""
        await self.pilot.resize_terminal(*size)
        await self.until(lambda: self.app.main.size == size)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds and everything is drawn."""
        async with asyncio.timeout(60):
            while not holds() or self.app._is_draw_due:
                await self.pilot.pause(0.01)
        await self.pilot.pause()

    async def until_text(self, part: PartWithText, words: str) -> None:
        """Wait until a part of the screen contains these words."""
        await self.until(lambda: words in self.text(part))

    async def until_screen(self, kind: type[Screen[Any]]) -> None:
        """Wait until a screen or dialog of this class is in front."""
        await self.until(lambda: isinstance(self.app.screen, kind) and self.app.screen.is_mounted)

    async def until_place(self, place: str) -> None:
        """Wait until the screen of one of `PLACES` is in front."""
        await self.until(lambda: self.app.shown is not None and place == self.app.shown.PLACE)
        await self.until(lambda: self.app.screen.is_mounted)

    async def go_to(self, place: str) -> None:
        """Open the screen of one of `PLACES` by its key."""
        await self.press(str(PLACES.index(place) + 1))
        await self.until_place(place)

    async def until_commands(self, *commands: tuple[Do, str | None]) -> None:
        """Wait for as many commands as these, and compare all that were sent."""
        await self.until(lambda: len(self.connection.commands) >= len(commands))
        assert self.connection.commands == list(commands)

    async def until_moment(self, moment: float) -> None:
        """Wait until the screen shows a moment of the past."""
        await self.until(lambda: self.app.state.travel.until == pytest.approx(moment, abs=0.01))
        await self.until_text(HeaderLine, clock_at(moment))
        await self.until(lambda: clock_at(moment) in self.text(TravelBar).partition("\n")[0])

    def part(self, kind: type[AnyWidget], selector: str = "") -> AnyWidget:
        """A widget of the screen in front, dialogs left out."""
        assert self.app.shown is not None
        return self.app.shown.query_one(selector or kind.__name__, kind)

    def lines(self, part: PartWithText) -> list[str]:
        """The lines of a part; none where it is not there yet."""
        found = self.app.shown.query(part) if self.app.shown is not None else ()
        return [line for each in found for line in each.plain_lines]

    def text(self, part: PartWithText) -> str:
        return "\n".join(self.lines(part))

    @property
    def picture(self) -> str:
        """Everything on the screen, dialogs included."""
        return self.app.export_screenshot().replace("&#160;", " ")

    async def check_widths(self) -> None:
        """Wait until no line is wider than its part; a part without room keeps its earlier lines."""
        try:
            await self.until(lambda: not self._too_wide())
        except TimeoutError:
            pytest.fail(f"wider than their part: {self._too_wide()}")

    def _too_wide(self) -> list[tuple[str, str]]:
        assert self.app.shown is not None
        parts = [part for part in self.app.shown.query(Lines) if part.size]
        return [
            (type(part).__name__, line)
            for part in parts
            for line in part.plain_lines
            if cell_len(line) > part.size.width
        ]


@asynccontextmanager
async def open_app(
    run_folder: Path, connection: RunConnection, size: tuple[int, int] = SMALL, **options: Any
) -> AsyncIterator[Shown]:
    """Open `GrpoScreen` with these options, with short waits between reads."""
    app = GrpoScreen(run_folder, connection, clock=lambda: NOW, **options)
    with ExitStack() as stack:
        for module, names in POLLS.items():
            stack.enter_context(mock.patch.multiple(module, **dict.fromkeys(names, POLL_S)))
        async with app.run_test(size=size) as pilot:
            yield Shown(app, pilot, connection)


@asynccontextmanager
async def shown(
    run_folder: Path,
    size: tuple[int, int] = SMALL,
    status: RunStatus | None = None,
    *,
    num_steps: int = 0,
    options: Mapping[str, Any] = MappingProxyType({}),
    **last_steps: float | None,
) -> AsyncIterator[Shown]:
    """Open a screen whose fake supervisor has sent a snapshot; `options` are passed to `GrpoScreen`."""
    status = status or run_status(run=run_folder.name)
    if num_steps:
        write_metrics(run_folder, num_steps, **last_steps)
    for one in status.services:
        write_log(run_folder, one.name)
    connection = FakeConnection()
    connection.send(Snapshot(number=1, status=status))
    async with open_app(run_folder, connection, size, **options) as screen:
        await screen.until_screen(MainScreen)
        await screen.until_text(LogLines, "step 39")
        if num_steps:
            await screen.until_text(HeaderLine, "step")
        yield screen


def write_timeline(folder: Path) -> None:
    """Write a timeline in which vllm fails after 400 s, when the trainer's log has 3000 bytes, and is started again."""
    services = four_services()
    early = [each.model_copy(update={"state": ServiceState.WAITING, "started_at": None}) for each in services]
    usage: dict[str, Any] = {"cpu_percent": {}, "rss_bytes": {}, "gpu_memory_bytes": {}, "gpus": []}
    events = [
        Snapshot(number=0, time=STARTED, status=run_status(state=RunState.STARTING, services=early)),
        *(changed(n, STARTED + 5 + n, each) for n, each in enumerate(services)),
        UsageSampled(number=5, time=STARTED + 10, log_bytes={"trainer": 300}, **usage),
        changed(6, CRASH_AT, service("vllm", state=ServiceState.FAILED, why="out of memory")),
        UsageSampled(number=7, time=CRASH_AT, log_bytes={"trainer": 3000}, **usage),
        changed(8, CRASH_AT + 50, service("vllm", state=ServiceState.STARTING, attempt=2)),
        changed(9, CRASH_AT + 80, service("vllm", attempt=2, restarts=1)),
    ]
    (folder / "events.jsonl").write_bytes(b"".join(map(to_line, events)))


@asynccontextmanager
async def past_screen(
    folder: Path,
    status: RunStatus | None = None,
    *,
    size: tuple[int, int] = (120, 36),
    has_timeline: bool = True,
) -> AsyncIterator[Shown]:
    """Open a screen on a run with a past; with `status` the run is over and no supervisor answers."""
    if has_timeline:
        write_timeline(folder)
    write_metrics(folder, 280)
    write_log(folder, "trainer", num_lines=120)
    connection = FakeConnection()
    if status is None:
        connection.send(Snapshot(number=9, status=run_status()))
    else:
        connection.is_reachable, connection.stored = False, status
    async with open_app(folder, connection, size) as screen:
        await screen.until(lambda: screen.app.state.status is not None and screen.app.state.history.last is not None)
        await screen.until_text(ServicesTable, "trainer")
        yield screen
