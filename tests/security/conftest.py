"""For all tests of this folder: the place in which they start runs, checked to be empty afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from workplace import Workplace, open_workplace, print_logs


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    """Runs that are started by the command line; one that is still up after the test is ended by `down`."""
    with open_workplace(tmp_path) as place:
        yield place
        print_logs(tmp_path)
