"""What a start waits for, in full at every size, and the page with all that is known of a service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from screen_fakes import NOW, changed, run_status, service
from shown_screen import Shown, shown
from usual_plan import write_plan

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.supervisor import RunChanged, RunState, RunStatus, ServiceState
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.ui.widgets.main.start_panel import StartPanel

pytestmark = pytest.mark.slow
SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 36), (200, 50)])
NOT_YET: dict[str, Any] = {"state": ServiceState.WAITING, "pid": None, "started_at": None, "attempt": 0}
LONG_REASON = "waits for vllm to be ready: starting for 72 s, loading weights, 2 of 4 shards, /health answers 503"
LOADING = service(
    "vllm",
    state=ServiceState.STARTING,
    started_at=NOW - 72,
    ready_at=None,
    phase="loading weights, 2 of 4 shards",
    health="/health answers 503: the model is loading",
    why="starting for 72 s",
)


def starting_run(run: str) -> RunStatus:
    waiting = [service(name, **NOT_YET, why=LONG_REASON) for name in ("env", "trainer")]
    return run_status(run=run, state=RunState.STARTING, services=[service("api"), LOADING, *waiting])


def row(screen: Shown, name: str) -> str:
    return next(line for line in screen.lines(ServicesTable) if name in line.split()[:2])


async def plan_read(screen: Shown) -> None:
    await screen.until(lambda: bool(screen.app.state.launches))


@SIZES
async def test_what_a_start_waits_for_is_told_in_full_at_every_width(tmp_path: Path, size: tuple[int, int]) -> None:
    write_plan(tmp_path)
    async with shown(tmp_path, size, starting_run(tmp_path.name)) as screen:
        await plan_read(screen)
        await screen.until(lambda: "of at most" in screen.text(StartPanel))
        told = " ".join(screen.text(StartPanel).split())
        assert "◐ vllm loading weights, 2 of 4 shards" in told
        assert "1m12s of at most 5m00s, longer while it makes progress" in told
        assert "probe: /health answers 503: the model is loading" in told
        assert "env and trainer wait for it" in told
        assert "…" not in told


@SIZES
async def test_a_service_that_was_started_before_its_turn_says_how_far_it_is(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    held = {**NOT_YET, "started_at": NOW - 72, "attempt": 1, "why": LONG_REASON}
    services = [
        service("env", **{**held, "pid": 30, "prepared_at": NOW - 60}),
        service("trainer", **{**held, "pid": 31}),
    ]
    write_plan(tmp_path)
    run = run_status(run=tmp_path.name, state=RunState.STARTING, services=[service("api"), LOADING, *services])
    async with shown(tmp_path, size, run) as screen:
        await plan_read(screen)
        await screen.until(lambda: "prepared, waits " in row(screen, "env"))
        assert "preparing, waits" in row(screen, "trainer")
        assert "env (prepared) and trainer (preparing) wait for it" in " ".join(screen.text(StartPanel).split())


@SIZES
async def test_a_waiting_service_names_what_it_waits_for_and_is_not_cut(tmp_path: Path, size: tuple[int, int]) -> None:
    write_plan(tmp_path)
    async with shown(tmp_path, size, starting_run(tmp_path.name)) as screen:
        await plan_read(screen)
        await screen.until(lambda: row(screen, "env").rstrip().endswith("waits for vllm"))
        assert "waits for vllm a" in row(screen, "trainer")


async def test_the_rows_of_a_start_go_once_the_run_is_up(tmp_path: Path) -> None:
    write_plan(tmp_path)
    async with shown(tmp_path, status=starting_run(tmp_path.name)) as screen:
        await screen.until(lambda: screen.part(StartPanel).display)
        screen.connection.send(changed(2, NOW, service("vllm")), RunChanged(number=3, time=NOW, state=RunState.RUNNING))
        await screen.until(lambda: not screen.part(StartPanel).display)


async def test_a_start_without_a_plan_still_tells_phase_and_time(tmp_path: Path) -> None:
    async with shown(tmp_path, status=starting_run(tmp_path.name)) as screen:
        await screen.until(lambda: "for 1m12s" in screen.text(StartPanel))
        assert "loading weights" in screen.text(StartPanel)


async def test_d_tells_all_about_the_selected_service_and_masks_its_secrets(tmp_path: Path) -> None:
    write_plan(tmp_path)
    events = [
        changed(1, NOW - 90, service("vllm", state="starting", started_at=NOW - 91, health="port 9001 is closed")),
        changed(2, NOW - 80, service("vllm", state="backoff", exit_code=3, why="exited with code 3")),
        changed(3, NOW - 70, service("vllm", attempt=2, state="starting", started_at=NOW - 72, health="503: loading")),
    ]
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(to_line, events)))
    async with shown(tmp_path, (120, 60), starting_run(tmp_path.name)) as screen:
        await plan_read(screen)
        screen.app.select("vllm")
        await screen.press("d")
        await screen.until_screen(ReadingScreen)
        for told in (
            "api ready",
            "env, trainer",
            "http://127.0.0.1:9001/health answers 200",
            "port 9001 is closed",
            "503: loading",
            "exit code 3: exited with code 3",
            "--port 9001",
            "OMP_NUM_THREADS=4",
            "HF_TOKEN=***",
            "LEVEL=***",
        ):
            assert told in screen.picture, told
        for secret in ("sk-in-the-command", "hf-in-the-environment", "of-a-file"):
            assert secret not in screen.picture
        await screen.press("escape")
        await screen.until(lambda: screen.app.screen is screen.app.main)


async def test_d_without_a_plan_says_what_is_missing(tmp_path: Path) -> None:
    async with shown(tmp_path, (120, 40)) as screen:
        await screen.press("d")
        await screen.until_screen(ReadingScreen)
        assert "plan.json of the run cannot be read" in screen.picture
