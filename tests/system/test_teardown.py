"""The second net: what a lost keeper leaves, who holds a port, and strangers who are left alone."""

from __future__ import annotations

import asyncio
import json
import os
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
from stage import HOLDER, Stage, free_ports, is_open, open_stage, python, until

from grpo_tui.supervisor.keeper.client import Keeper
from grpo_tui.supervisor.keeper.owners import mark_of
from grpo_tui.supervisor.keeper.ports import port_holders
from grpo_tui.supervisor.keeper.proc import Marker, ProcessId, descendants, identify
from grpo_tui.supervisor.teardown import SweepReport, sweep
from grpo_tui.supervisor.usage.cpu_memory import UsageReader


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as opened:
        yield opened


class Squatter:
    """A holder of a port that no keeper started."""

    def __init__(self, stage: Stage, *arguments: str, program: str = HOLDER, **marks: str) -> None:
        [self.port] = free_ports(1)
        environment = {**os.environ, **marks}
        self.process = subprocess.Popen(
            python(program, self.port, stage.token, *arguments), env=environment, start_new_session=True
        )

    async def __aenter__(self) -> Squatter:
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


def marks_of_another_run(stage: Stage) -> dict[str, str]:
    """The environment of a service of run `other`, whose run folder is the stage's."""
    return {"GRPO_TUI_RUN": "other", "GRPO_TUI_SERVICE": "vllm", "GRPO_TUI_RUN_FOLDER": str(stage.folder)}


@contextmanager
def daemon_of(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a run's lock as its daemon does."""
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


async def lose_keeper(keeper: Keeper) -> None:
    os.kill(keeper.identity.pid, signal.SIGKILL)
    report = await keeper.exited()
    assert (report.code, report.keeper_lost, report.error) == (
        None,
        True,
        "its keeper was killed: how it ended is unknown",
    )


@pytest.mark.slow
async def test_what_a_killed_keeper_leaves_is_found_by_the_marker_and_below_marked_parents(stage: Stage) -> None:
    keeper = await stage.start_family(4)
    await lose_keeper(keeper)
    assert all(map(is_open, stage.ports))
    report, lines = await swept(stage, *stage.ports)
    assert len(report.ended) == 5
    assert (report.unkillable, report.foreign) == ((), ())
    assert not any(map(is_open, stage.ports))
    assert lines[0].startswith("a: ended its remaining processes in 0.")


@pytest.mark.slow
async def test_an_orphan_without_parent_and_marker_is_found_through_the_ledger(stage: Stage) -> None:
    keeper = await stage.start_family(5)
    usage = UsageReader().sample({"a": keeper.identity.pid})["a"]
    assert usage.cpu_percent is None
    assert len(usage.processes) == 6
    assert usage.rss_bytes > 6 * 4e6
    await lose_keeper(keeper)
    report, _ = await swept(stage, ledger=usage.processes)
    assert len(report.ended) == 6
    assert not any(map(is_open, stage.ports))


async def test_a_sweep_after_a_keeper_that_did_its_work_finds_nothing_and_says_nothing(stage: Stage) -> None:
    keeper = await stage.start("true")
    await keeper.exited()
    report, lines = await swept(stage)
    assert (report.ended, lines) == ((), [])


async def test_another_service_of_the_same_run_is_not_touched(stage: Stage) -> None:
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


async def test_the_end_of_a_run_takes_every_service_of_it(stage: Stage) -> None:
    [port] = free_ports(1)
    other = await stage.start(*python(HOLDER, port, stage.token), name="b")
    report, _ = await swept(stage, service=None)
    assert len(report.ended) == 2  # its keeper too
    await other.exited()


async def test_a_stranger_on_the_port_is_named_and_left_alone(stage: Stage) -> None:
    async with Squatter(stage) as squatter:
        [holder] = port_holders([squatter.port])
        start = f"port {squatter.port} is held by pid {squatter.process.pid} (user "
        assert holder.words().startswith(start)
        assert stage.token in holder.words()
        report, lines = await swept(stage, squatter.port)
        assert squatter.is_running()
        assert report.foreign == (holder,)
        assert lines == [f"{holder.words()}; it is left alone"]


async def test_a_stranger_is_ended_on_explicit_word(stage: Stage) -> None:
    async with Squatter(stage) as squatter:
        report, lines = await swept(stage, squatter.port, take_ports=True)
        assert squatter.process.wait() == -signal.SIGKILL
        assert [words.split()[1] for words in report.ended] == [str(squatter.process.pid)]
        assert report.foreign == ()
        assert lines[0].endswith("it is ended")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
async def test_another_users_process_is_never_ended(stage: Stage) -> None:
    program = "import os, signal, socket; os.setuid(65534)\n" + HOLDER
    async with Squatter(stage, program=program, GRPO_TUI_RUN=stage.run, GRPO_TUI_SERVICE="a") as squatter:
        report, lines = await swept(stage, squatter.port, take_ports=True)
        assert squatter.is_running()
        [holder] = report.foreign
        assert lines[0].endswith("; another user's process is never ended")
        assert "(user nobody)" in holder.words() or "(user 65534)" in holder.words()


async def test_what_an_earlier_run_of_ours_left_is_named_and_ended(stage: Stage) -> None:
    marks = {"GRPO_TUI_RUN": "tiny-cpu-1121-0415", "GRPO_TUI_SERVICE": "vllm", "GRPO_TUI_RUN_FOLDER": "/no/more"}
    async with Squatter(stage, **marks) as squatter:
        report, lines = await swept(stage, squatter.port)
        assert squatter.process.wait() == -signal.SIGKILL
        assert len(report.ended) == 1
        assert f"pid {squatter.process.pid}, left by run tiny-cpu-1121-0415 of this project: " in lines[0]


async def test_what_was_started_by_hand_under_the_name_of_a_run_is_a_stranger(stage: Stage) -> None:
    async with Squatter(stage, GRPO_TUI_RUN="by-hand") as squatter:  # names its shared memory, and says of no folder
        report, lines = await swept(stage, squatter.port)
        assert squatter.is_running()
        assert report.ended == ()
        assert lines[0].startswith(f"port {squatter.port} is held by pid {squatter.process.pid} (user ")
        assert lines[0].endswith("; it is left alone")


async def test_another_run_that_is_still_supervised_keeps_its_port(stage: Stage) -> None:
    async with Squatter(stage, **marks_of_another_run(stage)) as squatter:
        with daemon_of(stage.folder) as daemon:
            report, lines = await swept(stage, squatter.port, take_ports=True)
            assert squatter.is_running()
            assert len(report.foreign) == 1
            assert "service vllm of run other, which is still supervised (`grpo-tui down other` ends it)" in lines[0]
            daemon.kill()
            daemon.wait()
            await swept(stage, squatter.port)
            assert squatter.process.wait() == -signal.SIGKILL


async def test_a_jump_of_the_clock_makes_no_orphan_of_a_run_that_lives(stage: Stage) -> None:
    """A run that wrote its start down before the clock was set forward by an hour seems to be older than itself."""
    async with Squatter(stage, **marks_of_another_run(stage)) as squatter:
        with daemon_of(stage.folder) as daemon:
            supervisor = {"pid": daemon.pid, "started_at": time.time() - 3600}
            state = {"run": "other", "profile": "p", "state": "running", "supervisor": supervisor, "services": []}
            (stage.folder / "state.json").write_text(json.dumps(state))
            await swept(stage, squatter.port)
            assert squatter.is_running()


async def test_a_run_whose_folder_was_removed_under_its_living_daemon_is_no_orphan(stage: Stage) -> None:
    folder = stage.folder / "removed"
    folder.mkdir()
    marks = marks_of_another_run(stage) | {"GRPO_TUI_RUN_FOLDER": str(folder)}
    async with Squatter(stage, **marks) as squatter:
        with daemon_of(folder) as daemon:
            shutil.rmtree(folder)
            await swept(stage, squatter.port)
            assert squatter.is_running()
            daemon.kill()
            daemon.wait()
            await swept(stage, squatter.port)
            assert squatter.process.wait() == -signal.SIGKILL


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_run_whose_lock_we_may_not_try_is_another_users_and_no_orphan() -> None:
    asking = (
        "import os, sys; from pathlib import Path; from grpo_tui.supervisor.keeper.owners import is_supervised\n"
        + ("os.setuid(65534); print(*(is_supervised(Path(folder)) for folder in sys.argv[1:]))")
    )
    with tempfile.TemporaryDirectory() as above:  # pytest's own folders let nobody else in
        os.chmod(above, 0o755)
        sealed, locked, bare = (Path(above) / name for name in ("sealed", "locked", "bare"))
        for folder in (sealed, locked, bare):
            folder.mkdir()
        for folder in (sealed, locked):
            (folder / "daemon.lock").touch(mode=0o600)
        sealed.chmod(0o700)
        argv = [sys.executable, "-c", asking, sealed, locked, bare]
        assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "True True False\n"


async def test_a_cleaned_environment_does_not_hide_whose_a_process_is_while_its_marked_parent_lives(
    stage: Stage,
) -> None:
    program = """
import subprocess, sys
port, token, holder = sys.argv[1:]
subprocess.run([sys.executable, "-I", "-S", "-c", holder, port, token], env={})
"""
    marks = {"GRPO_TUI_RUN": "tiny-cpu-1121-0415", "GRPO_TUI_SERVICE": "vllm", "GRPO_TUI_RUN_FOLDER": "/no/more"}
    async with Squatter(stage, HOLDER, program=program, **marks) as squatter:
        [child] = descendants(squatter.process.pid)
        assert mark_of(child.pid) == Marker(run="tiny-cpu-1121-0415", service="vllm", run_folder="/no/more")
        report, _ = await swept(stage, squatter.port)
        assert [words.split()[1] for words in report.ended] == [str(child.pid)]


async def test_a_ledger_entry_whose_pid_was_used_again_is_left_alone(stage: Stage) -> None:
    async with Squatter(stage) as stranger:
        now = identify(stranger.process.pid)
        assert now is not None
        report, _ = await swept(stage, ledger=[ProcessId(now.pid, now.start_ticks - 1)])
        assert stranger.is_running()
        assert report.ended == ()


async def test_what_does_not_end_after_sigkill_is_named_and_not_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Squatter(stage, GRPO_TUI_RUN=stage.run, GRPO_TUI_SERVICE="a") as stuck:
        with monkeypatch.context() as patched:  # as deaf to SIGKILL as one that hangs in a driver
            patched.setattr("grpo_tui.supervisor.keeper.proc.send_signal", lambda *_: None)
            patched.setattr("grpo_tui.supervisor.teardown.UNKILLABLE_AFTER_S", 0.0)
            report, lines = await swept(stage)
        assert report.ended == ()
        assert [words.split()[1] for words in report.unkillable] == [str(stuck.process.pid)]
        assert lines[0].endswith("still alive after SIGKILL: it hangs in the kernel, often in a driver")


@pytest.mark.slow
async def test_a_sweep_does_not_end_whoever_sweeps(stage: Stage) -> None:
    program = "import asyncio, os; from grpo_tui.supervisor.teardown import sweep\n" + (
        "print(asyncio.run(sweep(os.environ['GRPO_TUI_RUN'], None, ports=[], report=print)).ended)"
    )
    sweeper = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        env={**os.environ, "GRPO_TUI_RUN": stage.run},
        stdout=subprocess.PIPE,
    )
    output, _ = await sweeper.communicate()
    assert (sweeper.returncode, output) == (0, b"()\n")


async def test_shared_memory_of_the_run_is_removed_at_its_end_and_no_other(stage: Stage) -> None:
    ours, sibling = (Path(f"/dev/shm/grpo-{run}-rank0") for run in (stage.run, f"x{stage.run}"))
    folder = Path(f"/dev/shm/grpo-{stage.run}-adapters")
    try:
        ours.write_bytes(b"weights")
        sibling.write_bytes(b"weights")
        os.mkdir(folder)
        (folder / "v1").touch()
        await swept(stage)
        assert ours.exists()
        report, lines = await swept(stage, service=None)
        assert sorted(report.removed) == sorted([str(ours), str(folder)])
        assert not ours.exists()
        assert folder.name not in os.listdir("/dev/shm")
        assert sibling.exists()
        assert lines[0].startswith(f"run {stage.run}: removed from shared memory: /dev/shm/grpo-")
    finally:
        sibling.unlink()
        ours.unlink(missing_ok=True)


async def test_the_sweep_waits_until_the_driver_has_taken_back_the_memory(stage: Stage) -> None:
    figures = iter([66_000_000_000, 0])

    async def gpu_memory() -> int | None:
        return next(figures)

    report, lines = await swept(stage, gpu_memory=gpu_memory)
    assert report.gpu_memory_bytes == 0
    assert lines[0].startswith("a: 66.0 GB of GPU memory free again after 0.")


async def test_unknown_gpu_memory_is_not_waited_for(stage: Stage) -> None:
    async def gpu_memory() -> int | None:
        return None

    report, lines = await swept(stage, gpu_memory=gpu_memory)
    assert (report.gpu_memory_bytes, lines) == (None, [])


async def test_gpu_memory_that_stays_is_told_when_the_limit_is_over(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gpu_memory() -> int | None:
        return 16_060_000_000

    monkeypatch.setattr("grpo_tui.supervisor.teardown.GPU_LIMIT_S", 0.0)
    report, lines = await swept(stage, gpu_memory=gpu_memory)
    assert report.gpu_memory_bytes == 16_060_000_000
    assert lines == ["a: 16.1 GB of GPU memory still held after 0.00 s: another process may map it"]


@pytest.mark.slow
async def test_usage_counts_the_cpu_of_all_below_the_keeper_in_percent_of_a_core(stage: Stage) -> None:
    burning = """
import os, signal
print("up", flush=True)
while os.times().user < 0.3: pass
print("done", flush=True)
signal.pause()
"""
    keeper = await stage.start("sh", "-c", '"$@"; exit', "sh", *python(burning, stage.token))
    reader = UsageReader()
    await stage.says("up")
    reader.sample({"a": keeper.identity.pid}, now=100.0)
    await stage.says("done")
    usage = reader.sample({"a": keeper.identity.pid}, now=101.0)["a"]
    assert usage.cpu_percent is not None
    assert usage.cpu_percent > 15.0
    keeper.kill()
    await keeper.exited()
    assert reader.sample({"a": keeper.identity.pid}, now=102.0)["a"].rss_bytes == 0


async def test_a_port_on_ipv6_is_found_too(stage: Stage) -> None:
    [port] = free_ports(1)
    program = HOLDER.replace("socket.socket()", "socket.socket(socket.AF_INET6)").replace("127.0.0.1", "::1")
    keeper = await stage.start(*python(program, port, stage.token))
    await until(lambda: bool(port_holders([port])))
    assert [holder.owner.process and holder.owner.process.pid for holder in port_holders([port])] == [keeper.main_pid]
    assert [each.pid for each in descendants(keeper.identity.pid)] == [keeper.main_pid]
    keeper.kill()
    await keeper.exited()


def ended_process() -> ProcessId:
    """A process of ours that was there and is gone."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        known = identify(process.pid)
    assert known is not None
    return known


async def test_what_drivers_leave_in_shared_memory_goes_with_the_process_that_left_it(stage: Stage) -> None:
    dead = ended_process()
    folder = Path("/dev/shm")
    left = [folder / f"cuda.shm.0.{dead.pid:x}.1", folder / f"torch_{dead.pid}_2613122617_0"]
    kept = [folder / f"cuda.shm.0.{os.getpid():x}.1", folder / f"torch_{os.getpid()}_1_0"]
    try:
        for path in (*left, *kept):
            path.touch()
        report, _ = await swept(stage, service=None, ledger=[dead])
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in kept)
        assert set(report.removed) == {str(path) for path in left}
    finally:
        for path in (*left, *kept):
            path.unlink(missing_ok=True)
