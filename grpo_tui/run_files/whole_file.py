"""Reads a file of a run folder whole: a regular file of a length that a run writes, whoever made the folder."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from grpo_tui.run_files.opening import open_file

MAX_BYTES = 64 << 20
"""State and plan of a large run have less than 1 MB."""


def read_whole(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a file.

    Raises:
        OSError: it is missing or cannot be read, or is a pipe, a device or a folder, or longer than `max_bytes`.
    """
    with open_file(path) as file:
        require_readable(os.fstat(file.fileno()), max_bytes=max_bytes)
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # it grew
        raise _too_long(max_bytes)
    return content


def require_readable(status: os.stat_result, *, max_bytes: int = MAX_BYTES) -> None:
    """Refuse what would hang its reader or fill the memory.

    Raises:
        OSError: it is no regular file, or too long.
    """
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if status.st_size > max_bytes:
        raise _too_long(max_bytes)


def _too_long(max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"longer than {max_bytes:,} bytes")
