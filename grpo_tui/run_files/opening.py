"""Opens files of run folders to read them, whoever made the folder: no pipe blocks, links and holes are looked at."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from grpo_engine.wire import codec
from grpo_tui.paths import is_own

MAX_HOLES_BYTES = 256 << 20
"""In a file; nothing that a run writes has holes. An archive of some kB may hold a file of 100 GB, all hole."""


def open_file(path: Path) -> BinaryIO:
    """Open a regular file. In a folder that another user owns or may write to, it must not be a link.

    Raises:
        OSError: it is missing or cannot be read, is a pipe, a device or a folder, such a link, or mostly holes.
    """
    try:
        file = codec.open_file(path, follows_link=is_own(path.parent.stat()))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is followed only in a folder of your own") from None
        raise
    if may_be_hollow(os.fstat(file.fileno())) and _has_hole(file.fileno()):
        file.close()
        raise OSError(errno.EFBIG, f"longer than what was written in it, by more than {MAX_HOLES_BYTES:,} bytes")
    return file


def may_be_hollow(status: os.stat_result) -> bool:
    """Whether much of a file has no place on the disk: it was never written, or the file system compresses it."""
    return status.st_size - 512 * status.st_blocks > MAX_HOLES_BYTES


def _has_hole(descriptor: int) -> bool:
    with suppress(OSError):  # a file system that does not tell
        size = os.fstat(descriptor).st_size
        try:
            return os.lseek(descriptor, 0, os.SEEK_HOLE) < size
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
    return False
