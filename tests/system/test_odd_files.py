"""Wrong folders, files and permissions where a run has its files: no traceback, and repaired where possible."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from workplace import IDLE, PYTHON, Workplace, service, until

from grpo_engine.wire.run_folder import ADDRESS_FILE, STATE_FILE
from grpo_tui.supervisor.lock import has_daemon, read_address

pytestmark = pytest.mark.slow


def socket_of(place: Workplace) -> Path:
    """Where the run's supervisor listens."""
    address = read_address(place.run_folder())
    assert address is not None
    return Path(address.socket)


def succeed_without_traceback(place: Workplace, *commands: str) -> None:
    for command in commands:
        done = place.grpo(*command.split())
        assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr


@pytest.mark.parametrize(
    "in_place", ["nothing", "a folder", pytest.param("a file", marks=pytest.mark.extended("a folder here"))]
)
def test_a_socket_is_made_again_whatever_is_in_its_place(place: Workplace, in_place: str) -> None:
    place.up(service("a", IDLE))
    supervisor, socket = place.supervisor(), socket_of(place)
    with place.suspended():
        socket.unlink()
        if in_place == "a folder":
            socket.mkdir()
            (socket / "within").touch()
        elif in_place == "a file":
            socket.touch()
    until(socket.is_socket)
    assert place.supervisor() == supervisor
    place.succeed("stop", "a", "--wait")


@pytest.mark.parametrize(
    "has_supervisor",
    [True, pytest.param(False, marks=pytest.mark.extended("a folder in place of a socket is replaced"))],
    ids=["a file, with a supervisor", "a folder, without one"],
)
def test_a_command_succeeds_although_something_is_in_place_of_the_socket(
    place: Workplace, has_supervisor: bool
) -> None:
    place.up(service("a", IDLE))
    socket = socket_of(place)
    if has_supervisor:
        with place.suspended():
            socket.unlink()
            socket.touch()
    else:
        place.kill_supervisor()
        socket.unlink()
        socket.mkdir()
    place.succeed("stop", "a", "--wait")


def test_a_folder_for_sockets_that_others_may_enter_is_refused_and_nothing_is_started(place: Workplace) -> None:
    place.profile(service("a", IDLE))
    folder = place.runtime / "grpo-tui"
    folder.mkdir(mode=0o755)
    done = place.grpo("up", "--profile", "p", "--detach")
    assert done.returncode == 1
    assert done.stderr.startswith(f"{folder}, the folder for sockets, has mode 0755 and belongs to user {os.getuid()}")
    assert "`chmod 700` or remove it, or set XDG_RUNTIME_DIR" in done.stderr
    assert "Traceback" not in done.stderr
    assert place.grpo("ps").stdout.count("\n") <= 1  # no run was begun
    folder.chmod(0o700)
    place.up()


def test_a_run_whose_folder_for_sockets_was_opened_to_others_is_shown_and_ended(place: Workplace) -> None:
    run = place.up(service("a", IDLE))
    (place.runtime / "grpo-tui").chmod(0o755)
    succeed_without_traceback(place, "ps", "status", "stop a --wait", "down")
    assert not has_daemon(place.folder / "logs" / run)


def test_a_run_whose_folder_for_sockets_another_user_made_anew_can_be_ended(place: Workplace) -> None:
    """Once a cleaner has removed it; commands found a stranger's socket, and the run could not be ended any more."""
    run = place.up(service("a", IDLE))
    folder = place.runtime / "grpo-tui"
    with place.suspended():
        shutil.rmtree(folder)
        folder.mkdir()
        folder.chmod(0o755)
    until(lambda: socket_of(place).parent != folder)
    alone = socket_of(place).parent
    assert stat.S_IMODE(alone.stat().st_mode) == 0o700
    place.succeed("stop", "a", "--wait")
    place.succeed("down")
    assert not has_daemon(place.folder / "logs" / run)
    assert not alone.exists()


def test_a_supervisor_that_cannot_listen_logs_the_reason_without_a_traceback(place: Workplace) -> None:
    place.up(service("a", IDLE))
    folder = place.runtime / "grpo-tui"
    place.kill_supervisor()
    folder.chmod(0o755)
    program = [PYTHON, "-P", "-m", "grpo_tui.supervisor.daemon", str(place.run_folder())]
    subprocess.run(program, env=place.environment, check=True)
    until(lambda: "supervisor exits: " in place.log())
    assert f"supervisor exits: {folder}, the folder for sockets, has mode 0755" in place.log()
    assert "Traceback" not in place.log()
    folder.chmod(0o700)


def test_a_folder_in_place_of_the_state_file_is_moved_aside(place: Workplace) -> None:
    place.up(service("a", IDLE))
    state = place.run_folder() / STATE_FILE
    with place.suspended():
        state.unlink()
        (state / "within").mkdir(parents=True)
    succeed_without_traceback(place, "ps", "status", "up --profile p --detach", "stop a --wait")
    until(state.is_file)
    (aside,) = place.run_folder().glob("state.json.*.aside")
    assert (aside / "within").is_dir()


@pytest.mark.extended("test_a_folder_in_place_of_the_state_file_is_moved_aside; test_runs.py damages the file")
def test_a_run_without_a_supervisor_recovers_from_a_folder_in_place_of_its_state_file(place: Workplace) -> None:
    place.up(service("a", IDLE))
    pid = place.pid()
    place.kill_supervisor()
    state = place.run_folder() / STATE_FILE
    state.unlink()
    state.mkdir()
    shown = place.grpo("status")
    assert shown.returncode == 1
    expected = f"{state} cannot be read: not a regular file; while the run lives, the next command to it"
    assert shown.stderr.startswith(expected), shown.stderr
    place.succeed("ps")
    place.succeed("up", "--profile", "p", "--detach")
    assert place.pid() == pid


def test_a_folder_in_place_of_the_supervisors_address_hides_nothing(place: Workplace) -> None:
    place.up(service("a", IDLE))
    address = place.run_folder() / ADDRESS_FILE
    with place.suspended():
        address.unlink()
        address.mkdir()
    succeed_without_traceback(place, "ps", "status", "stop a --wait", "down")


def test_a_file_in_place_of_the_folder_of_runs_is_an_error(place: Workplace) -> None:
    place.profile(service("a", IDLE))
    (place.folder / "logs").touch()
    done = place.grpo("up", "--profile", "p", "--detach")
    assert done.returncode == 1
    expected = f"{place.folder / 'logs'}, the folder of runs, cannot be used: File exists; "
    assert done.stderr.startswith(expected), done.stderr
    assert "Traceback" not in done.stderr + place.grpo("ps").stderr


@pytest.mark.parametrize("command", ["up --profile p", "status"])
def test_a_command_in_a_deleted_folder_is_an_error(place: Workplace, command: str) -> None:
    gone = place.folder / "gone"
    gone.mkdir()
    argv = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *place.argv(*command.split())]
    done = subprocess.run(argv, cwd=gone, env=place.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the current folder was deleted: cd to an existing one" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_whose_name_is_not_utf_8_is_refused_by_name(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/d\xff"
    os.mkdir(folder)
    done = subprocess.run([PYTHON, "-P", "-m", "grpo_tui", "ps"], cwd=folder, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"d\\xff'; the files of a run cannot hold it" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_service_whose_keeper_cannot_be_started_fails_with_the_reason(place: Workplace) -> None:
    place.up(service("a", IDLE))
    place.succeed("stop", "a", "--wait")
    keepers = place.run_folder() / "keepers"
    keepers.rename(place.run_folder() / "elsewhere")
    keepers.touch()
    assert place.grpo("start", "a", "--wait").returncode == 1
    until(lambda: not has_daemon(place.run_folder()))  # with its only service the run has failed
    why = place.service().why or ""
    assert why.startswith(f"no keeper could be started in {place.run_folder()}: "), why
