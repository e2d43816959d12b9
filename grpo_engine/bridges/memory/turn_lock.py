"""The lock of trainer and inference server that use the memory of one device in turn.

The trainer holds it while it steps, and a server while it loads: a server that is restarted in the middle of a step
waits for the end of that step, and a step waits for a server that loads. The kernel unlocks it when its holder exits. A
server that runs needs no lock: the trainer puts it to sleep and wakes it.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from grpo_engine.errors import BridgeError
from grpo_engine.wire.run_folder import TURN_LOCK

_POLL_S = 0.1


class TurnLock:
    """One process's side."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / TURN_LOCK
        self._descriptor: int | None = None

    def take(self, *, is_stopping: Callable[[], bool], when_held: Callable[[], None]) -> bool:
        """Wait until the other side has given the lock back; whether it was taken, and not left because of a stop.

        Args:
            when_held: called once if the lock is not free.

        Raises:
            BridgeError: the file cannot be opened, or others could hold it.
        """
        if self._descriptor is not None:
            return True
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise BridgeError(f"{self._path}: cannot be opened: {error.strerror}; choose another --handover") from None
        if not _is_own(os.fstat(descriptor)):
            os.close(descriptor)
            raise BridgeError(
                f"{self._path}: no file of this user alone, so that others could hold it without limit: remove it, or "
                "choose a --handover in a folder of your own"
            )
        has_waited = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if is_stopping():
                    os.close(descriptor)
                    return False
                if not has_waited:
                    has_waited = True
                    when_held()
                time.sleep(_POLL_S)
            else:
                self._descriptor = descriptor
                return True

    def give_back(self) -> None:
        """Unlock it, also for processes that were forked meanwhile."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


def _is_own(status: os.stat_result) -> bool:
    """Whether it is a file that this user made, with no other name; modes do not count, since some disks have none."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
