"""A screen whose terminal is gone exits, whatever Textual's threads do."""

from __future__ import annotations

import random
import signal
import time

import pytest
from terminal import Terminal
from workplace import IDLE, Workplace, service

pytestmark = pytest.mark.slow
EXIT_LIMIT_S = 60.0
"""Far above the two seconds that are promised: a busy machine must not fail the test, and before it never exited."""
STUCK_WRITER = (
    "import sys, time; from textual.drivers._writer_thread import WriterThread;"
    " WriterThread.run = lambda self: time.sleep(3600);"
    " sys.argv[0] = 'grpo-tui'; from grpo_tui.cli import main; main()"
)
"""Textual never takes a text out of its queue, as after a write to a terminal that is gone."""


@pytest.fixture(autouse=True)
def _run(place: Workplace) -> None:
    place.up(service("vllm", IDLE), service("trainer", IDLE))


def open_terminal(place: Workplace, *argv: str) -> Terminal:
    return Terminal(argv or place.argv("attach"), cwd=place.folder, environment=place.environment)


def assert_exits(opened: Terminal) -> None:
    try:
        opened.process.wait(EXIT_LIMIT_S)
    finally:
        opened.close()


@pytest.mark.parametrize(
    "how", ["terminal closed", pytest.param("SIGTERM", marks=pytest.mark.extended("the same with a closed terminal"))]
)
def test_a_screen_exits_also_when_the_thread_that_writes_hangs(place: Workplace, how: str) -> None:
    python = place.argv()[0]
    opened = open_terminal(place, python, "-c", STUCK_WRITER, "attach")
    time.sleep(3.0)  # nothing is written that could be waited for; until the queue is full
    assert opened.process.poll() is None
    settings = opened.settings_before
    if how == "SIGTERM":
        opened.process.send_signal(signal.SIGTERM)
        opened.process.wait(EXIT_LIMIT_S)
        assert opened.settings == settings
    else:
        opened.drop()
    assert_exits(opened)


def test_a_screen_exits_when_its_terminal_is_closed(place: Workplace) -> None:
    opened = open_terminal(place)
    opened.shows("no warnings")
    opened.drop()
    assert_exits(opened)


@pytest.mark.extended("test_a_screen_exits_when_its_terminal_is_closed: once, and with a hanging writer")
def test_screens_whose_terminals_close_at_random_moments_exit(place: Workplace) -> None:
    moments = random.Random(8)
    for _ in range(25):
        eight = [open_terminal(place) for _ in range(8)]
        until = time.monotonic() + moments.uniform(0.0, 4.0)
        while time.monotonic() < until:
            for opened in eight:
                opened.listen(0.01)
        for opened in eight:
            opened.drop()
        for opened in eight:
            assert_exits(opened)
