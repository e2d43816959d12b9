"""The resolved profile of a run: read from its folder, which blocks, and as dotted settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_engine.wire.run_folder import RESOLVED_FILE
from grpo_tui.run_files.opening import open_file

MAX_BYTES = 4 << 20
"""A profile has a few kilobytes; a larger file is not one."""


def read_resolved(run_folder: Path) -> dict[str, Any]:
    """The whole profile after overlays.

    Raises:
        ValueError: its file is missing or damaged; says which.
    """
    from grpo_engine.config import is_too_deep  # here: the status of a run needs no settings

    path = run_folder / RESOLVED_FILE
    try:
        with open_file(path) as file:
            document = json.loads(file.read(MAX_BYTES))
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # not JSON, or not text
        raise ValueError(f"{path.name} is damaged: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path.name} is damaged: not a table")
    if is_too_deep(document):
        raise ValueError(f"{path.name} is damaged: nested too deep")
    return document


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested tables with its dotted key; an empty table is a value."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
