"""The real screen while its terminal is resized ten times a second, on every screen."""

from __future__ import annotations

import os
import random
import time

import pytest
from terminal import Terminal
from workplace import IDLE, Workplace, service

pytestmark = pytest.mark.slow
SEED = int(os.environ.get("GRPO_FUZZ_SEED", "1"))
BETWEEN_RESIZES_S = 0.1
SCREENS = "123456"


@pytest.fixture(autouse=True)
def _run(place: Workplace) -> None:
    place.up(service("vllm", IDLE), service("trainer", IDLE))


def resize_on_every_screen(place: Workplace, num_resizes: int) -> None:
    """Resize at random, in turn on each screen; then everything is painted at the last size."""
    sizes = random.Random(SEED)
    opened = Terminal(place.argv("attach"), cwd=place.folder, environment=place.environment, columns=80, rows=24)
    try:
        opened.shows("vllm", "q detach")
        for screen in SCREENS:
            opened.press(screen)
            for _ in range(num_resizes):
                opened.resize(sizes.randint(1, 220), sizes.randint(1, 60))
                until = time.monotonic() + BETWEEN_RESIZES_S
                while time.monotonic() < until:
                    opened.listen(0.02)
            assert opened.process.poll() is None, f"it ended on screen {screen}:\n{opened.text}"
        opened.press("1")
        opened.resize(120, 36)
        opened.until(lambda: "q detach" in opened.rows[35] and "no warnings" in opened.text)
        opened.press("q")
        assert opened.ends() == 0
    finally:
        opened.close()


def test_a_resize_is_followed_where_the_environment_has_columns_and_lines(place: Workplace) -> None:
    """As with `docker exec -e COLUMNS=…`, and in programs that GNU readline was loaded into."""
    environment = {**place.environment, "COLUMNS": "80", "LINES": "24"}
    opened = Terminal(place.argv("attach"), cwd=place.folder, environment=environment, columns=100, rows=30)
    try:
        opened.until(lambda: "q detach" in opened.rows[29])
        opened.resize(120, 36)
        opened.until(lambda: "q detach" in opened.rows[35])
        opened.press("q")
        assert opened.ends() == 0
    finally:
        opened.close()


def test_resizes_end_no_screen(place: Workplace) -> None:
    resize_on_every_screen(place, 8)


@pytest.mark.extended("test_resizes_end_no_screen: 48 resizes")
def test_many_resizes_end_no_screen(place: Workplace) -> None:
    resize_on_every_screen(place, 80)
