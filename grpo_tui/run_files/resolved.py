"""Reads the resolved profile of a run from its folder. Blocks: call it in a thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_engine.wire.run_folder import RESOLVED_FILE

MAX_BYTES = 4 << 20
"""A profile has a few kilobytes; a larger file is not one."""


def read_resolved(run_folder: Path) -> dict[str, Any]:
    """The whole profile after overlays.

    Raises:
        ValueError: its file is missing or damaged; says which.
    """
    path = run_folder / RESOLVED_FILE
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(MAX_BYTES))
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # not JSON, or not text
        raise ValueError(f"{path.name} is damaged: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path.name} is damaged: not a table")
    return document
