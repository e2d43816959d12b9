"""Which process holds a lock (`flock`) of a file, from `/proc`. Linux only.

/proc/locks is not read: it lists the locks of all users, takes time with the square of their number, and the inodes in
it may be those of another file system.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress


def lock_holder(file: os.stat_result, is_asked_of: Callable[[int], bool] = lambda _: True) -> int | None:
    """The process that took the lock (`flock`) of a file and has it open; None where that is not visible.

    Args:
        is_asked_of: whether a process, by its pid, can be the one; others are not looked at.
    """
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with suppress(OSError):  # gone, or another user's
            if os.stat(f"/proc/{pid}").st_uid in (0, file.st_uid) and is_asked_of(pid) and _has_locked(pid, file):
                return pid
    return None


def _has_locked(pid: int, file: os.stat_result) -> bool:
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{descriptor}"), file):
                with open(f"/proc/{pid}/fdinfo/{descriptor}") as lines:
                    if any(_is_lock_of(pid, line.split()) for line in lines):
                        return True
    return False


def _is_lock_of(pid: int, fields: list[str]) -> bool:
    """Of a line `lock: 1: FLOCK ADVISORY WRITE 4711 fe:00:1234 0 EOF`: not one that an ancestor took."""
    return fields[:1] == ["lock:"] and fields[2] == "FLOCK" and fields[5] == str(pid)
