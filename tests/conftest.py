"""For all tests: their order under pytest-xdist, the reason that an `extended` one states, and SIGINT."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def _same_process() -> Iterator[None]:
    """Give later tests the log levels and the path of modules that commands set in this process."""
    loggers = [logging.getLogger(name) for name in (None, "grpo_engine", "httpx")]
    levels, path = [each.level for each in loggers], [*sys.path]
    yield
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)
    sys.path[:] = path


def pytest_configure() -> None:
    """Let processes of tests end on SIGINT: a shell ignores it for what it starts in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files that take longest, so that both workers end at about the same time."""
    for item in items:
        for mark in item.iter_markers("extended"):
            if not mark.args:
                raise pytest.UsageError(
                    f"{item.nodeid}: @pytest.mark.extended needs a reason: what covers it in `make test`?"
                )
    if "PYTEST_XDIST_WORKER" in os.environ:
        files = json.loads((TESTS / "durations.json").read_text())["files"]
        seconds = {TESTS.parent / name: sum(by_tier.values()) for name, by_tier in files.items()}
        items.sort(key=lambda item: -seconds.get(item.path, 0.0))
