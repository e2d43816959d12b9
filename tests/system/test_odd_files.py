"""What lies where a file of a run belongs, and is none: no traceback, nothing lost, and it heals where it can."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from workplace import POLITE, PYTHON, Workplace, open_workplace, service, until

from grpo_engine.wire.run_folder import ADDRESS_FILE, STATE_FILE, SUPERVISOR_LOG
from grpo_tui.supervisor.lock import has_daemon, read_address


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path) as place:
        yield place


def socket_of(place: Workplace) -> Path:
    """Where the run's supervisor listens."""
    address = read_address(place.run_folder())
    assert address is not None
    return Path(address.socket)


@pytest.mark.parametrize("is_folder", [pytest.param(False, marks=pytest.mark.extended("a folder here")), True])
def test_what_lies_in_place_of_the_socket_is_replaced_by_it(place: Workplace, is_folder: bool) -> None:
    place.profile(service("a", POLITE))
    place.up()
    supervisor, socket = place.status().supervisor, socket_of(place)
    socket.unlink()
    if is_folder:
        socket.mkdir()
        (socket / "within").touch()
    else:
        socket.touch()
    until(socket.is_socket)
    assert place.status().supervisor == supervisor
    done = place.grpo("stop", "a", "--wait")
    assert done.returncode == 0, done.stderr
    assert place.grpo("down").returncode == 0


def test_a_command_outlasts_a_file_in_place_of_the_socket(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    socket = socket_of(place)
    socket.unlink()
    socket.touch()
    done = place.grpo("stop", "a", "--wait")
    assert done.returncode == 0, done.stderr
    assert place.grpo("down").returncode == 0


@pytest.mark.extended("a folder in place of the socket is replaced for the first supervisor")
def test_a_successor_listens_where_its_predecessor_left_a_folder(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    socket = socket_of(place)
    place.lose_daemon()
    socket.unlink()
    socket.mkdir()
    done = place.grpo("stop", "a", "--wait")
    assert done.returncode == 0, done.stderr
    assert place.grpo("down").returncode == 0


def test_a_folder_for_sockets_that_others_may_enter_is_refused_in_words_and_nothing_is_started(
    place: Workplace,
) -> None:
    place.profile(service("a", POLITE))
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
    assert place.grpo("down").returncode == 0


def test_a_run_whose_folder_for_sockets_was_opened_to_others_is_seen_and_ended(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    run = place.up()
    (place.runtime / "grpo-tui").chmod(0o755)
    for command in (["ps"], ["status"], ["stop", "a", "--wait"], ["down"]):
        done = place.grpo(*command)
        assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert not has_daemon(place.folder / "logs" / run)


def test_a_supervisor_that_cannot_listen_says_why_in_its_log_without_a_traceback(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    log, folder = place.run_folder() / SUPERVISOR_LOG, place.runtime / "grpo-tui"
    place.lose_daemon()
    folder.chmod(0o755)
    program = [PYTHON, "-P", "-m", "grpo_tui.supervisor.daemon", str(place.run_folder())]
    subprocess.run(program, env=place.environment, check=True)
    until(lambda: "supervisor exits: " in log.read_text())
    assert f"supervisor exits: {folder}, the folder for sockets, has mode 0755" in log.read_text()
    assert "Traceback" not in log.read_text()
    folder.chmod(0o700)
    assert place.grpo("down").returncode == 0


def test_a_folder_in_place_of_the_state_file_is_put_aside(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    state = place.run_folder() / STATE_FILE
    state.unlink()
    (state / "within").mkdir(parents=True)
    for command in (["ps"], ["status"], ["up", "--profile", "p", "--detach"], ["stop", "a", "--wait"]):
        done = place.grpo(*command)
        assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    until(state.is_file)
    (aside,) = place.run_folder().glob("state.json.*.aside")
    assert (aside / "within").is_dir()
    assert place.grpo("down").returncode == 0


@pytest.mark.extended(
    "test_a_folder_in_place_of_the_state_file_is_put_aside; test_runs.py loses the daemon and damages the state"
)
def test_a_run_without_a_supervisor_recovers_from_a_folder_in_place_of_its_state_file(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    pid = place.pid("a")
    place.lose_daemon()
    state = place.run_folder() / STATE_FILE
    state.unlink()
    state.mkdir()
    shown = place.grpo("status")
    assert shown.returncode == 1
    assert shown.stderr.startswith(
        f"{state} cannot be read: Is a directory; while the run lives, the next command to it"
    )
    assert place.grpo("ps").returncode == 0
    joined = place.grpo("up", "--profile", "p", "--detach")
    assert joined.returncode == 0, joined.stderr
    assert place.pid("a") == pid
    assert place.grpo("down").returncode == 0


def test_a_folder_in_place_of_the_supervisors_address_hides_nothing(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    address = place.run_folder() / ADDRESS_FILE
    address.unlink()
    address.mkdir()
    for command in (["ps"], ["status"], ["stop", "a", "--wait"], ["down"]):
        done = place.grpo(*command)
        assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr


def test_a_file_in_place_of_the_folder_of_runs_is_told(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    (place.folder / "logs").touch()
    done = place.grpo("up", "--profile", "p", "--detach")
    assert done.returncode == 1
    expected = f"{place.folder / 'logs'}, the folder of runs, cannot be used: File exists; "
    assert done.stderr.startswith(expected), done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" not in place.grpo("ps").stderr


@pytest.mark.parametrize("command", [["up", "--profile", "p"], ["status"]])
def test_a_command_in_a_deleted_folder_says_so(place: Workplace, command: list[str]) -> None:
    gone = place.folder / "gone"
    gone.mkdir()
    shell = 'rmdir "$PWD"; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *place.argv(*command)],
        cwd=gone,
        env=place.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "the current folder was deleted: cd to an existing one" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_service_whose_keeper_cannot_be_started_names_it_once(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    assert place.grpo("stop", "a", "--wait").returncode == 0
    keepers = place.run_folder() / "keepers"
    keepers.rename(place.run_folder() / "elsewhere")
    keepers.touch()
    assert place.grpo("start", "a", "--wait").returncode == 1
    until(lambda: not has_daemon(place.run_folder()))  # with its only service the run has failed
    why = place.status().services[0].why or ""
    assert why.startswith(f"no keeper could be started in {place.run_folder()}: "), why
