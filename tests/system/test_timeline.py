"""The timeline in the run folder: complete across supervisors, bounded over weeks, and safe on a full disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from workplace import IDLE, Workplace, service, until

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.run_folder import TIMELINE_FILE
from grpo_engine.wire.supervisor import (
    Bye,
    Event,
    Notice,
    RunChanged,
    RunState,
    RunStatus,
    ServiceChanged,
    ServiceState,
    ServiceStatus,
    Snapshot,
    UsageSampled,
    read_from_daemon,
)
from grpo_tui.run_files.timeline import after_event
from grpo_tui.supervisor.report.timeline import Timeline, shorten


def recorded(folder: Path) -> list[Snapshot | Event]:
    lines = (folder / TIMELINE_FILE).read_bytes().splitlines(keepends=True)
    messages = [read_from_daemon(line) for line in lines if line.endswith(b"}\n")]
    assert not any(isinstance(each, Bye) for each in messages)
    return [each for each in messages if isinstance(each, Snapshot | Event)]


def states(folder: Path, name: str) -> list[ServiceState]:
    changes = [each for each in recorded(folder) if isinstance(each, ServiceChanged) and each.service.name == name]
    return [each.service.state for each in changes]


@pytest.mark.slow
def test_a_timeline_continues_after_a_killed_supervisor_to_the_end_of_the_run(place: Workplace) -> None:
    place.up(service("a", IDLE), service("b", IDLE, ends_run="false"))
    folder = place.run_folder()
    until((folder / TIMELINE_FILE).exists)
    until(lambda: any(isinstance(each, UsageSampled) and each.log_bytes.get("a") for each in recorded(folder)))
    place.kill_supervisor()
    with (folder / TIMELINE_FILE).open("ab") as file:
        file.write(b'{"type":"notice","number":9')  # as left by a supervisor that was killed while it wrote
    os.kill(place.pid("b"), signal.SIGKILL)
    until(lambda: place.service("b").exit_code is not None)  # else the next supervisor may find it running
    place.succeed("start", "b", "--wait")
    until(lambda: states(folder, "b").count(ServiceState.READY) == 2)
    place.succeed("down")
    events = recorded(folder)
    first, second = (each for each in events if isinstance(each, Snapshot))
    assert first.time is not None and second.time is not None  # noqa: PT018
    assert first.time < second.time
    assert first.status.supervisor != second.status.supervisor
    assert events[0] == first
    status = first.status
    for event in events:
        status = after_event(status, event)
    assert (status.state, [each.state for each in status.services]) == (RunState.STOPPED, [ServiceState.STOPPED] * 2)
    assert status.ended_at is not None


# --- what is kept, without a run --------------------------------------------------------------------------------------


def status_of(*services: ServiceStatus) -> RunStatus:
    return RunStatus(run="r", profile="p", state=RunState.RUNNING, supervisor=None, services=list(services))


def of_service(state: ServiceState, *, why: str | None = None, **changes: object) -> ServiceStatus:
    return ServiceStatus.model_validate(
        {"name": "a", "kind": "command", "state": state, "log": "a.log", "why": why, **changes}
    )


def changed(time: float, service: ServiceStatus) -> ServiceChanged:
    return ServiceChanged(number=1, time=time, service=service)


def usage(time: float, rss_bytes: int = 0) -> UsageSampled:
    return UsageSampled(number=1, time=time, cpu_percent={}, rss_bytes={"a": rss_bytes}, gpu_memory_bytes={}, gpus=[])


async def written(folder: Path, *events: Event) -> list[Snapshot | Event]:
    timeline = Timeline(folder, lambda: status_of(of_service(ServiceState.WAITING)))
    timeline.begin()
    for event in events:
        timeline.keep(event)
    await timeline.write()
    return recorded(folder)


async def test_an_event_of_which_only_the_seconds_differ_is_not_repeated(tmp_path: Path) -> None:
    waits = [changed(n, of_service(ServiceState.STARTING, why=f"starting for {n} s")) for n in range(5)]
    moves = changed(5, of_service(ServiceState.STARTING, why="starting for 5 s", phase="loading weights"))
    assert (await written(tmp_path, *waits, moves))[1:] == [waits[0], moves]


async def test_a_sample_is_kept_every_few_seconds_and_when_memory_moved_or_a_state_changed(tmp_path: Path) -> None:
    first, soon, moved, soon_again = usage(10), usage(11), usage(12, 1 << 30), usage(13, 1 << 30)
    crash, of_crash, late = changed(13, of_service(ServiceState.FAILED)), usage(13.1, 1 << 30), usage(20, 1 << 30)
    kept = await written(tmp_path, first, soon, moved, soon_again, crash, of_crash, usage(14, 1 << 30), late)
    assert kept[1:] == [first, moved, crash, of_crash, late]


async def test_lines_that_were_not_written_on_a_full_disk_are_replaced_by_a_snapshot(tmp_path: Path) -> None:
    now = of_service(ServiceState.WAITING)
    timeline = Timeline(tmp_path, lambda: status_of(now))
    timeline.begin()
    await timeline.write()
    (tmp_path / TIMELINE_FILE).rename(tmp_path / "aside")
    (tmp_path / TIMELINE_FILE).mkdir()  # like a full disk: nothing can be written there, even as root
    now = of_service(ServiceState.READY)
    timeline.keep(changed(1, now))
    await timeline.write()
    (tmp_path / TIMELINE_FILE).rmdir()
    (tmp_path / "aside").rename(tmp_path / TIMELINE_FILE)
    timeline.keep(usage(2))
    await timeline.write()
    before, after = recorded(tmp_path)
    assert isinstance(before, Snapshot)
    assert isinstance(after, Snapshot)
    assert [each.status.services[0].state for each in (before, after)] == [ServiceState.WAITING, ServiceState.READY]


async def test_a_deleted_timeline_begins_again_with_a_snapshot(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, lambda: status_of())
    timeline.begin()
    await timeline.write()
    (tmp_path / TIMELINE_FILE).unlink()
    for time in (10, 20):
        timeline.keep(usage(time))
        await timeline.write()
    assert any(isinstance(each, Snapshot) for each in recorded(tmp_path))


async def test_a_long_timeline_loses_older_samples_first_and_keeps_every_change(tmp_path: Path) -> None:
    flips = [changed(50 * n, of_service(ServiceState.READY if n % 2 else ServiceState.UNHEALTHY)) for n in range(20)]
    events = sorted([usage(n) for n in range(1, 1000)] + flips, key=lambda each: each.time)
    path = tmp_path / TIMELINE_FILE
    path.write_bytes(to_line(Snapshot(number=0, time=0, status=status_of())) + b"".join(map(to_line, events)))
    size = path.stat().st_size
    shorten(path, size * 7 // 10, size // 4)
    kept = recorded(tmp_path)
    assert path.stat().st_size <= size * 7 // 10
    assert [each for each in kept if isinstance(each, ServiceChanged)] == flips
    times = [each.time for each in kept if isinstance(each, UsageSampled)]
    assert times[-200:] == list(range(800, 1000))
    assert times[:200] == list(range(2, 401, 2)) or times[:200] == list(range(1, 400, 2))


async def test_a_timeline_of_changes_drops_the_oldest_and_starts_with_their_result(tmp_path: Path) -> None:
    flips = [changed(n, of_service(ServiceState.READY if n % 2 else ServiceState.UNHEALTHY)) for n in range(400)]
    path = tmp_path / TIMELINE_FILE
    said = Notice(number=1, time=3, severity="info", text="hello")
    over = RunChanged(number=1, time=4, state=RunState.DEGRADED)
    events = [Snapshot(number=0, time=0, status=status_of(flips[0].service)), said, over, *flips]
    path.write_bytes(b"".join(map(to_line, events)) + b'{"half a li')
    size = path.stat().st_size
    shorten(path, size // 2, size // 4)
    first, *rest = recorded(tmp_path)
    assert size // 3 < path.stat().st_size <= size // 2 + 1000
    assert rest == flips[-len(rest) :]
    assert isinstance(first, Snapshot)
    assert first.time == flips[-len(rest) - 1].time
    assert first.status == status_of(flips[-len(rest) - 1].service).model_copy(update={"state": RunState.DEGRADED})
