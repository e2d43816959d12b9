"""The files of a run that others find it by, made anew when somebody deletes the folder of a run that goes on.

Without them a living run could neither be listed nor ended, and a second one could be started beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from grpo_engine.wire.codec import write_atomically
from grpo_tui.paths import KEEPERS, PLAN_FILE, RESOLVED_FILE, SUPERVISOR_LOG
from grpo_tui.supervisor.lock import take_lock
from grpo_tui.supervisor.processes import Keeper

LOST = (
    "the folder {folder} was deleted while its run goes on: it is made anew. What was in it until now is lost (logs, "
    "metrics, checkpoints); services go on, and write their logs again from their next start"
)


class RunFolder:
    """Holds what is needed to make the folder anew."""

    def __init__(self, folder: Path) -> None:
        """Read what was written when the run was opened."""
        self.folder = folder
        self._plan = (folder / PLAN_FILE).read_bytes()
        self._resolved = (folder / RESOLVED_FILE).read_bytes() if (folder / RESOLVED_FILE).exists() else b"{}\n"

    @property
    def is_lost(self) -> bool:
        """Whether somebody deleted it, or what makes it a run's."""
        return not (self.folder / PLAN_FILE).exists()

    def make_anew(self, keepers: Iterable[Keeper]) -> None:
        """Write plan, keepers and lock again, and go on with a log of our own there.

        Raises:
            OSError: the disk is full, or the folder above is gone and cannot be made.
        """
        (self.folder / KEEPERS).mkdir(parents=True, exist_ok=True)
        take_lock(self.folder)  # a new file: the lock that we hold is on the deleted one
        log_to(self.folder / SUPERVISOR_LOG)
        for keeper in keepers:
            keeper.write_state()
        write_atomically(self.folder / RESOLVED_FILE, self._resolved, mode=0o600)
        write_atomically(self.folder / PLAN_FILE, self._plan, mode=0o600)  # last: with it the folder is a run's again


def log_to(log_file: Path) -> None:
    """From here on stdout and stderr of this process are the supervisor's log."""
    output = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
