"""For all tests of this folder: the two places in which they start processes, each checked to be empty afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import Stage, open_stage
from workplace import Workplace, open_workplace, print_logs


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """Runs that are started by the command line; one that is still up after the test is ended by `down`."""
    with open_workplace(tmp_path) as workplace:
        yield workplace
        print_logs(tmp_path)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A run folder without a supervisor, for single keepers and processes."""
    with open_stage(tmp_path) as opened:
        yield opened
