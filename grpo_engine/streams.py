"""The streams of a process: there, and writable to those that write, whatever has become of their other end."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

log = logging.getLogger(__name__)


def open_streams() -> None:
    """Have all three streams where a shell has closed some (`>&-`); else a file or socket would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for the whole process


def outlive_readers(names: Sequence[str]) -> None:
    """Drop what these streams (`stdout`, `stderr`) cannot write: a pipe without a reader, a full disk, a dead terminal.

    Libraries and code of the user write there too, and fail in ways of their own: tqdm waits forever for its own lock.
    """
    for name in names:
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):  # a test's
            continue
        stream.flush()
        raw = _Lasting(name, stream.fileno())
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                raw
                if isinstance(stream.buffer, io.RawIOBase)
                else io.BufferedWriter(raw),  # as PYTHONUNBUFFERED has it
                encoding=stream.encoding,
                errors="backslashreplace",  # a locale may lack letters of ours
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            ),
        )


def show_no_progress_bars(environment: dict[str, str] | os._Environ[str]) -> None:
    """Keep progress bars of libraries from logs, before any of them is imported; also in processes below this one.

    The hub's of a download are shown at a terminal nonetheless: they ask for that themselves.
    """
    environment.setdefault("TQDM_DISABLE", "1")


class _Lasting(io.FileIO):
    """A descriptor whose errors end nothing; the first is logged, where that is not stderr's own."""

    def __init__(self, name: str, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._has_failed = name == "stderr"
        self.name = f"<{name}>"

    def write(self, data: ReadableBuffer, /) -> int:
        """All of `data` counts as written where it cannot be; the next is tried again, as disks get room."""
        try:
            return super().write(data)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning("%s is not writable: %s; what is printed is lost", self.name.strip("<>"), error.strerror)
            return memoryview(data).nbytes
