"""Processes that are suspended, hang or break are reported, with what to do, and nothing waits for them needlessly."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from workplace import IDLE, Workplace, service, until

from grpo_engine.wire.run_folder import ADDRESS_FILE
from grpo_tui.client.new_daemon import NewDaemon
from grpo_tui.supervisor.keeper.client import living_keepers
from grpo_tui.supervisor.lock import has_daemon, read_address, take_lock

pytestmark = pytest.mark.slow


def test_a_restart_starts_a_service_that_was_stopped_though_no_other_event_follows(place: Workplace) -> None:
    place.up(service("a", IDLE))
    place.succeed("stop", "a", "--wait")
    place.succeed("restart", "a", "--wait", "--timeout", "20")


def test_a_suspended_keeper_carries_out_a_stop(place: Workplace) -> None:
    place.up(service("a", IDLE))
    (keeper,) = living_keepers(place.run_folder())
    os.kill(keeper.keeper.pid, signal.SIGSTOP)
    place.succeed("stop", "a", "--wait")
    assert (place.service().state, place.service().exit_code) == ("stopped", -signal.SIGTERM)


def test_every_command_to_a_suspended_supervisor_reports_it_and_how_to_resume_it(place: Workplace) -> None:
    run = place.up(service("a", IDLE))
    supervisor = place.supervisor()
    commands = ("stop a", "down --timeout 1", "restart a --wait", "upgrade", "up --profile p")
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        status, *others = [place.start(*command.split()) for command in ("status", *commands)]
        shown, _ = status.communicate(timeout=60)
        answers = [each.communicate(timeout=60)[1] for each in others]
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
    assert "the supervisor does not answer (no answer in 3 s)" in shown
    assert "is gone" not in shown
    assert [each.returncode for each in others] == [1] * len(commands), answers
    for errors in answers:
        assert f"the supervisor of {run} (pid {supervisor.pid}) is suspended; its services keep running" in errors
        assert f"`kill -CONT {supervisor.pid}` resumes it" in errors
    assert place.supervisor() == supervisor


@pytest.mark.extended("test_every_command_to_a_suspended_supervisor_reports_it_and_how_to_resume_it")
def test_a_supervisor_that_hangs_is_reported_with_what_ends_it_and_then_replaced(place: Workplace) -> None:
    run = place.up(service("a", IDLE))
    supervisor, pid = place.supervisor(), place.pid()
    address = read_address(place.run_folder())
    assert address is not None
    path = str(place.runtime / "hangs.socket")
    with socket.socket(socket.AF_UNIX) as listener:  # accepts a connection and never answers
        listener.bind(path)
        listener.listen()
        (place.run_folder() / ADDRESS_FILE).write_text(address.model_copy(update={"socket": path}).model_dump_json())
        done = place.grpo("stop", "a")
    Path(path).unlink()
    assert done.returncode == 1
    assert f"the supervisor of {run} (pid {supervisor.pid}) has not answered in" in done.stderr
    assert f"`kill -9 {supervisor.pid}` ends it" in done.stderr
    os.kill(supervisor.pid, signal.SIGKILL)
    until(lambda: not has_daemon(place.run_folder()))
    place.succeed("restart", "a", "--wait")
    assert place.pid() != pid


def test_a_command_waits_for_a_supervisor_that_is_starting(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.runtime))  # for the supervisor that this process starts
    monkeypatch.setenv("TMPDIR", str(place.temporary))
    place.up(service("a", IDLE))
    place.kill_supervisor()
    lock = take_lock(place.run_folder())  # as by one that does not listen yet: the address is that of the killed one
    assert lock is not None
    stop = place.start("stop", "a", "--wait")
    until(lambda: "this one exits" in place.log())
    with NewDaemon() as starting:
        starting.wait_until_loaded()
        os.close(lock)
        assert starting.supervise(place.run_folder())
    _, errors = stop.communicate()
    assert stop.returncode == 0, errors


def test_a_program_that_cannot_start_does_not_replace_the_supervisor(place: Workplace) -> None:
    place.up(service("a", IDLE))
    old = place.supervisor()
    broken = place.folder / "broken"
    broken.write_text("#!/bin/sh\necho 'ImportError: half installed' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = place.python(
        f"import sys; from grpo_tui.client import launch; launch.sys.executable = {str(broken)!r}\n"
        "from grpo_tui.cli import main; sys.argv[1:] = ['upgrade']; main()"
    )
    assert done.returncode == 1
    assert "a new supervisor cannot be started: ImportError: half installed" in done.stderr
    assert place.supervisor() == old
