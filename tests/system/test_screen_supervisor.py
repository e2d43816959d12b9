"""The screen after its run's supervisor was killed: it starts a new one, as the commands do, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from terminal import Terminal
from workplace import POLITE, Workplace, open_workplace, service

pytestmark = pytest.mark.slow


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path) as place:
        place.profile(service("vllm", POLITE), service("trainer", POLITE))
        place.up()
        yield place
        assert place.grpo("down").returncode == 0


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


def test_the_screen_replaces_a_killed_supervisor_and_its_keys_work(workplace: Workplace) -> None:
    with attached(workplace) as opened:
        pids = [workplace.pid(name) for name in ("vllm", "trainer")]
        workplace.lose_daemon()
        opened.shows("a new one has taken the run over")
        assert [workplace.pid(name) for name in ("vllm", "trainer")] == pids
        opened.press("v")
        opened.until(lambda: workplace.status().services[0].pid not in (None, pids[0]))


def test_a_read_only_screen_starts_no_supervisor(workplace: Workplace) -> None:
    with attached(workplace, "--read-only") as opened:
        workplace.lose_daemon()
        opened.shows("last known state")
        assert workplace.status().supervisor is None
