"""Which process holds a lock (`flock`) of a file, from `/proc`. Linux only."""

from __future__ import annotations

import os
from contextlib import suppress


def lock_holder(file: os.stat_result) -> int | None:
    """The process that took the lock (`flock`) of a file and has it open; None where that is not visible.

    /proc/locks alone does not tell: another file system may have a file of the same inode, which another user locks,
    and the devices that it names are not those of `stat` on btrfs and overlayfs.
    """
    with open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            if fields[1] != "FLOCK":  # "->" is one that waits
                continue
            pid, place = fields[4:6]
            if int(place.rpartition(":")[2]) == file.st_ino and int(pid) > 0 and _has_open(int(pid), file):
                return int(pid)
    return None


def _has_open(pid: int, file: os.stat_result) -> bool:
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # gone, or another user's
        return False
    for descriptor in descriptors:
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{descriptor}"), file):
                return True
    return False
