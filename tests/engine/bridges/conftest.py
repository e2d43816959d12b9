"""A server for each file of tests, with the model's own weights before each test, and a trainer's bridge beside it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from bridging import SERVER_FLAGS, Serving, bridge_to, serving

from grpo_engine.bridges import Bridge


@pytest.fixture(scope="module")
def settings() -> dict[str, object]:
    """Settings of the bridge; a file that tests another mode overrides them."""
    return {"mode": "shared_vllm"}


@pytest.fixture(scope="module")
def dtype() -> str:
    """Of the served weights."""
    return "float32"


@pytest.fixture(scope="module")
def started(
    settings: dict[str, object], dtype: str, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    gc.unfreeze()  # commands that ran in this process froze what other tests had left, with weights that it maps
    gc.collect()
    flags = SERVER_FLAGS[str(settings["mode"])]
    with serving(model_folder, tmp_path_factory.mktemp("server"), *flags, dtype=dtype) as server:
        yield server


@pytest.fixture
def server(started: Serving) -> Serving:
    """A server of version 0."""
    started.reset()
    return started


@pytest.fixture
def bridge(settings: dict[str, object], server: Serving, tmp_path: Path) -> Iterator[Bridge]:
    with closing(bridge_to(server, settings, tmp_path)) as bridge:
        yield bridge
