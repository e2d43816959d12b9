"""For all tests: their order under pytest-xdist, the examples of hypothesis, what `extended` must state, and SIGINT."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def _same_process() -> Iterator[None]:
    """Put back the log levels, the path of modules, the environment and the garbage collector: commands change them."""
    loggers = [logging.getLogger(name) for name in (None, "grpo_engine", "httpx")]
    levels, path, environment = [each.level for each in loggers], [*sys.path], dict(os.environ)
    collects = gc.isenabled()
    yield
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)
    sys.path[:] = path
    for name in {*environment, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name in environment:
            os.environ[name] = environment[name]
        else:
            del os.environ[name]
    if collects:
        gc.enable()


def pytest_configure() -> None:
    """Choose the examples of hypothesis, and let processes of tests end on SIGINT, which a shell may ignore for them.

    Examples are the same in every run, and none is too slow: a loaded machine is no failure, and a failure is one that
    the next run shows again.
    """
    settings.register_profile(
        "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    )
    settings.load_profile("same")
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
