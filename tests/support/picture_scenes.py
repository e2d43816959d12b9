"""Pictures of every screen over recorded runs, the same on every machine: what tests and documents show.

A run is read from its folder as `grpo-tui attach` does; those of two scenes were made on an H200, the others without a
GPU. One scene has two GPUs, which are made up. Clock, time zone and memory are fixed.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from board_runs import make_runs, make_sweep
from screen_fakes import NOW, FakeConnection, four_services, gpu, run_status
from textual.app import App
from textual.pilot import Pilot

from grpo_engine.wire.supervisor import RankStatus, RunState, Snapshot
from grpo_tui.ui import app as app_module
from grpo_tui.ui.app import GrpoScreen
from grpo_tui.ui.board import reading
from grpo_tui.ui.board.app import BoardApp
from grpo_tui.ui.board.reading import BoardReader
from grpo_tui.ui.connection import LocalRun, RunConnection
from grpo_tui.ui.keys import PLACES
from grpo_tui.ui.messages import StateChanged
from grpo_tui.ui.screens import SCREENS
from grpo_tui.view.board.state import Board
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


ON_H200 = 1_795_959_371.6
"""A moment after the restart of vLLM in the recording that was made there."""
LOSS = "micro-batch 1 of 2, step 12"
TWO_RANKS = [
    RankStatus(rank=0, pid=4301, gpu=0, place=f"the reduce-scatter of layer 31 in the backward pass of {LOSS}",
               since=NOW - 75, is_waiting=True, cpu_percent=99.0, rss_bytes=3 * GIB, gpu_memory_bytes=22 * GIB),
    RankStatus(rank=1, pid=4302, gpu=1, place=f"the loss of {LOSS}",
               since=NOW - 75, cpu_percent=2.0, rss_bytes=3 * GIB, gpu_memory_bytes=22 * GIB),
]  # fmt: skip
"""The second hangs, and the first waits for it."""
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
        gpus = [gpu(0), gpu(1, other=9 * GIB)]
        services = [
            each.model_copy(update={"ranks": TWO_RANKS, "gpus": [0, 1]}) if each.name == "trainer" else each
            for each in four_services()
        ]
        connection.send(Snapshot(number=1, status=run_status(run=run_folder.name, gpus=gpus, services=services)))
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


BOARD_SCENES: Mapping[str, Sequence[str]] = {
    "board": ("down", "down", "right", "down", "space", "space"),
    "curves": ("slash", *"rates", "enter", "home", "enter", "right"),
}
"""Keys that lead there from the board."""
GPUS_OF_LIVE = ((0, 1, 2, 3), (4,))


@asynccontextmanager
async def board_standing(
    name: str, logs: Path, size: tuple[int, int], theme: str
) -> AsyncIterator[tuple[BoardApp, Pilot[Any]]]:
    """The board at one of `BOARD_SCENES`, over copies of a recorded run that are made below `logs`."""
    (recorded,) = (logs / "recorded").iterdir()
    make_sweep(recorded, logs, began_at=NOW - 9000)
    list(make_runs(recorded, logs, 9, began_at=NOW - 60_000))
    with mock.patch.multiple(reading, registered_folders=set, marked_folders=set):
        runs, sweeps = BoardReader(logs).read()
    if name == "board":  # paths are shown
        elsewhere = Path("/home/ann/sort/logs")
        alone = [run for run in runs if run.sweep is None]
        live = [
            replace(run, state=RunState.RUNNING, is_live=True, gpus=gpus, started_at=NOW - 725, ended_at=None, note="",
                    warnings=(), services="api ready, vllm ready, env ready, trainer ready",
                    progress=replace(run.progress, time_left_s=60.0 * left))
            for run, gpus, left in zip(alone, GPUS_OF_LIVE, (47, 190), strict=False)
        ]  # fmt: skip
        runs = (*live, *(run for run in runs if run.name not in {each.name for each in live}))
        runs = tuple(
            replace(run, folder=elsewhere / run.name, sweep=run.sweep and elsewhere / "sweeps" / run.sweep.name)
            for run in runs
        )
        sweeps = tuple(replace(sweep, folder=elsewhere / "sweeps" / sweep.name) for sweep in sweeps)
    with mock.patch.dict(os.environ, {"TZ": "UTC"}):
        time.tzset()
        os.environ.pop("NO_COLOR", None)
        app = BoardApp(SimpleNamespace(read=lambda: (runs, sweeps)), Board(), clock=lambda: NOW, theme=theme)
        try:
            async with app.run_test(size=size) as pilot:
                await _until(pilot, lambda: app.board.is_read)
                await pilot.press(*BOARD_SCENES[name])
                yield app, pilot
        finally:
            os.environ.pop("TZ", None)
            time.tzset()


async def picture(app: App[Any], pilot: Pilot[Any], wanted: str | None = None) -> str:
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


async def _until(pilot: Pilot[Any], is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_so():
            await pilot.pause(0.01)
