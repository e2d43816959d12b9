"""Opens files of run folders to read them, whoever made the folder: no pipe blocks, and links are looked at."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from grpo_tui.paths import is_own


def open_file(path: Path) -> BinaryIO:
    """Open a regular file. In a folder that another user owns or may write to, it must not be a link.

    Raises:
        OSError: it is missing or cannot be read, is a pipe, a device or a folder, or such a link.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags if is_own(path.parent.stat()) else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is followed only in a folder of your own") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")
