"""Checks whether the folder of a run is still the one that the screen opened, and warns if not.

The check keeps the plan file open, which is written once: if the path has another file or none, the folder was deleted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from grpo_engine.wire.run_folder import PLAN_FILE
from grpo_engine.wire.supervisor import Warning


class FolderState(StrEnum):
    """State of the folder."""

    THERE = "there"
    GONE = "gone"
    RECREATED = "recreated"
    """Deleted, and created again by the supervisor."""


class FolderWatch:
    """Remembers the folder by an open file."""

    def __init__(self, run_folder: Path) -> None:
        """Open it, if it is there; it is closed with this object."""
        self._path = run_folder / PLAN_FILE if (run_folder / PLAN_FILE).exists() else run_folder
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def look(self) -> FolderState:
        """Its state; `THERE` if it cannot be checked, as on a network share that is offline."""
        if self._descriptor is None:
            return FolderState.THERE
        try:
            is_same = os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            return FolderState.GONE
        except OSError:
            return FolderState.THERE
        return FolderState.THERE if is_same else FolderState.RECREATED


def folder_warnings(state: FolderState, folder: Path, *, is_over: bool, is_supervised: bool) -> Iterator[Warning]:
    """The warning about a folder that was deleted or replaced.

    Args:
        is_over: whether the run is.
        is_supervised: whether its supervisor answers.
    """
    if state is FolderState.THERE:
        return
    if state is FolderState.RECREATED:
        text = "this run's folder was deleted; the supervisor created an empty one"
        hint = (
            "its logs, metrics, rollouts and checkpoints are lost. Metrics and rollouts are written again from the "
            "next step on, the log of a service from its next start on (r restarts it), checkpoints when due"
        )
        if is_over:
            hint = "its logs, metrics, rollouts and checkpoints are lost"
    elif is_over:
        text = "this run's folder was deleted or moved since it ended"
        hint = f"the screen shows what was read before. Move the folder back to {folder} to read more"
    elif is_supervised:
        text = "this run's folder was deleted or moved while the run goes on"
        hint = (
            "services keep running, but without logs and metrics. The supervisor recreates the folder if it can: if "
            f"this warning stays, check that {folder.parent} is writable and its disk has space. D ends the run"
        )
    else:
        text = "this run's folder is gone, and no supervisor answers"
        hint = (
            f"the screen shows what was read before. If services still run, `grpo-tui down {folder.name}` in "
            f"{folder.parent.parent} ends them"
        )
    yield Warning(id="folder", severity="warning" if is_over else "error", text=text, hint=hint)
