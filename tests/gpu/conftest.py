"""What all tests on a GPU have in common."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let libraries warn: their compilers and profilers do so on a GPU only, about matters that are not ours."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)


@pytest.fixture(autouse=True)
def free_gpu_memory() -> Iterator[None]:
    """Free the memory of earlier tests: models with hooks refer to themselves, and so outlive their test.

    And forget their compiled code: of the layers of eight kinds of models torch would compile no more, and layers that
    are not compiled take more memory than is planned.
    """
    if torch.cuda.is_available():
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    yield
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)  # a test may have limited it
