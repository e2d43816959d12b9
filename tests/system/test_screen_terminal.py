"""The real screen on a real terminal: open, restart, leave, come back, end; and what a dropped line leaves behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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
from workplace import POLITE, Workplace, open_workplace, service

pytestmark = pytest.mark.slow
KEYS = "q detach"
"""The frame is whole when its last line stands."""


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path) as place:
        place.profile(service("vllm", POLITE), service("trainer", POLITE))
        yield place


@contextmanager
def terminal(place: Workplace, *arguments: str, columns: int = 120, rows: int = 36) -> Iterator[Terminal]:
    """The program on a terminal; whoever leaves the test early leaves no process."""
    environment = {key: value for key, value in place.environment.items() if key != "NO_COLOR"}
    opened = Terminal(place.argv(*arguments), cwd=place.folder, environment=environment, columns=columns, rows=rows)
    try:
        yield opened
    finally:
        opened.close()


def shows_both_ready(opened: Terminal) -> None:
    opened.until(lambda: states(opened) == ["ready", "ready"] and KEYS in opened.text)


def states(opened: Terminal) -> list[str]:
    """What the table says of vllm and the trainer."""
    rows = [row.lstrip(" ▌").split() for row in opened.rows]
    return [row[2] for name in ("vllm", "trainer") for row in rows if row[:1] == [name] and len(row) > 2]


def vllm_pid(place: Workplace) -> int | None:
    """The main process of vllm; None between its exit and its next start."""
    return next(each.pid for each in place.status().services if each.name == "vllm")


def assert_restored(opened: Terminal) -> None:
    """The terminal is as it was before: the shell's screen, its cursor, echo and whole lines."""
    written = bytes(opened.written)
    assert written.count(ENTERS_ALTERNATE) == written.count(LEAVES_ALTERNATE) == 1
    assert written.rindex(SHOWS_CURSOR) > written.rindex(HIDES_CURSOR)
    assert opened.settings == opened.settings_before
    for mode in (b"1000", b"1003", b"1006", b"1004", b"2004"):  # mouse, focus, paste
        assert written.rindex(b"\x1b[?" + mode + b"l") > written.rindex(b"\x1b[?" + mode + b"h"), mode


def last_words(opened: Terminal) -> str:
    """What stands on the terminal after the screen has gone."""
    return bytes(opened.written).rpartition(LEAVES_ALTERNATE)[2].decode()


def test_a_run_is_started_restarted_left_and_ended_from_one_terminal(workplace: Workplace) -> None:
    with terminal(workplace, "--profile", "p") as opened:
        shows_both_ready(opened)
        before = workplace.pid("vllm")
        opened.press("v")
        opened.until(lambda: vllm_pid(workplace) not in (before, None))
        shows_both_ready(opened)
        opened.press("q")
        assert opened.ends() == 0
        assert_restored(opened)
        assert "detached from" in last_words(opened)
    assert workplace.status().state == "running"

    with terminal(workplace, "attach", columns=80, rows=24) as opened:
        shows_both_ready(opened)
        opened.press("D")
        opened.shows("trainer", "y yes")
        opened.press("n")
        opened.until(lambda: "y yes" not in opened.text)
        assert workplace.status().state == "running"
        opened.press("D")
        opened.shows("y yes")
        opened.press("y")
        opened.shows("the run is over")
        opened.press("q")
        assert opened.ends() == 0
        assert_restored(opened)
        assert "stopped" in last_words(opened)
    assert not workplace.survivors()


def test_keys_choose_a_service_and_another_size_shows_the_same(workplace: Workplace) -> None:
    workplace.up()
    with terminal(workplace, "attach", columns=80, rows=24) as opened:
        shows_both_ready(opened)
        opened.press(UP)
        opened.shows("▌ vllm", "log vllm")
        opened.press(DOWN)
        opened.shows("▌ trainer", "log trainer")
        for columns, rows in ((200, 50), (80, 24), (132, 43)):
            opened.resize(columns, rows)
            opened.until(lambda rows=rows: KEYS in opened.rows[rows - 1] and opened.rows[0].strip() != "")
            opened.until(lambda: states(opened) == ["ready", "ready"])
            assert all(len(row.rstrip()) <= columns for row in opened.rows)
        opened.press("q")
        assert opened.ends() == 0
    assert workplace.grpo("down").returncode == 0


def test_what_something_else_wrote_over_the_screen_is_painted_over(workplace: Workplace) -> None:
    workplace.up()
    with terminal(workplace, "attach") as opened:
        shows_both_ready(opened)
        opened.put(b"\x1b[2J\x1b[HBroadcast message from root: the machine goes down at noon")
        assert states(opened) == []
        opened.press(CTRL_L)
        shows_both_ready(opened)
        opened.until(lambda: "Broadcast" not in opened.text)
        opened.press("q")
        assert opened.ends() == 0
    assert workplace.grpo("down").returncode == 0


def test_two_people_watch_one_run_and_one_of_them_leaves(workplace: Workplace) -> None:
    workplace.up()
    with terminal(workplace, "attach") as one, terminal(workplace, "attach", columns=80, rows=24) as other:
        shows_both_ready(one)
        shows_both_ready(other)
        one.press("q")
        assert one.ends() == 0
        other.press(UP)
        other.shows("▌ vllm")
        assert workplace.grpo("stop", "vllm", "--wait").returncode == 0
        other.until(lambda: states(other)[0] == "stopped")
        other.press("q")
        assert other.ends() == 0
    assert workplace.grpo("down").returncode == 0


def test_a_line_that_drops_ends_the_screen_and_leaves_the_run_alone(workplace: Workplace) -> None:
    with terminal(workplace, "--profile", "p") as opened:
        shows_both_ready(opened)
        pids = [workplace.pid("vllm"), workplace.pid("trainer")]
        opened.drop()
        opened.process.wait(timeout=60)
    assert [workplace.pid("vllm"), workplace.pid("trainer")] == pids
    assert workplace.status().state == "running"
    assert workplace.grpo("down").returncode == 0


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.extended("SIGTERM; a line that drops"))]
)
def test_a_screen_that_is_told_to_go_restores_the_terminal(workplace: Workplace, number: signal.Signals) -> None:
    workplace.up()
    with terminal(workplace, "attach") as opened:
        shows_both_ready(opened)
        opened.process.send_signal(number)
        assert opened.ends() == 0
        assert_restored(opened)
    assert workplace.status().state == "running"
    assert workplace.grpo("down").returncode == 0


@pytest.mark.parametrize("argv", [("attach",), ("--profile", "p")])
def test_without_a_terminal_the_screen_says_so_and_starts_nothing(workplace: Workplace, argv: Sequence[str]) -> None:
    done = workplace.grpo(*argv)
    assert done.returncode in (2, 5)
    assert "\x1b[" not in done.stdout
    assert not (workplace.folder / "logs").exists()
