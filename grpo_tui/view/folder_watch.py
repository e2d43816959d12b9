"""Whether the folder of a run is still the one that the screen opened, and what to say when it is not.

It holds its plan open, which is written once: where another stands in its place, or none, somebody deleted it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from grpo_engine.wire.supervisor import Warning
from grpo_tui.paths import PLAN_FILE


class FolderFate(StrEnum):
    """What became of the folder."""

    THERE = "there"
    GONE = "gone"
    MADE_ANEW = "made anew"
    """Deleted, and made again by the supervisor of the run that goes on."""


class FolderWatch:
    """Remembers which folder it was."""

    def __init__(self, run_folder: Path) -> None:
        """Open it, if it is there; it is closed with this object."""
        self._path = run_folder / PLAN_FILE if (run_folder / PLAN_FILE).exists() else run_folder
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def look(self) -> FolderFate:
        """What became of it; `THERE` where nobody may know, as on a network share that is away."""
        if self._descriptor is None:
            return FolderFate.THERE
        try:
            is_same = os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            return FolderFate.GONE
        except OSError:
            return FolderFate.THERE
        return FolderFate.THERE if is_same else FolderFate.MADE_ANEW


def folder_warnings(fate: FolderFate, folder: Path, *, is_over: bool, is_supervised: bool) -> Iterator[Warning]:
    """What to tell of a folder that is not what it was.

    Args:
        is_over: whether the run is.
        is_supervised: whether its supervisor answers.
    """
    if fate is FolderFate.THERE:
        return
    if fate is FolderFate.MADE_ANEW:
        text = "this run's folder was deleted: its record begins anew"
        hint = (
            "what it held is lost: logs, metrics, rollouts and checkpoints. Metrics and rollouts are written "
            "again with the next step, the log of a service from its next start on (r restarts the selected "
            "one), a checkpoint when the next one is due"
        )
        if is_over:
            hint = "what it held is lost: logs, metrics, rollouts and checkpoints"
    elif is_over:
        text = "this run's folder was deleted or moved since it ended"
        hint = (
            f"nothing more can be read of it; what stands here was read before. Put back as {folder} it is read again"
        )
    elif is_supervised:
        text = "this run's folder was deleted or moved while it goes on"
        hint = (
            "services work on, but leave no record. The supervisor makes the folder anew at once, where it can: if "
            f"this stays, see whether {folder.parent} can be written and its disk has room. D ends the run"
        )
    else:
        text = "this run's folder is gone, and no supervisor answers"
        hint = (
            f"what stands here was read before. Services of it that still live are ended by `grpo-tui down "
            f"{folder.name}`, typed in {folder.parent.parent}"
        )
    yield Warning(id="folder", severity="warning" if is_over else "error", text=text, hint=hint)
