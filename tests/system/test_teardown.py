"""The sweep after a keeper: processes that are left, holders of ports, and foreign processes, which are not killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stage import HOLDER, Stage, free_ports, is_open, python, until

from grpo_tui.supervisor import teardown
from grpo_tui.supervisor.keeper import proc
from grpo_tui.supervisor.keeper.client import Keeper
from grpo_tui.supervisor.keeper.owners import mark_of
from grpo_tui.supervisor.keeper.ports import port_holders
from grpo_tui.supervisor.keeper.proc import Marker, ProcessId, descendants, identify
from grpo_tui.supervisor.teardown import SweepReport, sweep
from grpo_tui.supervisor.usage.cpu_memory import UsageReader


class PortHolder:
    """A process on a port that no keeper started."""

    def __init__(self, stage: Stage, *arguments: str, program: str = HOLDER, **marks: str) -> None:
        [self.port] = free_ports(1)
        environment = {**os.environ, **marks}
        self.process = subprocess.Popen(
            python(program, self.port, stage.token, *arguments), env=environment, start_new_session=True
        )

    async def __aenter__(self) -> PortHolder:
        try:
            await until(lambda: is_open(self.port))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def is_running(self) -> bool:
        return self.process.poll() is None


def marks_of(run: str, folder: Path) -> dict[str, str]:
    """The environment of the service `vllm` of a run."""
    return {"GRPO_TUI_RUN": run, "GRPO_TUI_SERVICE": "vllm", "GRPO_TUI_RUN_FOLDER": str(folder)}


STALE = marks_of("tiny-cpu-1121-0415", Path("/no/more"))


@contextmanager
def supervisor_of(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a run's lock as its supervisor does."""
    program = """
import signal, sys
from pathlib import Path
from grpo_tui.supervisor.lock import take_lock
assert take_lock(Path(sys.argv[1])) is not None
print("locked", flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


async def swept(stage: Stage, *ports: int, service: str | None = "a", **more: object) -> tuple[SweepReport, list[str]]:
    """A sweep and what it reported."""
    lines: list[str] = []
    report = await sweep(stage.run, service, ports=ports, report=lines.append, **more)  # type: ignore[arg-type]
    return report, lines


async def kill_keeper(keeper: Keeper) -> None:
    os.kill(keeper.identity.pid, signal.SIGKILL)
    report = await keeper.exited()
    assert (report.code, report.keeper_lost) == (None, True)
    assert report.error == "its keeper was killed: how it ended is unknown"


@pytest.mark.slow
async def test_processes_of_a_killed_keeper_are_found_by_the_marker_and_below_marked_parents(stage: Stage) -> None:
    keeper = await stage.start_family(4)
    await kill_keeper(keeper)
    assert all(map(is_open, stage.ports))
    report, lines = await swept(stage, *stage.ports)
    assert len(report.ended) == 5
    assert (report.unkillable, report.foreign) == ((), ())
    assert not any(map(is_open, stage.ports))
    assert re.match(r"a: ended its remaining processes in \d+\.\d", lines[0])


@pytest.mark.slow
async def test_an_orphan_without_parent_and_marker_is_found_through_the_ledger(stage: Stage) -> None:
    keeper = await stage.start_family(5)
    usage = UsageReader().sample({"a": keeper.identity.pid})["a"]
    assert usage.cpu_percent is None
    assert len(usage.processes) == 6
    assert usage.rss_bytes > 6 * 4e6
    await kill_keeper(keeper)
    report, _ = await swept(stage, ledger=usage.processes)
    assert len(report.ended) == 6
    assert not any(map(is_open, stage.ports))


async def test_a_sweep_after_a_keeper_that_ended_its_service_finds_and_reports_nothing(stage: Stage) -> None:
    keeper = await stage.start("true")
    await keeper.exited()
    report, lines = await swept(stage)
    assert (report.ended, lines) == ((), [])


async def test_another_service_of_the_same_run_is_not_killed(stage: Stage) -> None:
    [port] = free_ports(1)
    other = await stage.start(*python(HOLDER, port, stage.token), name="b")
    await until(lambda: is_open(port))
    report, lines = await swept(stage, port)
    assert other.identity.is_alive()
    assert is_open(port)
    assert [holder.port for holder in report.foreign] == [port]
    assert f"port {port} is held by pid {other.main_pid}" in lines[0]
    assert lines[0].endswith("it is left alone")
    other.kill()
    await other.exited()


async def test_a_sweep_of_the_whole_run_ends_every_service(stage: Stage) -> None:
    [port] = free_ports(1)
    other = await stage.start(*python(HOLDER, port, stage.token), name="b")
    report, _ = await swept(stage, service=None)
    assert len(report.ended) == 2  # its keeper too
    await other.exited()


async def test_a_foreign_process_on_the_port_is_named_and_killed_only_with_take_ports(stage: Stage) -> None:
    async with PortHolder(stage) as holder:
        [found] = port_holders([holder.port])
        assert found.words().startswith(f"port {holder.port} is held by pid {holder.process.pid} (user ")
        assert stage.token in found.words()
        report, lines = await swept(stage, holder.port)
        assert holder.is_running()
        assert report.foreign == (found,)
        assert lines == [f"{found.words()}; it is left alone"]
        report, lines = await swept(stage, holder.port, take_ports=True)
        assert holder.process.wait() == -signal.SIGKILL
        assert [each.split()[1] for each in report.ended] == [str(holder.process.pid)]
        assert report.foreign == ()
        assert lines[0].endswith("it is ended")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
async def test_a_process_of_another_user_is_never_killed(stage: Stage) -> None:
    program = "import os, signal, socket; os.setuid(65534)\n" + HOLDER
    async with PortHolder(stage, program=program, GRPO_TUI_RUN=stage.run, GRPO_TUI_SERVICE="a") as holder:
        report, lines = await swept(stage, holder.port, take_ports=True)
        assert holder.is_running()
        [found] = report.foreign
        assert lines[0].endswith("; another user's process is never ended")
        assert "(user nobody)" in found.words() or "(user 65534)" in found.words()


async def test_a_stale_process_is_named_and_killed(stage: Stage) -> None:
    async with PortHolder(stage, **STALE) as holder:
        report, lines = await swept(stage, holder.port)
        assert holder.process.wait() == -signal.SIGKILL
        assert len(report.ended) == 1
        assert f"pid {holder.process.pid}, left by run tiny-cpu-1121-0415 of this project: " in lines[0]


async def test_a_process_with_a_run_name_but_no_run_folder_is_foreign(stage: Stage) -> None:
    async with PortHolder(stage, GRPO_TUI_RUN="by-hand") as holder:  # names its shared memory, without a folder
        report, lines = await swept(stage, holder.port)
        assert holder.is_running()
        assert report.ended == ()
        assert lines[0].startswith(f"port {holder.port} is held by pid {holder.process.pid} (user ")
        assert lines[0].endswith("; it is left alone")


@pytest.mark.parametrize("meanwhile", ["nothing", "the clock jumps", "the folder is removed"])
async def test_another_run_keeps_its_port_while_it_is_supervised(stage: Stage, meanwhile: str) -> None:
    folder = stage.folder / "other"
    folder.mkdir()
    async with PortHolder(stage, **marks_of("other", folder)) as holder:
        with supervisor_of(folder) as supervisor:
            if meanwhile == "the clock jumps":  # forward by an hour after the start was recorded
                process = {"pid": supervisor.pid, "started_at": time.time() - 3600}
                state = {"run": "other", "profile": "p", "state": "running", "supervisor": process, "services": []}
                (folder / "state.json").write_text(json.dumps(state))
            elif meanwhile == "the folder is removed":
                shutil.rmtree(folder)
            report, lines = await swept(stage, holder.port, take_ports=True)
            assert holder.is_running()
            assert len(report.foreign) == 1
            assert "service vllm of run other, which is still supervised (`grpo-tui down other` ends it)" in lines[0]
        await swept(stage, holder.port)
        assert holder.process.wait() == -signal.SIGKILL


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_run_whose_lock_cannot_be_opened_is_of_another_user_and_not_stale() -> None:
    asking = (
        "import os, sys; from pathlib import Path; from grpo_tui.supervisor.keeper.owners import is_supervised\n"
        + ("os.setuid(65534); print(*(is_supervised(Path(folder)) for folder in sys.argv[1:]))")
    )
    with tempfile.TemporaryDirectory() as above:  # other users cannot enter pytest's folders
        os.chmod(above, 0o755)
        sealed, locked, bare = (Path(above) / name for name in ("sealed", "locked", "bare"))
        for folder in (sealed, locked, bare):
            folder.mkdir()
        for folder in (sealed, locked):
            (folder / "daemon.lock").touch(mode=0o600)
        sealed.chmod(0o700)
        argv = [sys.executable, "-c", asking, sealed, locked, bare]
        assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "True True False\n"


async def test_a_process_with_an_empty_environment_belongs_to_the_run_of_its_marked_parent(
    stage: Stage,
) -> None:
    program = """
import subprocess, sys
port, token, holder = sys.argv[1:]
subprocess.run([sys.executable, "-I", "-S", "-c", holder, port, token], env={})
"""
    async with PortHolder(stage, HOLDER, program=program, **STALE) as holder:
        [child] = descendants(holder.process.pid)
        assert mark_of(child.pid) == Marker(run="tiny-cpu-1121-0415", service="vllm", run_folder="/no/more")
        report, _ = await swept(stage, holder.port)
        assert [words.split()[1] for words in report.ended] == [str(child.pid)]


async def test_a_ledger_entry_whose_pid_was_reused_is_not_killed(stage: Stage) -> None:
    async with PortHolder(stage) as foreign:
        now = identify(foreign.process.pid)
        assert now is not None
        report, _ = await swept(stage, ledger=[ProcessId(now.pid, now.start_ticks - 1)])
        assert foreign.is_running()
        assert report.ended == ()


async def test_a_process_that_survives_sigkill_is_named_and_not_awaited(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with PortHolder(stage, GRPO_TUI_RUN=stage.run, GRPO_TUI_SERVICE="a") as stuck:
        with monkeypatch.context() as patched:  # as one that hangs in a driver
            patched.setattr("grpo_tui.supervisor.keeper.proc.send_signal", lambda *_: None)
            patched.setattr("grpo_tui.supervisor.teardown.UNKILLABLE_AFTER_S", 0.0)
            report, lines = await swept(stage)
        assert report.ended == ()
        assert [words.split()[1] for words in report.unkillable] == [str(stuck.process.pid)]
        assert lines[0].endswith("still alive after SIGKILL: it hangs in the kernel, often in a driver")


@pytest.mark.slow
async def test_a_sweep_does_not_kill_its_own_process(stage: Stage) -> None:
    program = "import asyncio, os; from grpo_tui.supervisor.teardown import sweep\n" + (
        "print(asyncio.run(sweep(os.environ['GRPO_TUI_RUN'], None, ports=[], report=print)).ended)"
    )
    environment = {**os.environ, "GRPO_TUI_RUN": stage.run}
    argv = (sys.executable, "-c", program)
    sweeper = await asyncio.create_subprocess_exec(*argv, env=environment, stdout=subprocess.PIPE)
    output, _ = await sweeper.communicate()
    assert (sweeper.returncode, output) == (0, b"()\n")


async def test_only_shared_memory_of_the_run_is_removed_at_its_end(stage: Stage) -> None:
    ours, sibling = (Path(f"/dev/shm/grpo-{run}-rank0") for run in (stage.run, f"x{stage.run}"))
    semaphore = Path(f"/dev/shm/sem.grpo-{stage.run}-mp-0a1b2c3d")
    folder = Path(f"/dev/shm/grpo-{stage.run}-adapters")
    try:
        for path in (ours, semaphore, sibling):
            path.write_bytes(b"weights")
        os.mkdir(folder)
        (folder / "v1").touch()
        await swept(stage)
        assert ours.exists()
        report, lines = await swept(stage, service=None)
        assert sorted(report.removed) == sorted(map(str, (ours, folder, semaphore)))
        assert not ours.exists()
        assert folder.name not in os.listdir("/dev/shm")
        assert sibling.exists()
        assert lines[0].startswith(f"run {stage.run}: removed from shared memory: /dev/shm/")
    finally:
        sibling.unlink()
        for path in (ours, semaphore):
            path.unlink(missing_ok=True)


def test_shared_memory_of_a_live_run_whose_longer_name_begins_with_this_one_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teardown, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(teardown, "registered_folders", lambda: {tmp_path / "logs" / "zz-1123-041503-7f3a"})
    for name in ("grpo-zz-rank0", "grpo-zz-1123-041503-7f3a-rank0"):
        (tmp_path / name).touch()
    assert teardown.remove_shared_memory("zz", frozenset()) == [str(tmp_path / "grpo-zz-rank0")]
    assert [path.name for path in tmp_path.iterdir()] == ["grpo-zz-1123-041503-7f3a-rank0"]


def test_processes_of_a_run_with_this_id_in_another_folder_are_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here" / "a", tmp_path / "there" / "a"
    there.mkdir(parents=True)
    stats = [proc.read_stat(1)]
    monkeypatch.setattr(proc, "living", lambda: stats)
    monkeypatch.setattr(proc, "ourselves", set)
    monkeypatch.setattr(proc, "marker", lambda pid: proc.Marker(run="a", service=None, run_folder=str(there)))
    assert proc.processes_of_run("a", run_folder=here) == []
    assert proc.processes_of_run("a", run_folder=there) == stats
    assert proc.processes_of_run("a") == stats
    there.rmdir()  # it was moved here
    assert proc.processes_of_run("a", run_folder=here) == stats


@pytest.mark.parametrize(
    ("limit_s", "readings", "line"),
    [
        (1e9, [66_000_000_000, 0], r"a: 66\.0 GB of GPU memory free again after \d+\..*"),
        (
            0.0,
            [16_060_000_000],
            r"a: 16\.1 GB of GPU memory still held after 0\.00 s: another process may map it",
        ),
        (1e9, [None], None),
    ],
    ids=["freed", "still held", "unknown"],
)
async def test_a_sweep_waits_until_the_driver_has_freed_the_memory(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, limit_s: float, readings: list[int | None], line: str | None
) -> None:
    monkeypatch.setattr("grpo_tui.supervisor.teardown.GPU_LIMIT_S", limit_s)
    following = iter(readings)

    async def gpu_memory() -> int | None:
        return next(following, readings[-1])

    report, lines = await swept(stage, gpu_memory=gpu_memory)
    assert report.gpu_memory_bytes == readings[-1]
    assert len(lines) == (line is not None)
    assert line is None or re.match(line, lines[0])


@pytest.mark.slow
async def test_usage_is_the_cpu_of_all_processes_below_the_keeper_in_percent_of_a_core(stage: Stage) -> None:
    burning = """
import os, signal, sys
print("up", flush=True)
open(sys.argv[1]).read()
while os.times().user < 0.3: pass
print("done", flush=True)
signal.pause()
"""
    gate = stage.folder / "gate"
    os.mkfifo(gate)
    keeper = await stage.start("sh", "-c", '"$@"; exit', "sh", *python(burning, gate, stage.token))
    reader = UsageReader()
    await stage.says("up")
    reader.sample({"a": keeper.identity.pid}, now=100.0)
    gate.write_text("go")  # from here on it burns
    await stage.says("done")
    usage = reader.sample({"a": keeper.identity.pid}, now=101.0)["a"]
    assert usage.cpu_percent is not None
    assert usage.cpu_percent > 15.0
    keeper.kill()
    await keeper.exited()
    assert reader.sample({"a": keeper.identity.pid}, now=102.0)["a"].rss_bytes == 0


async def test_the_process_on_an_ipv6_port_is_found(stage: Stage) -> None:
    [port] = free_ports(1)
    program = HOLDER.replace("socket.socket()", "socket.socket(socket.AF_INET6)").replace("127.0.0.1", "::1")
    keeper = await stage.start(*python(program, port, stage.token))
    await until(lambda: bool(port_holders([port])))
    assert [holder.owner.process and holder.owner.process.pid for holder in port_holders([port])] == [keeper.main_pid]
    assert [each.pid for each in descendants(keeper.identity.pid)] == [keeper.main_pid]
    keeper.kill()
    await keeper.exited()


def ended_process() -> ProcessId:
    """The id of a process that has exited."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        known = identify(process.pid)
    assert known is not None
    return known


async def test_shared_memory_that_drivers_made_for_an_exited_process_is_removed(stage: Stage) -> None:
    dead = ended_process()
    folder = Path("/dev/shm")
    left = [
        folder / f"cuda.shm.0.{dead.pid:x}.1",
        folder / f"torch_{dead.pid}_2613122617_0",
        folder / f"psm_{dead.pid}_0a1b2c3d",
        folder / f"grpo-{stage.run}-psm_{dead.pid}_0a1b2c3d",
    ]
    kept = [
        folder / f"cuda.shm.0.{os.getpid():x}.1",
        folder / f"torch_{os.getpid()}_1_0",
        folder / "psm_0a1b2c3d",
        folder / f"grpo-{stage.run}-psm_{os.getpid()}_0a1b2c3d",
        folder / f"grpo-x{stage.run}-psm_{dead.pid}_0a1b2c3d",  # of a run elsewhere, which counts other processes
    ]
    try:
        for path in (*left, *kept):
            path.touch()
        report, _ = await swept(stage, ledger=[dead])
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in kept)
        assert set(report.removed) == {str(path) for path in left}
    finally:
        for path in (*left, *kept):
            path.unlink(missing_ok=True)
