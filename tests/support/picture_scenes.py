"""Pictures of every screen over recorded runs, the same on every machine: what tests and documents show.

A run is read from its folder as `grpo-tui attach` does; those of two scenes were made on an H200, the others without a
GPU. One scene has two GPUs, which are made up. Clock, time zone and memory are fixed.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from screen_fakes import NOW, FakeConnection, gpu, run_status
from textual.pilot import Pilot

from grpo_engine.wire.supervisor import Snapshot
from grpo_tui.ui import app as app_module
from grpo_tui.ui.app import GrpoScreen
from grpo_tui.ui.connection import LocalRun, RunConnection
from grpo_tui.ui.keys import PLACES
from grpo_tui.ui.messages import StateChanged
from grpo_tui.ui.screens import SCREENS
from grpo_tui.view.timeline.state import WentTo

RECORDED = Path(__file__).parents[1] / "recorded"
GIB = 1 << 30
MEMORY = SimpleNamespace(total=64 * GIB, available=41 * GIB)
LIMIT_S = 60.0
SETTLED_S = 1.5
"""A picture that stays the same for so long is taken as finished, where nothing says what it should be."""
OTHER_S = 15.0
"""And for so long, where something does, as another one."""
_ID = re.compile(r"terminal-\d+")
_HARD_SPACE = "&#160;"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A screen, and the keys that lead to what is to be seen there."""

    place: str
    keys: Sequence[str] = ()
    recording: str = "tiny-cpu"
    """Name of the archive in tests/recorded."""
    moment: float | None = None
    """Unix seconds to go back to; None: the end of the run."""
    has_gpus: bool = False
    """Two that are made up."""

    @property
    def archive(self) -> Path:
        """The recording."""
        return RECORDED / f"{self.recording}.tar.gz"


ON_H200 = 1_795_354_158.0
"""A moment after the restart of vLLM in the recording that was made there."""
SCENES = {
    place: scene
    for place, scene in {
        "run": Scene(place="run"),
        "gpus": Scene(place="gpus", recording="smollm-gpu", moment=ON_H200),
        "alignment": Scene(place="alignment"),
        "rollouts": Scene(place="rollouts", keys=("enter",)),
        "metrics": Scene(place="metrics"),
        "logs": Scene(place="logs"),
    }.items()
    if place in SCREENS
}
"""Every screen, as real runs show it."""
DOCUMENTED = {**SCENES, "run-on-h200": Scene(place="run", recording="smollm-gpu", moment=ON_H200)}
ALL_SCENES = {**DOCUMENTED, "two-gpus": Scene(place="gpus", has_gpus=True)}


@asynccontextmanager
async def standing(
    scene: Scene, run_folder: Path, size: tuple[int, int], theme: str
) -> AsyncIterator[tuple[GrpoScreen, Pilot[None]]]:
    """The app at a scene; where it moves on by itself, it has not come to rest yet."""
    connection: RunConnection = LocalRun(run_folder)
    if scene.has_gpus:
        connection = FakeConnection()
        connection.send(
            Snapshot(number=1, status=run_status(run=run_folder.name, gpus=[gpu(0), gpu(1, other=9 * GIB)]))
        )
    with (
        mock.patch.dict(os.environ, {"TZ": "UTC"}),
        mock.patch.object(app_module.psutil, "virtual_memory", return_value=MEMORY),
    ):
        time.tzset()
        os.environ.pop("NO_COLOR", None)
        app = GrpoScreen(run_folder, connection, clock=lambda: NOW, theme=theme)
        try:
            async with app.run_test(size=size) as pilot:
                await _until(pilot, lambda: app.state.status is not None and app.state.history.last is not None)
                await pilot.press(str(PLACES.index(scene.place) + 1))
                await _until(pilot, lambda: app.shown is not None and scene.place == app.shown.PLACE)
                if scene.keys:
                    await _until(pilot, lambda: bool(app.state.rollouts.read and app.state.rollouts.found))
                for key in scene.keys:
                    await pilot.press(key)
                if scene.moment is not None:
                    await _until(pilot, lambda: app.state.travel.ends is not None)
                    app.post_message(StateChanged(WentTo(moment=scene.moment)))
                    await _until(pilot, lambda: app.state.travel.until == scene.moment)
                yield app, pilot
        finally:
            os.environ.pop("TZ", None)
            time.tzset()


async def picture(app: GrpoScreen, pilot: Pilot[None], wanted: str | None = None) -> str:
    """What is seen: as soon as it is as `wanted`, else when it has come to rest."""
    last, since = "", time.monotonic()
    async with asyncio.timeout(LIMIT_S):
        while True:
            await pilot.pause(0.02)
            now = canonical(app.export_screenshot(title="grpo-tui", simplify=True))
            if now == wanted:
                return now
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > (SETTLED_S if wanted is None else OTHER_S):
                return now


def canonical(svg: str) -> str:
    """The same picture with the same text: rich numbers what belongs together by a sum over all of it."""
    return "\n".join(line.rstrip() for line in _ID.sub("terminal", svg).splitlines()) + "\n"


def words(svg: str) -> list[str]:
    """The rows of a picture as text, for a message."""
    pieces = re.findall(r'<text [^>]*x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', svg)
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in pieces:
        rows.setdefault(float(y), []).append((float(x), text.replace(_HARD_SPACE, " ")))
    return ["".join(text for _, text in sorted(rows[y])) for y in sorted(rows)]


async def _until(pilot: Pilot[None], is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_so():
            await pilot.pause(0.01)
