"""Stock Atropos for the tests of this folder: where `make test` puts it, and what is skipped without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

STOCK = Path(sys.prefix) / "atropos"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (STOCK / ".installed").exists():
        return
    missing = pytest.mark.skip(reason=f"no stock Atropos in {STOCK}: `make {Path(sys.prefix).name}/atropos/.installed`")
    for item in items:
        if item.get_closest_marker("atropos"):
            item.add_marker(missing)


@pytest.fixture(scope="session")
def stock() -> Path:
    """The `bin` folder of a virtual environment with `atroposlib` 0.4.0."""
    return STOCK / "bin"


@pytest.fixture(scope="session")
def tiny_model_dir() -> Path:
    """The folder of `local/tiny`, in the usual cache: made at most once a machine, which takes 15 s."""
    from grpo_engine.models.loading import resolve_model

    return Path(resolve_model("local/tiny"))
