"""Opens files of run folders to read them, whoever made the folder: no pipe blocks, links and holes are looked at."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

from grpo_engine.wire import codec
from grpo_tui.paths import is_own


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
    try:
        codec.require_written(file)
    except OSError:
        file.close()
        raise
    return file
