"""Reads from the run folder what the profile planned of GPU memory. Blocks: run it in a thread."""

from __future__ import annotations

from pathlib import Path

from grpo_tui.view.gpu_rules import memory_plan
from grpo_tui.view.gpu_view import MemoryPlan
from grpo_tui.view.resolved import read_resolved


def read_memory_plan(run_folder: Path) -> MemoryPlan:
    """What `resolved.json` says; nothing but a note where it is missing or damaged."""
    try:
        return memory_plan(read_resolved(run_folder))
    except ValueError as error:
        return MemoryPlan(note=str(error))
