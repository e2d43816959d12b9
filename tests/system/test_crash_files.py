"""Crash reports of real services that failed."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from stage import Stage, python

from grpo_engine.wire.supervisor import RunState, RunStatus, ServiceState, ServiceStatus
from grpo_tui.services.atropos_environment import REFUSED
from grpo_tui.services.base import Launch
from grpo_tui.supervisor.report.crash_report import MAX_REPORTS, write_report
from grpo_tui.supervisor.report.machine_facts import machine_facts, oom_kill_count
from grpo_tui.supervisor.service_runner import logged_cause

CRASH = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal\\nwhile 1: signal.pause()", sys.argv[1]])
print("key is", os.environ.get("MY_API_KEY"), flush=True)
print(*range(2000), sep="\\n", flush=True)
raise LookupError("the needle")
"""
"""Prints a secret and many lines, starts a child and fails."""


def status(stage: Stage, *names: str) -> RunStatus:
    services = [
        ServiceStatus(
            name=name, kind="command", state=ServiceState.FAILED, attempt=1, log=str(stage.folder / f"{name}.log")
        )
        for name in names
    ]
    return RunStatus(run=stage.run, profile="p", state=RunState.FAILED, supervisor=None, services=services)


def written(stage: Stage, launches: Mapping[str, Launch], attempt: int = 1) -> Path:
    path = write_report(
        stage.folder, status(stage, *launches), launches, "a", attempt=attempt, why="exit code 1", oom_kills=0
    )
    assert path is not None
    return path


async def test_a_report_has_the_last_output_and_the_leftover_processes(stage: Stage) -> None:
    launch = stage.launch(*python(CRASH, stage.token), env={"MY_API_KEY": "abcdefgh-secret"})
    await (await stage.start(*python("print('attempt one')"))).exited()
    keeper = await stage.start(*launch.argv, attempt=2, env=launch.env)
    await keeper.exited()
    (stage.folder / "b.log").write_text("=== attempt 1 · b\nlistening\n")
    (stage.folder / "metrics.jsonl").write_text(
        '{"time": 1, "step": 7, "policy_version": 7, "metrics": {"train/loss": 0.25}}\n'
    )
    path = written(stage, {"a": launch, "b": stage.launch("b", name="b")}, attempt=2)
    text = path.read_text()
    lines = text.splitlines()
    assert path.name == "crash-a-2.txt"
    assert lines[0] == "a failed: exit code 1"
    assert lines[2] == "  log says  LookupError: the needle"
    assert any(line.startswith("  leftover  its keeper had to terminate pid") for line in lines[:10])
    assert "listening" in lines
    assert "train/loss  0.25" in lines
    assert [line.split()[1] for line in lines if line.startswith("attempt ")] == ["1", "2"]
    assert "attempt one" not in text
    assert "1999" in lines
    assert "abcdefgh-secret" not in text


async def test_a_secret_in_a_log_is_masked(stage: Stage) -> None:
    program = python("import os; print('key is', os.environ['MY_API_KEY'])")
    launch = stage.launch(*program, env={"MY_API_KEY": "abcdefgh-secret"})
    await (await stage.start(*launch.argv, env=launch.env)).exited()
    assert "key is ***" in written(stage, {"a": launch}).read_text().splitlines()


def test_the_report_on_a_second_kill_of_an_attempt_keeps_that_on_the_first(stage: Stage) -> None:
    """A server or rank that is killed is started again in place, in the same attempt: its report was replaced."""
    launches = {"a": stage.launch("a")}
    for why in ("rank 0 was killed", "rank 1 was killed"):
        path = write_report(stage.folder, status(stage, *launches), launches, "a", attempt=1, why=why)
        assert path is not None
    newest, earlier = path.read_text().split("=== an earlier failure of the same attempt ===\n")
    assert newest.startswith("a failed: rank 1 was killed")
    assert earlier.startswith("a failed: rank 0 was killed")


def test_a_service_that_never_started_has_a_report_too(stage: Stage) -> None:
    assert "(no output in this attempt)" in written(stage, {"a": stage.launch("a")}).read_text()


def test_the_first_report_of_a_service_and_the_newest_are_kept(stage: Stage) -> None:
    foreign = stage.folder / "crash-a-b-1.txt"
    foreign.write_text("of the service a-b")
    for attempt in range(1, MAX_REPORTS + 6):
        (stage.folder / f"crash-a-{attempt}.txt").write_text("earlier")
    written(stage, {"a": stage.launch("a")}, attempt=MAX_REPORTS + 6)
    kept = {int(path.stem.rpartition("-")[2]) for path in stage.folder.glob("crash-a-[0-9]*.txt")}
    assert kept == {1, *range(8, MAX_REPORTS + 7)}
    assert len(kept) == MAX_REPORTS
    assert foreign.exists()


def test_a_deleted_run_folder_is_logged_and_raises_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    gone = stage.folder / "gone"
    with caplog.at_level(logging.ERROR):
        assert write_report(gone, status(stage, "a"), {"a": stage.launch("a")}, "a", attempt=1, why="x") is None
    assert "crash-a-1.txt: cannot write the crash report: No such file or directory" in caplog.text


def test_a_full_disk_is_logged_and_leaves_no_partial_report(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with caplog.at_level(logging.ERROR):
        assert write_report(stage.folder, status(stage, "a"), {"a": stage.launch("a")}, "a", attempt=1, why="x") is None
    assert "No space left on device" in caplog.text
    assert list(stage.folder.iterdir()) == []


def test_machine_facts_import_none_of_the_packages(stage: Stage) -> None:
    facts = machine_facts(stage.folder)
    assert facts.versions["torch"]
    assert facts.versions["grpo-tui"]
    assert facts.python.endswith(f"({sys.executable})")
    assert facts.disk is not None
    assert 0 < facts.disk.free_bytes <= facts.disk.total_bytes
    assert facts.memory is not None
    assert 0 < facts.memory.free_bytes < facts.memory.total_bytes


@pytest.mark.skipif("oom_kill " not in Path("/proc/vmstat").read_text(), reason="this kernel does not count them")
def test_a_refusal_by_the_rollout_api_is_found_above_the_traceback_that_follows(tmp_path: Path) -> None:
    def line(words: str) -> str:
        return f"Error fetching from server. Status: 422, Message: Unprocessable Entity. Response: {words}\n"

    log = tmp_path / "env.log"
    log.write_text(line("an earlier attempt"))
    offset = log.stat().st_size
    assert logged_cause(log, offset, REFUSED) is None
    with log.open("a") as file:
        file.write(line("1") + line("2") + "  File x\n" * 80 + "tenacity.RetryError: RetryError[<Future>]\n")
    assert logged_cause(log, offset, REFUSED) == "Status: 422, Message: Unprocessable Entity. Response: 2"
    assert logged_cause(log, offset, None) is None


def test_the_kernel_counts_oom_kills() -> None:
    count = oom_kill_count()
    assert count is not None
    assert count >= 0
