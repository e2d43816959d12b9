"""An open screen over a run without a supervisor: of the present, or of a moment in the past."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
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

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.supervisor import RunState, RunStatus, ServiceState, Snapshot, UsageSampled
from grpo_tui.ui.app import GrpoScreen
from grpo_tui.ui.screens.main import MainScreen
from grpo_tui.ui.widgets.frame.header import HeaderLine
from grpo_tui.ui.widgets.frame.travel_bar import TravelBar
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.ui.widgets.main.log_panel import LogLines
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.view.timeline.state import clock_at

SMALL, LARGE = (80, 24), (200, 50)
CRASH_AT = STARTED + 400


class Shown:
    """An open screen, and ways to wait for it and to read it."""

    def __init__(self, app: GrpoScreen, pilot: Pilot[None], connection: FakeConnection) -> None:
        self.app = app
        self.pilot = pilot
        self.connection = connection

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds and everything is drawn."""
        async with asyncio.timeout(20):
            while not holds() or self.app._is_draw_due:
                await self.pilot.pause(0.01)
        await self.pilot.pause()

    def lines(self, part: type[Lines] | type[LogLines]) -> list[str]:
        return self.app.main.query_one(part).plain_lines

    def text(self, part: type[Lines] | type[LogLines]) -> str:
        return "\n".join(self.lines(part))

    def row(self, name: str) -> str:
        """Its row in the services table."""
        return next(line for line in self.lines(ServicesTable) if name in line.split()[:2])

    @property
    def picture(self) -> str:
        """Everything on the screen, dialogs included."""
        return self.app.export_screenshot().replace("&#160;", " ")


@asynccontextmanager
async def shown(
    run_folder: Path,
    size: tuple[int, int] = SMALL,
    status: RunStatus | None = None,
    *,
    is_ascii: bool = False,
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
    connection.say(Snapshot(number=1, status=status))
    app = GrpoScreen(run_folder, connection, clock=lambda: NOW, is_ascii=is_ascii, **options)
    async with app.run_test(size=size) as pilot:
        screen = Shown(app, pilot, connection)
        await screen.until(lambda: isinstance(app.screen, MainScreen) and app.screen.is_mounted)
        await screen.until(lambda: any("step 39" in text for text in screen.lines(LogLines)))
        if num_steps:
            await screen.until(lambda: "step" in screen.text(HeaderLine))
        yield screen


class ShownPast(Shown):
    """An open screen that shows a moment of the past."""

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def at(self, moment: float) -> None:
        """Wait until the screen shows a moment."""
        await self.until(lambda: self.app.state.travel.until == pytest.approx(moment, abs=0.01))
        await self.until(lambda: clock_at(moment) in self.text(HeaderLine))
        await self.until(lambda: clock_at(moment) in self.text(TravelBar).partition("\n")[0])

    def text(self, part: type[Lines] | type[LogLines]) -> str:
        assert self.app.shown is not None
        found = self.app.shown.query(part)  # none on a screen that is not composed yet
        return "\n".join(line for each in found for line in each.plain_lines)

    @property
    def log(self) -> str:
        return "\n".join(self.app.main.query_one(LogLines).plain_lines)


def write_timeline(folder: Path, *, size_of_log: int = 4000) -> None:
    """Write a timeline in which vllm fails after 400 s and is started again."""
    services = four_services()
    early = [each.model_copy(update={"state": ServiceState.WAITING, "started_at": None}) for each in services]
    usage: dict[str, Any] = {"cpu_percent": {}, "rss_bytes": {}, "gpu_memory_bytes": {}, "gpus": []}
    ends = {"trainer": size_of_log}
    events = [
        Snapshot(number=0, time=STARTED, status=run_status(state=RunState.STARTING, services=early)),
        *(changed(n, STARTED + 5 + n, each) for n, each in enumerate(services)),
        UsageSampled(number=5, time=STARTED + 10, log_bytes={"trainer": 300}, **usage),
        changed(6, CRASH_AT, service("vllm", state=ServiceState.FAILED, why="out of memory")),
        UsageSampled(number=7, time=CRASH_AT, log_bytes=ends, **usage),
        changed(8, CRASH_AT + 50, service("vllm", state=ServiceState.STARTING, attempt=2)),
        changed(9, CRASH_AT + 80, service("vllm", attempt=2, restarts=1)),
    ]
    (folder / "events.jsonl").write_bytes(b"".join(map(to_line, events)))


@asynccontextmanager
async def past_screen(
    folder: Path, status: RunStatus | None = None, *, size: tuple[int, int] = (120, 36)
) -> AsyncIterator[ShownPast]:
    """Open a screen on a run; with `status` the run is over and no supervisor answers."""
    write_metrics(folder, 280)
    write_log(folder, "trainer", num_lines=120)
    connection = FakeConnection()
    if status is None:
        connection.say(Snapshot(number=9, status=run_status()))
    else:
        connection.is_there, connection.stored = False, status
    app = GrpoScreen(folder, connection, clock=lambda: NOW)
    async with app.run_test(size=size) as pilot:
        shown = ShownPast(app, pilot, connection)
        await shown.until(lambda: app.state.status is not None and app.state.history.last is not None)
        await shown.until(lambda: "trainer" in shown.text(ServicesTable))
        yield shown
