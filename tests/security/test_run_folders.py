"""Run folders that somebody else made: shown, never run, and nothing in them reaches the terminal as a command."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from terminal import Terminal
from workplace import IDLE, Workplace, service

from grpo_engine.wire.run_folder import KEEPERS, LOCK_FILE, METRICS_FILE, STATE_FILE, TIMELINE_FILE
from grpo_tui.supervisor.keeper.proc import identify
from grpo_tui.supervisor.state_file import boot_id

TOUCH = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch(); print('up', flush=True)"
TITLE, CLIPBOARD, C1, REVERSED, INVISIBLE = "\x1b]0;owned\x07", "\x1b]52;c;b3duZWQ=\x07", "\x9b2J", "\u202e", "\u200b"
HOSTILE = f"a{TITLE}{CLIPBOARD}{C1}{REVERSED}{INVISIBLE}b"


def sent_run(place: Workplace) -> tuple[Path, Path]:
    """A run folder as somebody sends it, whose service makes a file when it is run; and that file."""
    made = place.folder / "made"
    place.profile(service("trainer", TOUCH, made, restart='"never"'))
    place.grpo("up", "--profile", "p", "--wait", "finished", "--detach")
    made.unlink()
    folder = place.run_folder()
    (folder / STATE_FILE).unlink()
    shutil.rmtree(folder / KEEPERS)
    return folder, made


def attach(place: Workplace) -> Terminal:
    return Terminal(place.argv("attach"), cwd=place.folder, environment=place.environment)


def leave(opened: Terminal) -> str:
    """Press q; what the program wrote in all."""
    opened.press("q")
    opened.ends()
    opened.close()
    return bytes(opened.written).decode()


@pytest.mark.slow
def test_attach_runs_nothing_of_a_folder_that_was_sent(workplace: Workplace) -> None:
    folder, made = sent_run(workplace)
    opened = attach(workplace)
    opened.shows(folder.name)
    leave(opened)
    for command in (("start", "trainer"), ("down",), ("upgrade",), ("status",), ("logs", "trainer"), ("metrics",)):
        workplace.grpo(*command)
    assert not made.exists()
    assert not workplace.survivors()


@pytest.mark.slow
def test_a_state_file_that_names_a_living_process_starts_no_supervisor(workplace: Workplace) -> None:
    folder, made = sent_run(workplace)
    living = identify(os.getpid())
    assert living is not None
    entry = {"pid": living.pid, "start_ticks": living.start_ticks}
    (folder / KEEPERS).mkdir()
    state = {
        "service": "trainer", "attempt": 1, "state": "running", "keeper": entry, "main": entry, "started_at": 1.0,
        "ended_at": None, "exit_code": None, "error": None, "log_offset": 0, "ended": [], "unkillable": [],
    }  # fmt: skip
    (folder / KEEPERS / "trainer.1.json").write_text(json.dumps(state))
    assert workplace.grpo("start", folder.name, "trainer").returncode != 0
    assert not made.exists()
    assert not workplace.survivors()


@pytest.mark.slow
def test_a_ledger_that_names_a_living_process_starts_no_supervisor(workplace: Workplace) -> None:
    made = workplace.folder / "made"
    workplace.profile(service("trainer", TOUCH, made, restart='"never"'))
    workplace.grpo("up", "--profile", "p", "--wait", "finished", "--detach")
    made.unlink()
    folder = workplace.run_folder()
    shutil.rmtree(folder / KEEPERS)
    state = json.loads((folder / STATE_FILE).read_text())
    init = identify(1)
    assert init is not None
    state |= {"state": "running", "ended_at": None}
    state["ledger"] |= {"boot_id": boot_id(), "ending": None}
    state["ledger"]["services"]["trainer"] |= {"state": "starting", "processes": [[init.pid, init.start_ticks]]}
    (folder / STATE_FILE).write_text(json.dumps(state))
    for command in (("start", "trainer"), ("restart", "trainer"), ("down",), ("upgrade",)):
        assert workplace.grpo(command[0], folder.name, *command[1:]).returncode != 0
    assert not made.exists()
    assert not workplace.survivors()


@pytest.mark.slow
@pytest.mark.parametrize("is_linked", [True, False], ids=["a link", "a file that others may open"])
def test_a_lock_that_another_program_holds_starts_no_supervisor(workplace: Workplace, is_linked: bool) -> None:
    folder, made = sent_run(workplace)
    lock = workplace.folder / "lock" if is_linked else folder / LOCK_FILE
    (folder / LOCK_FILE).unlink()
    lock.touch()
    lock.chmod(0o666)
    if is_linked:
        (folder / LOCK_FILE).symlink_to(lock)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused = workplace.grpo("start", folder.name, "trainer")
    assert refused.returncode == 5
    assert not made.exists()
    assert not workplace.survivors()


@pytest.mark.slow
@pytest.mark.parametrize("name", [STATE_FILE, METRICS_FILE, f"{KEEPERS}/a.1.json", "trainer.log"])
def test_a_folder_with_a_pipe_or_a_device_is_left_out_and_hangs_no_command(workplace: Workplace, name: str) -> None:
    folder, _ = sent_run(workplace)
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if name == STATE_FILE:
        file.symlink_to("/dev/zero")
    else:
        os.mkfifo(file)
    listed = workplace.grpo("ps")
    assert listed.returncode == 0
    assert folder.name not in listed.stdout
    assert f"left out, since {file.name} is not a regular file" in listed.stderr
    assert workplace.grpo("status", folder.name).returncode == 5


@pytest.mark.slow
def test_a_state_file_of_nested_brackets_is_one_row_of_the_list(workplace: Workplace) -> None:
    folder, _ = sent_run(workplace)
    (folder / STATE_FILE).write_text('{"ledger":' + "[" * 200_000)
    listed = workplace.grpo("ps")
    assert listed.returncode == 0
    assert f"{folder.name}  unknown" in listed.stdout


@pytest.mark.slow
def test_a_folder_that_others_may_write_to_is_only_read(workplace: Workplace) -> None:
    workplace.profile(service("trainer", IDLE))
    workplace.up()
    folder = workplace.run_folder()
    folder.chmod(0o777)
    refused = workplace.grpo("stop", "trainer")
    assert refused.returncode == 1
    assert "chmod -R go-w" in refused.stderr
    assert workplace.status().state == "running"
    opened = attach(workplace)
    opened.shows("trainer", "read-only")
    assert "chmod -R go-w" in leave(opened)
    folder.chmod(0o755)
    assert workplace.grpo("down").returncode == 0


@pytest.mark.slow
def test_control_characters_in_a_run_folder_do_not_reach_the_terminal(workplace: Workplace) -> None:
    workplace.profile(service("trainer", "print('up', flush=True)", restart='"never"'))
    workplace.grpo("up", "--profile", "p", "--wait", "finished", "--detach")
    folder = workplace.run_folder()
    state = json.loads((folder / STATE_FILE).read_text())
    state["services"][0] |= {"why": HOSTILE, "health": HOSTILE}
    state["warnings"] = [{"id": "x", "severity": "error", "text": HOSTILE, "hint": HOSTILE}]
    state["gpu_note"] = HOSTILE
    (folder / STATE_FILE).write_text(json.dumps(state))
    line = {"step": 1, "time": 1.0, "metrics": {"reward/mean": 0.5, f"reward/{HOSTILE}/mean": 0.5}}
    (folder / METRICS_FILE).write_text(json.dumps(line) + "\n")
    (folder / TIMELINE_FILE).unlink()  # so that the screen shows the state file
    for command in ("status", "ps", "metrics"):
        printed = workplace.grpo(command)
        assert not [each for each in (printed.stdout + printed.stderr) if each in "\x1b\x07\x9b\u202e\u200b"], command
    opened = attach(workplace)
    opened.shows("a]0;owned")
    written = leave(opened)
    assert not [each for each in (TITLE, CLIPBOARD, C1, REVERSED, INVISIBLE) if each in written]


def test_a_metrics_line_of_nested_brackets_is_skipped(workplace: Workplace) -> None:
    workplace.profile(service("trainer", "print('up', flush=True)", restart='"never"'))
    workplace.grpo("up", "--profile", "p", "--wait", "finished", "--detach")
    (workplace.run_folder() / METRICS_FILE).write_text("[" * 20_000 + "\n")
    for command in ("status", "metrics", "ps"):
        done = workplace.grpo(command)
        assert done.returncode == 0, done.stderr
