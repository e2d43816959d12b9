"""The real screen in a real terminal: open, restart, detach, attach, end; and what a dropped connection leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from terminal import (
    CTRL_L,
    DOWN,
    ENTERS_ALTERNATE,
    HIDES_CURSOR,
    LEAVES_ALTERNATE,
    SHOWS_CURSOR,
    UP,
    Terminal,
)
from workplace import IDLE, Workplace, service, until

from grpo_tui.keeper_process import read_stat
from grpo_tui.ui.terminal.resumable_driver import RESTORES_TITLE, SAVES_TITLE

pytestmark = pytest.mark.slow
KEYS = "q detach"
"""The end of the last line: the frame is complete."""


@pytest.fixture(autouse=True)
def _profile(place: Workplace) -> None:
    place.profile(service("vllm", IDLE), service("trainer", IDLE))


@contextmanager
def terminal(place: Workplace, *arguments: str, columns: int = 120, rows: int = 36) -> Iterator[Terminal]:
    """The program in a terminal; it is killed if it still runs at the end."""
    environment = {key: value for key, value in place.environment.items() if key != "NO_COLOR"}
    opened = Terminal(place.argv(*arguments), cwd=place.folder, environment=environment, columns=columns, rows=rows)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def attached(place: Workplace, *, columns: int = 120, rows: int = 36) -> Iterator[Terminal]:
    """A screen on a new run; it still runs at the end, and quits."""
    place.up()
    with terminal(place, "attach", columns=columns, rows=rows) as opened:
        until_both_are_ready(opened)
        yield opened
        quit_screen(opened)


def until_both_are_ready(opened: Terminal) -> None:
    opened.until(lambda: states(opened) == ["ready", "ready"] and KEYS in opened.text)


def quit_screen(opened: Terminal) -> str:
    """Press q and wait; what the terminal shows below the shell's earlier output."""
    opened.press("q")
    assert opened.ends() == 0
    return bytes(opened.written).rpartition(LEAVES_ALTERNATE)[2].decode()


def states(opened: Terminal) -> list[str]:
    """The states of vllm and the trainer in the table."""
    rows = [row.lstrip(" ▌").split() for row in reversed(opened.rows)]  # messages about services are below the table
    shown = {row[0]: row[2] for row in rows if len(row) > 2}
    return [shown[name] for name in ("vllm", "trainer") if name in shown]


def assert_restored(opened: Terminal) -> None:
    """The terminal is as before: the shell's screen, its cursor, echo and line mode."""
    written = bytes(opened.written)
    assert written.count(ENTERS_ALTERNATE) == written.count(LEAVES_ALTERNATE) == 1
    assert written.rindex(SHOWS_CURSOR) > written.rindex(HIDES_CURSOR)
    assert opened.settings == opened.settings_before
    assert written.rindex(RESTORES_TITLE.encode()) > written.rindex(b"\x1b]0;") > written.index(SAVES_TITLE.encode())
    for mode in (b"1000", b"1003", b"1006", b"1004", b"2004"):  # mouse, focus, paste
        assert written.rindex(b"\x1b[?" + mode + b"l") > written.rindex(b"\x1b[?" + mode + b"h"), mode


def test_a_run_is_started_restarted_left_and_ended_from_one_terminal(place: Workplace) -> None:
    with terminal(place, "--profile", "p") as opened:
        until_both_are_ready(opened)
        before = place.pid("vllm")
        opened.press("v")
        opened.until(lambda: place.service("vllm").pid not in (before, None))
        until_both_are_ready(opened)
        assert "detached from" in quit_screen(opened)
        assert_restored(opened)
    assert place.status().state == "running"

    with terminal(place, "attach", columns=80, rows=24) as opened:
        until_both_are_ready(opened)
        opened.press("D")
        opened.shows("trainer", "y yes")
        opened.press("n")
        opened.until(lambda: "y yes" not in opened.text)
        assert place.status().state == "running"
        opened.press("D")
        opened.shows("y yes")
        opened.press("y")
        opened.shows("the run is over")
        place.succeed("resume", place.run_folder().name, "--detach")  # in another terminal
        until_both_are_ready(opened)
        place.succeed("down")
        opened.shows("the run is over", "grpo-tui resume")
        assert "stopped" in quit_screen(opened)
        assert_restored(opened)
    assert not place.survivors()


def test_keys_select_a_service_and_the_screen_follows_the_size_of_the_terminal(place: Workplace) -> None:
    with attached(place, columns=80, rows=24) as opened:
        opened.press(UP)
        opened.shows("▌ vllm", "log vllm")
        opened.press(DOWN)
        opened.shows("▌ trainer", "log trainer")
        for columns, rows in ((200, 50), (80, 24), (132, 43)):
            opened.resize(columns, rows)
            opened.until(lambda rows=rows: KEYS in opened.rows[rows - 1] and opened.rows[0].strip() != "")
            opened.until(lambda: states(opened) == ["ready", "ready"])
            assert all(len(row.rstrip()) <= columns for row in opened.rows)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal."""
    stat = read_stat(pid)
    return stat is not None and stat.state == "T"


def test_ctrl_l_repaints_what_another_program_wrote_and_so_does_a_screen_that_was_stopped(place: Workplace) -> None:
    with attached(place) as opened:
        while opened.listen(0.3):
            pass  # the rest of a frame: in the middle of a control sequence what follows would be part of it
        opened.put(b"\x1b[2J\x1b[HBroadcast message from root: the machine goes down at noon")
        assert states(opened) == []
        opened.press(CTRL_L)
        until_both_are_ready(opened)
        opened.until(lambda: "Broadcast" not in opened.text)
        os.kill(opened.process.pid, signal.SIGSTOP)
        opened.until(lambda: is_stopped(opened.process.pid))
        opened.put(b"\x1b[2J\x1b[H$ ")
        os.kill(opened.process.pid, signal.SIGCONT)
        until_both_are_ready(opened)
        opened.press("2")
        opened.until(lambda: states(opened) == [])
        opened.press("1")
        until_both_are_ready(opened)


@pytest.mark.parametrize("command", ["--profile p", "up --profile p"], ids=["screen", "up"])
def test_a_terminal_that_closes_ends_the_command_and_no_service(place: Workplace, command: str) -> None:
    with terminal(place, *command.split()) as opened:
        if command.startswith("up"):
            until(lambda: place.grpo("ps").stdout.count("running") == 1)
        else:
            until_both_are_ready(opened)
        pids = [place.pid("vllm"), place.pid("trainer")]
        opened.drop()
        opened.process.wait(timeout=60)
    assert [place.pid("vllm"), place.pid("trainer")] == pids
    assert place.status().state == "running"
    assert place.status().supervisor is not None


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.extended("SIGTERM; a closed terminal"))]
)
def test_a_signal_ends_the_screen_and_restores_the_terminal(place: Workplace, number: signal.Signals) -> None:
    place.up()
    with terminal(place, "attach") as opened:
        until_both_are_ready(opened)
        opened.process.send_signal(number)
        assert opened.ends() == 0
        assert_restored(opened)
    assert place.status().state == "running"


@pytest.mark.parametrize("command", ["attach", "--profile p"])
def test_without_a_terminal_the_screen_starts_nothing(place: Workplace, command: str) -> None:
    done = place.grpo(*command.split())
    assert done.returncode in (2, 5)
    assert "\x1b[" not in done.stdout
    assert not (place.folder / "logs").exists()


def test_keys_of_another_encoding_than_utf_8_end_nothing(place: Workplace) -> None:
    """An ü of a terminal in Latin-1 is one byte that begins no character; so may be a paste."""
    with attached(place) as opened:
        for text in ("ü", "\x1b[200~Größe\x1b[201~", "ÿþ"):
            opened.press(text, encoding="latin-1")
        opened.press("?")
        opened.shows("esc closes")
        opened.press("\x1b")
        opened.until(lambda: "esc closes" not in opened.text)
