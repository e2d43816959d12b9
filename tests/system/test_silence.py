"""Who says nothing is waited for no longer than needed: services at rest, suspended processes, broken programs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from workplace import POLITE, PYTHON, Workplace, open_workplace, service, until

from grpo_engine.wire.run_folder import ADDRESS_FILE, SUPERVISOR_LOG
from grpo_tui.client.new_daemon import NewDaemon
from grpo_tui.supervisor.keeper.client import living_keepers
from grpo_tui.supervisor.lock import has_daemon, read_address, take_lock


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path) as place:
        yield place


def test_a_restart_starts_a_service_that_was_stopped_though_nothing_else_happens(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    assert place.grpo("stop", "a", "--wait").returncode == 0
    done = place.grpo("restart", "a", "--wait", "--timeout", "20")
    assert done.returncode == 0, done.stderr
    assert place.grpo("down").returncode == 0


def test_a_suspended_keeper_hears_a_stop_and_is_not_taken_for_stuck(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    (keeper,) = living_keepers(place.run_folder())
    os.kill(keeper.keeper.pid, signal.SIGSTOP)
    done = place.grpo("stop", "a", "--wait")
    assert done.returncode == 0, done.stderr
    (a,) = place.status().services
    assert (a.state, a.exit_code) == ("stopped", -signal.SIGTERM)
    assert place.grpo("down").returncode == 0


def test_the_status_of_a_run_whose_supervisor_is_suspended_says_so_and_not_that_it_is_gone(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    supervisor = place.status().supervisor
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        shown = place.grpo("status").stdout
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
    assert "the supervisor does not answer (no answer in 3 s)" in shown
    assert "is gone" not in shown
    assert place.grpo("down").returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        "stop a",
        "down --timeout 1",
        *(
            pytest.param(command, marks=pytest.mark.extended("the same with stop and down"))
            for command in ("restart a --wait", "upgrade", "up --profile p")
        ),
    ],
)
def test_a_command_to_a_run_whose_supervisor_is_suspended_says_what_wakes_it(place: Workplace, command: str) -> None:
    place.profile(service("a", POLITE))
    run = place.up()
    supervisor = place.status().supervisor
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        done = place.grpo(*command.split())
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
    assert done.returncode == 1
    assert f"the supervisor of {run} (pid {supervisor.pid}) is suspended; its services keep running" in done.stderr
    assert f"`kill -CONT {supervisor.pid}` resumes it" in done.stderr
    assert place.status().supervisor == supervisor
    assert place.grpo("down").returncode == 0


def test_a_supervisor_that_hangs_is_told_with_what_ends_it_and_that_helps(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    run = place.up()
    supervisor, pid = place.status().supervisor, place.pid("a")
    assert supervisor is not None
    address = read_address(place.run_folder())
    assert address is not None
    with deaf_socket(
        place.runtime / "deaf.socket"
    ) as deaf:  # in its place, as that of one which runs and reads nothing
        (place.run_folder() / ADDRESS_FILE).write_text(
            address.model_copy(update={"socket": str(deaf)}).model_dump_json()
        )
        done = place.grpo("stop", "a")
    assert done.returncode == 1
    assert f"the supervisor of {run} (pid {supervisor.pid}) has not answered in" in done.stderr
    assert f"`kill -9 {supervisor.pid}` ends it" in done.stderr
    os.kill(supervisor.pid, signal.SIGKILL)
    until(lambda: not has_daemon(place.run_folder()))
    assert place.grpo("restart", "a", "--wait").returncode == 0
    assert place.pid("a") != pid
    assert place.grpo("down").returncode == 0


def test_a_supervisor_that_only_starts_is_waited_for(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.runtime))  # for the supervisor that this process starts
    place.profile(service("a", POLITE))
    place.up()
    place.lose_daemon()
    lock = take_lock(
        place.run_folder()
    )  # held, as by a supervisor that does not listen yet: the file names the dead one
    assert lock is not None
    stop = place.start("stop", "a", "--wait")
    until(lambda: "this one exits" in (place.run_folder() / SUPERVISOR_LOG).read_text())
    with NewDaemon() as starting:
        starting.wait_until_loaded()
        os.close(lock)
        assert starting.supervise(place.run_folder())
    _, errors = stop.communicate()
    assert stop.returncode == 0, errors
    assert place.grpo("down").returncode == 0


@contextmanager
def deaf_socket(path: Path) -> Iterator[Path]:
    """A socket that takes a client and never says a word."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield path


def test_a_program_that_breaks_with_a_traceback_does_not_replace_a_supervisor(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    old = place.status().supervisor
    broken = place.folder / "broken"
    broken.write_text("#!/bin/sh\necho 'ImportError: half installed' >&2\nexit 1\n")
    broken.chmod(0o755)
    program = f"import sys; from grpo_tui.client import launch; launch.sys.executable = {str(broken)!r}\n"
    program += "from grpo_tui.cli import main; sys.argv[1:] = ['upgrade']; main()"
    done = subprocess.run(
        [PYTHON, "-P", "-c", program], cwd=place.folder, env=place.environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "a new supervisor cannot be started: ImportError: half installed" in done.stderr
    assert place.status().supervisor == old
    assert place.grpo("down").returncode == 0
