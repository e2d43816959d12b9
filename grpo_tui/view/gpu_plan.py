"""Reads from the run folder what the profile planned of GPU memory. Blocks: run it in a thread."""

from __future__ import annotations

import json
from pathlib import Path

from grpo_tui.paths import RESOLVED_FILE
from grpo_tui.view.gpu_rules import memory_plan
from grpo_tui.view.gpu_view import MemoryPlan

MAX_BYTES = 4 << 20
"""A profile has some kilobytes; more is not one."""


def read_memory_plan(run_folder: Path) -> MemoryPlan:
    """What `resolved.json` says; nothing but a note where it is missing or damaged."""
    path = run_folder / RESOLVED_FILE
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(MAX_BYTES))
    except OSError as error:
        return MemoryPlan(note=f"{path.name} cannot be read: {error.strerror or error}")
    except ValueError as error:  # not JSON, or not text
        return MemoryPlan(note=f"{path.name} is damaged: {error}")
    if not isinstance(document, dict):
        return MemoryPlan(note=f"{path.name} is damaged: not a table")
    return memory_plan(document)
