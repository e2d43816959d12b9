"""Keepers of real processes: stop, kill, exit codes, logs and state files."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from stage import HOLDER, Stage, free_ports, is_open, python, until
from workplace import IGNORES_SIGTERM

from grpo_engine.errors import GrpoError
from grpo_tui.keeper_process import read_stat
from grpo_tui.supervisor.keeper import client
from grpo_tui.supervisor.keeper.client import ExitReport, Keeper, adopt_keeper, start_keeper
from grpo_tui.supervisor.keeper.proc import descendants, identify

EXITS_WITH_5 = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("up", flush=True)
while True: signal.pause()
"""
SUPERVISOR = """
import asyncio, os, pickle, signal, sys
from pathlib import Path
from grpo_tui.supervisor.keeper.client import start_keeper
async def main():
    for launch in pickle.loads(sys.stdin.buffer.read()):
        await start_keeper(launch, run="earlier", attempt=1, run_folder=Path(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
"""Starts services and is killed."""


async def up(stage: Stage, program: str, **changes: object) -> Keeper:
    """Start a program as service `a` and wait for its line `up`."""
    keeper = await stage.start(*python(program, stage.token), **changes)  # type: ignore[arg-type]
    await stage.says("up")
    return keeper


@pytest.mark.parametrize("is_suspended", [False, True])
async def test_a_service_that_handles_the_stop_signal_keeps_its_exit_code(stage: Stage, is_suspended: bool) -> None:
    keeper = await up(stage, EXITS_WITH_5, stop_grace_s=3600)
    if is_suspended:
        assert keeper.main_pid is not None
        os.kill(keeper.main_pid, signal.SIGSTOP)
    keeper.stop()
    report = await keeper.exited()
    assert (report.code, report.ended, report.error, report.keeper_lost) == (5, (), None, False)


@pytest.mark.slow
async def test_a_stop_escalates_to_kill_after_the_grace_period(stage: Stage) -> None:
    keeper = await up(stage, IGNORES_SIGTERM, stop_grace_s=0.2)
    keeper.stop()
    report = await keeper.exited()
    assert report.code == -signal.SIGKILL
    assert [each.split()[-1] for each in report.ended] == ["SIGKILL"]


@pytest.mark.parametrize("is_stopping", [False, True])
async def test_a_kill_does_not_wait_for_the_grace_period(stage: Stage, is_stopping: bool) -> None:
    keeper = await up(stage, IGNORES_SIGTERM, stop_grace_s=3600)
    if is_stopping:
        keeper.stop()
    keeper.kill()
    assert (await keeper.exited()).code == -signal.SIGKILL


@pytest.mark.slow
async def test_a_stop_ends_children_that_ignore_signals_in_own_groups_sessions_and_environments(
    stage: Stage,
) -> None:
    keeper = await stage.start_family(5, stop_grace_s=0.3)
    family = descendants(keeper.identity.pid)
    assert len(family) == 6
    assert len({each.session for each in family}) == 4
    keeper.stop()
    report = await keeper.exited()
    assert report.code == -signal.SIGTERM
    assert sum("by SIGKILL" in each for each in report.ended) == 5
    assert not stage.survivors()
    assert not any(map(is_open, stage.ports))


@pytest.mark.slow
async def test_when_the_main_process_is_killed_its_workers_are_ended_too(stage: Stage) -> None:
    keeper = await stage.start_family(3, stop_grace_s=3600)
    assert keeper.main_pid is not None
    os.kill(keeper.main_pid, signal.SIGKILL)
    report = await keeper.exited()
    assert report.code == -signal.SIGKILL
    assert len(report.ended) == 3
    assert not any(map(is_open, stage.ports))


@pytest.mark.slow
async def test_an_engine_on_a_gpu_whose_server_was_killed_ends_its_workers_itself(stage: Stage) -> None:
    engine = """
import os, signal, sys, time
def stop(*_):
    time.sleep(0.3)  # its step ends, after more time than leftovers get without a GPU
    os.kill(worker, signal.SIGUSR1)
    open(sys.argv[1], "w").write(str(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])))
    sys.exit()
signal.signal(signal.SIGTERM, stop)
is_up, tells = os.pipe()
worker = os.fork()
if not worker:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
    os.close(tells)
else:
    os.close(tells)
    os.read(is_up, 1)
    print("up", flush=True)
while True: signal.pause()
"""
    ended = stage.folder / "ended"
    keeper = await stage.start("sh", "-c", '"$@" & wait', "sh", *python(engine, ended, stage.token), gpus=(0,))
    await stage.says("up")
    assert keeper.main_pid is not None
    os.kill(keeper.main_pid, signal.SIGKILL)
    report = await keeper.exited()
    assert ended.read_text() == "7"
    assert len(report.ended) == 1


@pytest.mark.slow
async def test_the_process_group_has_the_whole_grace_period_when_its_shell_exits_at_once(
    stage: Stage,
) -> None:
    saving = """
import signal, sys, time
def save(*_):
    time.sleep(0.5)  # longer than leftovers get
    open(sys.argv[1], "w").write("saved"); sys.exit()
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
while True: signal.pause()
"""
    saved = stage.folder / "checkpoint"
    shell = 'trap - TERM; "$@" & wait'
    keeper = await stage.start("sh", "-c", shell, "sh", *python(saving, saved, stage.token), stop_grace_s=15.0)
    await stage.says("up")
    keeper.stop()
    report = await keeper.exited()
    assert saved.read_text() == "saved"
    assert report.ended == ()


@pytest.mark.slow
async def test_two_hundred_short_lived_orphans_are_all_reaped(stage: Stage) -> None:
    orphans = """
import os
for _ in range(200):
    child = os.fork()
    if child == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.waitpid(child, 0)
print("up", flush=True)
input_end, _ = os.pipe()
os.read(input_end, 1)
"""
    keeper = await up(stage, orphans)
    await until(lambda: [each.pid for each in descendants(keeper.identity.pid)] == [keeper.main_pid])
    keeper.stop()
    assert (await keeper.exited()).ended == ()


@pytest.mark.parametrize(
    ("program", "changes", "code", "words"),
    [
        ("no-such-command", {}, 127, "cannot start no-such-command: not found in PATH"),
        ("./absent", {}, 127, "cannot start ./absent: no such file"),
        ("./plain", {}, 126, "cannot start ./plain: Permission denied"),
        ("./script", {}, 126, "cannot start ./script: the interpreter in its first line does not exist"),
        (
            *("true", {"cwd": Path("/no/such/folder")}, 126),
            "cannot enter the working directory /no/such/folder: No such file or directory",
        ),
    ],
)
async def test_a_program_that_cannot_be_executed_is_reported_with_its_reason(
    stage: Stage, program: str, changes: dict[str, object], code: int, words: str
) -> None:
    (stage.folder / "plain").write_text("text")
    script = stage.folder / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    keeper = await stage.start(program, **changes)  # type: ignore[arg-type]
    report = await keeper.exited()
    assert (keeper.main_pid, report.code) == (None, code)
    assert (report.error or "").startswith(words)
    assert f"grpo-tui: {words}" in stage.log()
    assert "Traceback" not in stage.log()


async def test_a_keeper_that_cannot_be_started_is_an_error_that_names_the_folder(stage: Stage) -> None:
    absent = stage.folder / "deleted"
    with pytest.raises(GrpoError, match=r"^no keeper could be started in .*deleted"):
        await start_keeper(stage.launch("true"), run=stage.run, attempt=1, run_folder=absent)


async def test_each_attempt_starts_with_its_own_line_in_the_log(stage: Stage) -> None:
    (stage.folder / "a.log").write_text("cut off in the mid")
    keeper = await stage.start("sh", "-c", "echo out; echo err >&2", attempt=2)
    await keeper.exited()
    first, header, *lines = stage.log().splitlines()
    assert first == "cut off in the mid"
    assert header.startswith("=== attempt 2 · 20")
    assert header.endswith(" · sh -c 'echo out; echo err >&2'")
    assert lines == ["out", "err"]
    assert (stage.folder / "a.log").read_bytes()[keeper.log_offset :] == b"out\nerr\n"


async def test_the_service_leads_its_group_in_the_session_of_its_keeper_with_nothing_on_stdin(stage: Stage) -> None:
    keeper = await up(stage, EXITS_WITH_5)  # a Python that is still starting has files of its own open
    assert keeper.main_pid is not None
    service, kept_by = read_stat(keeper.main_pid), read_stat(keeper.identity.pid)
    assert service is not None
    assert kept_by is not None
    assert (service.group, service.session, service.parent) == (service.pid, kept_by.pid, kept_by.pid)
    assert kept_by.session == kept_by.pid
    assert os.readlink(f"/proc/{service.pid}/fd/0") == os.devnull
    assert sorted(os.listdir(f"/proc/{service.pid}/fd")) == ["0", "1", "2"]
    keeper.kill()
    await keeper.exited()


async def test_ignored_and_blocked_signals_are_not_inherited(stage: Stage) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    try:
        keeper = await stage.start("grep", "-E", "Sig(Blk|Ign)", "/proc/self/status")
        await keeper.exited()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGHUP, before)
    blocked_then, ignored_then = (int(line.split()[1], 16) for line in stage.log().splitlines()[1:])
    of_the_c_library = 1 << 31 | 1 << 32  # signals 32 and 33, reserved by it
    assert (blocked_then, ignored_then & ~of_the_c_library) == (0, 0)


async def test_the_environment_reaches_the_service_and_is_never_written_to_disk(stage: Stage) -> None:
    shown = 'echo "$GRPO_TUI_RUN $GRPO_TUI_SERVICE $GRPO_TUI_ATTEMPT $PYTHONUNBUFFERED ${#SECRET}"'
    keeper = await stage.start("sh", "-c", shown, env={"SECRET": "hf_never_written"}, attempt=3)
    await keeper.exited()
    assert stage.log().splitlines()[1] == f"{stage.run} a 3 1 16"
    written = [path for path in stage.folder.rglob("*") if path.is_file()]
    assert len(written) == 3
    assert not any(b"hf_never_written" in path.read_bytes() for path in written)


@pytest.mark.slow
async def test_services_survive_a_killed_supervisor_and_the_next_one_reads_their_exit_codes(stage: Stage) -> None:
    go = stage.folder / "go"
    waiting = f"while [ ! -e {go} ]; do sleep 0.02; done; exit 7"
    launches = [stage.launch("sh", "-c", waiting), stage.launch("sh", "-c", "exit 3", name="b")]
    supervisor = subprocess.run(  # noqa: ASYNC221 - nothing else is to happen meanwhile
        [sys.executable, "-c", SUPERVISOR, str(stage.folder)], input=pickle.dumps(launches), timeout=60, check=False
    )
    assert supervisor.returncode == -signal.SIGKILL
    kept = adopt_keeper(stage.folder, "a", 1)
    assert isinstance(kept, Keeper)
    os.kill(kept.identity.pid, signal.SIGHUP)
    assert kept.identity.is_alive()
    go.touch()
    assert (await kept.exited()).code == 7
    assert adopt_keeper(stage.folder, "a", 1) == await kept.exited()
    ended = adopt_keeper(stage.folder, "b", 1)
    ended = await ended.exited() if isinstance(ended, Keeper) else ended
    assert isinstance(ended, ExitReport)
    assert (ended.code, ended.keeper_lost) == (3, False)
    assert adopt_keeper(stage.folder, "a", 2) is None


async def test_state_files_of_the_first_and_the_latest_attempts_are_kept(stage: Stage) -> None:
    for attempt in (1, 2, 3, 22, 23):
        await (await stage.start("true", attempt=attempt)).exited()
    names = {path.name for path in (stage.folder / "keepers").iterdir()}
    assert names == {f"a.{attempt}.{ending}" for attempt in (1, 22, 23) for ending in ("json", "spec.json")}


async def test_a_keeper_is_reaped_even_if_its_exit_is_not_awaited(stage: Stage) -> None:
    keeper = await stage.start("true")
    await until(lambda: read_stat(keeper.identity.pid) is None)


@pytest.mark.parametrize("is_up", [False, True], ids=["its keeper alone", "its service too"])
async def test_a_cancelled_start_leaves_no_process(stage: Stage, monkeypatch: pytest.MonkeyPatch, is_up: bool) -> None:
    async def unread(_: int) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(client, "_read_to_end", unread)  # else the start may be over before it is cancelled
    starting = asyncio.create_task(stage.start(*python(IGNORES_SIGTERM, stage.token)))
    await until(lambda: bool(stage.survivors()))
    if is_up:
        await stage.says("up")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: not stage.survivors())


async def test_when_files_cannot_be_replaced_the_state_is_overwritten_in_place(stage: Stage) -> None:
    keeper = await up(stage, EXITS_WITH_5)
    (stage.folder / "keepers" / "a.1.json.tmp").mkdir()  # as good as a full disk: no new file can be written
    keeper.stop()
    report = await keeper.exited()
    assert (report.code, report.keeper_lost) == (5, False)


async def test_a_service_whose_run_folder_was_deleted_can_be_stopped_and_reported(stage: Stage) -> None:
    keeper = await up(stage, EXITS_WITH_5, cwd=Path("/"))
    shutil.rmtree(stage.folder)
    keeper.stop()
    report = await keeper.exited()
    assert (report.code, report.keeper_lost) == (None, True)
    assert "missing or damaged" in (report.error or "")
    stage.folder.mkdir()


async def test_a_reused_pid_is_neither_adopted_nor_signalled(stage: Stage) -> None:
    keeper = await up(stage, IGNORES_SIGTERM)
    assert keeper.main_pid is not None
    state_file = stage.folder / "keepers" / "a.1.json"
    state = json.loads(state_file.read_text())
    other = identify(keeper.main_pid)
    assert other is not None
    state["keeper"] = {"pid": other.pid, "start_ticks": other.start_ticks - 1}
    real = state_file.read_bytes()
    state_file.write_text(json.dumps(state))
    adopted = adopt_keeper(stage.folder, "a", 1)
    assert isinstance(adopted, ExitReport)
    assert adopted.keeper_lost
    state_file.write_bytes(real)
    keeper.identity, identity = type(other)(other.pid, other.start_ticks - 1), keeper.identity
    keeper.kill()
    assert other.is_alive()
    keeper.identity = identity
    keeper.kill()
    await keeper.exited()


async def test_a_damaged_state_file_counts_as_a_lost_keeper(stage: Stage) -> None:
    (stage.folder / "keepers").mkdir()
    (stage.folder / "keepers" / "a.1.json").write_text('{"service": "a", "att')
    report = adopt_keeper(stage.folder, "a", 1)
    assert isinstance(report, ExitReport)
    assert report.keeper_lost
    assert (report.error or "").endswith("a.1.json is missing or damaged: how this attempt ended is unknown")


@pytest.mark.slow
async def test_a_keeper_is_small_and_sleeps_while_nothing_happens(stage: Stage) -> None:
    def counted(name: str) -> int:
        lines = Path(f"/proc/{keeper.identity.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    keeper = await up(stage, EXITS_WITH_5)
    await until(lambda: read_stat(keeper.identity.pid).state == "S")  # type: ignore[union-attr]
    before = counted("voluntary_ctxt_switches")
    await asyncio.sleep(1.0)  # what is measured: a second in which nothing happens
    assert counted("voluntary_ctxt_switches") == before
    assert counted("VmRSS") < 15 * 1024
    keeper.kill()
    await keeper.exited()


async def test_state_files_name_processes_and_times(stage: Stage) -> None:
    [port] = free_ports(1)
    keeper = await stage.start(*python(HOLDER, port, stage.token))
    state_file = stage.folder / "keepers" / "a.1.json"
    running = json.loads(state_file.read_text())
    assert (running["state"], running["main"]["pid"], running["exit_code"]) == ("running", keeper.main_pid, None)
    keeper.stop()
    await keeper.exited()
    gone = json.loads(state_file.read_text())
    assert (gone["state"], gone["exit_code"], gone["unkillable"]) == ("gone", -signal.SIGTERM, [])
    assert gone["started_at"] <= gone["ended_at"]
    assert stat.S_IMODE(state_file.stat().st_mode) & 0o022 == 0
