"""The screen after its run's supervisor was killed: it starts a new one, as the commands do, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from terminal import Terminal
from workplace import IDLE, Workplace, service

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _run(place: Workplace) -> None:
    place.up(service("vllm", IDLE), service("trainer", IDLE))


@contextmanager
def attached(place: Workplace, *options: str) -> Iterator[Terminal]:
    opened = Terminal(place.argv("attach", *options), cwd=place.folder, environment=place.environment)
    try:
        opened.shows("vllm", "q detach")
        yield opened
        opened.press("q")
        opened.ends()
    finally:
        opened.close()


def test_the_screen_replaces_a_killed_supervisor_and_its_keys_work(place: Workplace) -> None:
    with attached(place) as opened:
        pids = [place.pid(name) for name in ("vllm", "trainer")]
        place.kill_supervisor()
        opened.shows("a new one has taken the run over")
        assert [place.pid(name) for name in ("vllm", "trainer")] == pids
        opened.press("v")
        opened.until(lambda: place.service("vllm").pid not in (None, pids[0]))


def test_a_read_only_screen_starts_no_supervisor(place: Workplace) -> None:
    with attached(place, "--read-only") as opened:
        place.kill_supervisor()
        opened.shows("last known state")
        assert place.status().supervisor is None
