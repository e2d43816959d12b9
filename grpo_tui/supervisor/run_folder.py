"""Restores the files of a live run whose folder was deleted.

Without them the run could not be listed or ended, and a second one could be started beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from grpo_engine.wire.codec import write_atomically
from grpo_engine.wire.run_folder import (
    KEEPERS,
    LOCK_FILE,
    PLAN_FILE,
    RESOLVED_FILE,
    SETTINGS_FILE,
    SUPERVISOR_LOG,
    TOKEN_FILE,
)
from grpo_tui.paths import is_own
from grpo_tui.supervisor.keeper.client import Keeper
from grpo_tui.supervisor.lock import take_lock

LOST = (
    "{folder} was deleted during its run and was made again. Its logs, metrics and checkpoints are lost; "
    "services keep running and write logs again from their next start"
)
LOST_IN_PART = "files of {folder} that the run needs were deleted and were written again"

RESTORED = (TOKEN_FILE, SETTINGS_FILE, RESOLVED_FILE, PLAN_FILE)
"""The plan last: it makes this a run folder again."""


class RunFolder:
    """Holds the content of the files to restore."""

    def __init__(self, folder: Path) -> None:
        """Read the files that were written when the run was opened."""
        self.folder = folder
        self._files = {name: (folder / name).read_bytes() for name in RESTORED if (folder / name).exists()}

    @property
    def is_lost(self) -> bool:
        """Whether the folder was deleted, or any of the files without which the run cannot be ended or go on.

        A deletion may still be going on when the files are written again, and so take some of them along.
        """
        return not all((self.folder / name).exists() for name in (*self._files, PLAN_FILE, LOCK_FILE))

    def restore(self, keepers: Iterable[Keeper]) -> None:
        """Write plan, lock and the files of the keepers again, and reopen the supervisor's log.

        Raises:
            OSError: the disk is full, the parent folder is gone and cannot be made, or another user took the name.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_own(self.folder.lstat()):
            raise PermissionError("another user has put something in its place")
        (self.folder / KEEPERS).mkdir(mode=0o700, exist_ok=True)
        take_lock(self.folder)  # a new file: the lock that we hold is on the deleted one
        log_to(self.folder / SUPERVISOR_LOG)
        for keeper in keepers:
            keeper.write_state()
        for name, content in self._files.items():
            write_atomically(self.folder / name, content, mode=0o600)


def log_to(log_file: Path) -> None:
    """Redirect stdout and stderr of this process to the supervisor's log."""
    output = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
