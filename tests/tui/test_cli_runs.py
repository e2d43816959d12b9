"""Which run a command acts on, and the status of a run without a supervisor: from folders that are made here."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import typer
from launches import keeper_state
from screen_fakes import run_status

from grpo_engine.diagnosis.evidence import RunSettings
from grpo_engine.errors import GrpoError, PeerError
from grpo_engine.wire.codec import write_json_atomically
from grpo_engine.wire.environment_variables import RUN_FOLDER_VARIABLE, RUN_VARIABLE
from grpo_engine.wire.run_folder import LOCK_FILE
from grpo_engine.wire.supervisor import RunState, RunStatus, ServiceState, ServiceStatus, SupervisorInfo
from grpo_tui.cli import act
from grpo_tui.cli.act import down_command
from grpo_tui.cli.arguments import run_to_act_on, split
from grpo_tui.cli.look import _with_diagnosis, status_command
from grpo_tui.client import local
from grpo_tui.client.local import NoSuchRun, find_run, look_at, runs, stored_status
from grpo_tui.keeper_process import read_stat
from grpo_tui.supervisor import teardown, temporary
from grpo_tui.supervisor.keeper.client import ProcessEntry
from grpo_tui.supervisor.lock import has_daemon, take_lock


def make_run(logs: Path, name: str, born_at: float) -> Path:
    folder = logs / name
    (folder / "keepers").mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    os.utime(folder / "plan.json", (born_at, born_at))
    return folder


def make_state(folder: Path, state: RunState, *services: ServiceStatus) -> None:
    me = SupervisorInfo(pid=1, started_at=1.0)
    status = RunStatus(run=folder.name, profile="p", state=state, supervisor=me, services=list(services))
    write_json_atomically(folder / "state.json", status)


def service(name: str, state: ServiceState) -> ServiceStatus:
    return ServiceStatus(name=name, kind="command", state=state, pid=4, attempt=1, log=f"{name}.log")


def make_keeper(
    folder: Path, name: str, *, is_alive: bool, exit_code: int | None = None, pid: int | None = None
) -> None:
    me = read_stat(pid or os.getpid())
    assert me is not None
    process = ProcessEntry(pid=me.pid, start_ticks=me.start_ticks if is_alive else 1)
    state = "running" if is_alive else "gone"
    written = keeper_state(name, state=state, keeper=process, main=process, exit_code=exit_code)
    (folder / "keepers" / f"{name}.1.json").write_text(written.model_dump_json())


def test_a_service_is_named_alone_or_after_its_run() -> None:
    assert split(["vllm"]) == (None, "vllm")
    assert split(["tiny-1121", "vllm"]) == ("tiny-1121", "vllm")
    with pytest.raises(typer.BadParameter, match="RUN"):
        split(["a", "b", "c"])


def test_a_run_is_found_by_id_unique_prefix_or_last_part(tmp_path: Path) -> None:
    make_run(tmp_path, "tiny-1", 1.0)
    make_run(tmp_path, "tiny-12", 2.0)
    make_run(tmp_path, "big-1", 3.0)
    assert find_run("tiny-1", tmp_path, also_ended=False).id == "tiny-1"
    assert find_run("b", tmp_path, also_ended=False).id == "big-1"
    assert find_run("12", tmp_path, also_ended=False).id == "tiny-12"
    make_state(tmp_path / "tiny-1", RunState.FINISHED)
    names = r"tiny-12 \(state unknown\), tiny-1 \(finished\)"
    with pytest.raises(NoSuchRun, match=f"several runs match; runs, the newest first: {names}"):
        find_run("tiny", tmp_path, also_ended=False)
    for word in ("x", "2", ""):
        with pytest.raises(NoSuchRun, match=rf"the newest first: big-1 \(state unknown\), {names}"):
            find_run(word, tmp_path, also_ended=False)


def test_of_a_run_that_is_left_out_commands_name_the_file_that_prevents_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "tiny-1", 1.0)
    (folder / "resolved.json").unlink(missing_ok=True)
    os.mkfifo(folder / "resolved.json")
    for prefix in ("tiny-1", "t", None):
        with pytest.raises(NoSuchRun, match=r"resolved\.json: the run is left out: not a regular file"):
            find_run(prefix, tmp_path, also_ended=True)


def test_without_a_name_the_newest_live_run_is_chosen_and_an_ended_one_only_to_read(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRun, match="no run was started here"):
        find_run(None, tmp_path, also_ended=True)
    old = make_run(tmp_path, "old", 1.0)
    make_run(tmp_path, "new", 2.0)
    assert [run.id for run in runs(tmp_path)] == ["new", "old"]
    assert find_run(None, tmp_path, also_ended=True).id == "new"
    with pytest.raises(NoSuchRun, match="the newest, new, has ended; `grpo-tui up` starts another"):
        find_run(None, tmp_path, also_ended=False)
    lock = take_lock(old)
    assert lock is not None
    assert find_run(None, tmp_path, also_ended=False).id == "old"
    os.close(lock)
    assert not has_daemon(old)


@pytest.mark.parametrize(("state", "is_said"), [(RunState.FAILED, True), (RunState.FINISHED, False)])
def test_the_status_of_a_run_that_failed_ends_with_the_command_that_goes_on(
    state: RunState, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path / "logs", "r", 1.0)
    (folder / "settings.json").write_text("{}")
    make_state(folder, state, service("trainer", ServiceState.FAILED))
    status_command("r")
    assert capsys.readouterr().out.endswith("\n`grpo-tui resume r` goes on with it\n") is is_said


@pytest.mark.parametrize("prefix", [None, "a"])
def test_a_run_whose_folder_is_made_again_between_two_looks_at_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str | None
) -> None:
    """It was in neither: the first saw no run, and the second none whose folder is missing."""

    def made_again(logs: Path) -> set[str]:
        locks.append(take_lock(make_run(logs, "a-1", 1.0)))
        return set()

    locks: list[int | None] = []
    monkeypatch.setattr(local, "lost_runs", made_again)
    assert find_run(prefix, tmp_path, also_ended=False).id == "a-1"
    (lock,) = locks
    assert lock is not None
    os.close(lock)


def test_runs_are_listed_while_one_of_them_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a-1", "b-1"):
        make_run(tmp_path, name, 1.0)
    look = local.unreadable_file

    def deleted_after_the_look(folder: Path) -> local.Unreadable | None:
        found = look(folder)
        if folder.name == "a-1":
            shutil.rmtree(folder)
        return found

    monkeypatch.setattr(local, "unreadable_file", deleted_after_the_look)
    assert [run.id for run in runs(tmp_path)] == ["b-1", "a-1"]


def test_the_status_of_a_long_run_is_judged_by_its_newest_steps(tmp_path: Path) -> None:
    """Of a file of metrics above a megabyte only the beginning was read: `no step for 8m43s`, and old findings."""
    folder, now = make_run(tmp_path, "r", 1.0), time.time()
    ages = range(3000, 0, -1)
    lines = [{"time": now - age, "step": 3000 - age, "policy_version": 1, "metrics": {"a" * 500: 1.0}} for age in ages]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = _with_diagnosis(look_at(folder), run_status(), RunSettings()).warnings
    assert "no-step" not in {warning.id for warning in found}


def test_a_run_that_lost_its_daemon_is_shown_as_its_keepers_are(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "r", 1.0)
    ready = [service(name, ServiceState.READY) for name in ("lives", "ended", "crashed", "vanished")]
    make_state(folder, RunState.RUNNING, *ready)
    make_keeper(folder, "lives", is_alive=True)
    make_keeper(folder, "ended", is_alive=False, exit_code=0)
    make_keeper(folder, "crashed", is_alive=False, exit_code=9)
    status = stored_status(look_at(folder))
    assert status.state is RunState.RUNNING
    assert status.supervisor is None
    assert {each.name: (each.state, each.exit_code) for each in status.services} == {
        "lives": (ServiceState.READY, None),
        "ended": (ServiceState.FINISHED, 0),
        "crashed": (ServiceState.FAILED, 9),
        "vanished": (ServiceState.FAILED, None),
    }
    assert status.warnings[0].text == "the supervisor of this run has exited; 1 service keeps running without it"


def test_a_run_without_a_living_process_has_failed_unless_it_had_ended(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "r", 1.0)
    make_state(folder, RunState.RUNNING, service("a", ServiceState.READY))
    status = stored_status(look_at(folder))
    assert (status.state, status.services[0].pid) == (RunState.FAILED, None)
    assert status.services[0].why == "ended while no supervisor was running, exit code unknown"
    make_state(folder, RunState.FINISHED, service("a", ServiceState.FINISHED))
    ended = stored_status(look_at(folder))
    assert (ended.state, ended.warnings) == (RunState.FINISHED, [])


def test_a_damaged_or_missing_state_file_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "r", 1.0)
    with pytest.raises(PeerError, match=r"state\.json: missing"):
        stored_status(look_at(folder))
    (folder / "state.json").write_text('{"run": "r", "prof')
    words = r"state\.json is damaged \(Invalid JSON: [^{]*\); while the run lives, the next command"
    with pytest.raises(PeerError, match=words):
        stored_status(look_at(folder))


def test_a_command_on_the_newest_of_several_runs_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as keepers:
        for born_at, name in enumerate(("older", "newer")):
            folder = make_run(tmp_path / "logs", name, float(born_at))
            marks = {RUN_VARIABLE: name, RUN_FOLDER_VARIABLE: str(folder)}
            waits = [sys.executable, "-I", "-S", "-c", "print('started', flush=True); input()"]
            keeper = keepers.enter_context(
                subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **marks})
            )
            keepers.callback(keeper.kill)
            assert keeper.stdout is not None
            keeper.stdout.readline()  # in the middle of its exec a process has no environment, hence no marker yet
            make_keeper(folder, "a", is_alive=True, pid=keeper.pid)
        assert run_to_act_on(None).id == "newer"
        assert capsys.readouterr().err == "using newer, the newest live run; others: older\n"
        assert run_to_act_on("older").id == "older"
        assert capsys.readouterr().err == ""


def test_down_removes_what_a_run_left_that_was_killed_with_its_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a job or a limit of memory kills all processes at once: its weights stayed in memory until a resume ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(teardown, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    left = []
    for name, state in (("killed-1", RunState.RUNNING), ("ended-1", RunState.STOPPED)):
        make_state(make_run(tmp_path / "logs", name, 1.0), state)
        weights, folder = tmp_path / f"grpo-{name}-0123-weights", temporary.make_folder(name)
        weights.touch()
        left.append((weights, folder))
    lock = tmp_path / "logs" / "killed-1" / LOCK_FILE
    lock.symlink_to("/dev/null")  # in a folder from elsewhere: it ended with a traceback
    with pytest.raises(GrpoError, match=r"daemon.lock, the lock of the run, is not a regular file"):
        down_command("killed-1")
    lock.unlink()
    down_command("killed-1")
    assert f"removed from shared memory: {left[0][0]}" in capsys.readouterr().out
    assert not any(path.exists() for path in left[0])
    for run in ("killed-1", "ended-1"):
        with pytest.raises(NoSuchRun, match="has ended"):
            down_command(run)
    assert all(path.exists() for path in left[1])
    shutil.rmtree(left[1][1])  # where `tmp_path` is too long for sockets, it lies outside


def test_down_removes_the_memory_of_a_run_whose_supervisor_is_killed_once_its_services_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answered that no process was left, and the weights stayed in memory."""
    monkeypatch.setattr(teardown, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    make_state(make_run(tmp_path / "logs", "killed-1", 1.0), RunState.RUNNING)
    (tmp_path / "grpo-killed-1-0123-weights").touch()

    async def is_killed(*_: object) -> None: ...

    monkeypatch.setattr(act, "_send_down", is_killed)
    asyncio.run(act._down(look_at(tmp_path / "logs" / "killed-1"), None, False))
    assert "no process is left" in capsys.readouterr().out
    assert not (tmp_path / "grpo-killed-1-0123-weights").exists()
