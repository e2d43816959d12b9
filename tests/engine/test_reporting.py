"""Reports of services to their supervisor: waits that last, files that cannot be written, and free space."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_engine.serving import reporting
from grpo_engine.serving.reporting import Reporter, Waiting, disk_space
from grpo_engine.wire.environment_variables import ATTEMPT_VARIABLE, RUN_FOLDER_VARIABLE, SERVICE_VARIABLE
from grpo_engine.wire.run_folder import ADDRESS_FILE
from grpo_engine.wire.supervisor import Address, ServiceReport, WaitsFor, read_from_client

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_wait_is_reported_once_it_is_long_and_until_it_ends() -> None:
    reporter = Reporter()
    with reporter.waiting_for(WaitsFor.BATCH):
        assert reporter.report().waits_for is None
    reporter.ask_waiting = lambda: Waiting(what=WaitsFor.BATCH, since=1.0)
    assert (reporter.report().waits_for, reporter.report().waits_since) == (WaitsFor.BATCH, 1.0)


def test_the_innermost_wait_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "SHORT_WAIT_S", 0.0)
    reporter = Reporter()
    with reporter.waiting_for(WaitsFor.EVALUATION):
        with reporter.waiting_for(WaitsFor.UPDATE):
            assert reporter.report().waits_for is WaitsFor.UPDATE
        assert reporter.report().waits_for is WaitsFor.EVALUATION
    assert reporter.report().waits_for is None


def test_a_file_is_reported_until_it_can_be_written(tmp_path: Path) -> None:
    reporter, path = Reporter(), tmp_path / "metrics.jsonl"
    reporter.cannot_write(path, FULL, effect="lines wait")
    [first] = reporter.report().write_faults
    reporter.cannot_write(path, FULL, effect="lines wait")
    [fault] = reporter.report().write_faults
    assert (fault.path, fault.error, fault.effect) == (str(path), "No space left on device", "lines wait")
    assert fault.since == first.since
    assert fault.disk is not None
    assert fault.disk.folder == str(tmp_path)
    reporter.can_write(path)
    assert reporter.report().write_faults == []


def test_a_service_sends_its_report_to_the_supervisor_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "CHECK_EVERY_S", 0.01)
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.settimeout(60)
        (tmp_path / ADDRESS_FILE).write_text(Address(pid=1, socket=str(path)).model_dump_json())
        names = {RUN_FOLDER_VARIABLE: str(tmp_path), SERVICE_VARIABLE: "trainer", ATTEMPT_VARIABLE: "3"}
        with Reporter.from_environment(names) as reporter:
            reporter.cannot_write(tmp_path, FULL, effect="x")
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as lines:
                report = read_from_client(lines.readline())
    assert isinstance(report, ServiceReport)
    assert (report.service, report.attempt, len(report.write_faults)) == ("trainer", 3, 1)


def test_a_report_that_was_not_taken_is_sent_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reporting, "CHECK_EVERY_S", 0.01)
    taken: queue.Queue[ServiceReport] = queue.Queue()
    failures = [ConnectionRefusedError()]

    def send(report: ServiceReport) -> None:
        if failures:
            raise failures.pop()
        taken.put(report)

    with Reporter(send, service="a", attempt=1) as reporter:
        reporter.cannot_write(tmp_path, FULL, effect="x")
        assert len(taken.get(timeout=60).write_faults) == 1
        reporter.can_write(tmp_path)
        assert taken.get(timeout=60) == ServiceReport(service="a", attempt=1)


def test_without_a_supervisor_nothing_is_sent() -> None:
    with Reporter.from_environment({}) as reporter:
        assert reporter._thread is None


def test_space_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    space = disk_space(tmp_path / "not" / "yet")
    assert space is not None
    assert (space.folder, space.device, space.is_full) == (str(tmp_path), tmp_path.stat().st_dev, False)
    assert space.total_bytes == shutil.disk_usage(tmp_path).total


IN_A_SMALL_DISK = """
import sys
from pathlib import Path
from grpo_engine.serving.reporting import disk_space
folder = Path(sys.argv[1])
before = disk_space(folder)
try:
    (folder / "fill").write_bytes(bytes(8 << 20))
except OSError as error:
    print(error.strerror, before.is_full, disk_space(folder).is_full, disk_space(folder).total_bytes)
"""


def test_a_full_file_system_is_full(tmp_path: Path) -> None:
    mounted = 'mount -t tmpfs -o size=4m none "$0" && exec "$1" -c "$2" "$0"'
    argv = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, str(tmp_path), sys.executable]
    if subprocess.run([*argv[:4], "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this kernel lets no user make a mount namespace")
    done = subprocess.run([*argv, IN_A_SMALL_DISK], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["No", "space", "left", "on", "device", "False", "True", str(4 << 20)], done.stderr
