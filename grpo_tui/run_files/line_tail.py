"""Reads a growing file incrementally: whole lines, bounded bytes per call; a replaced file is read from its start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from grpo_tui.run_files.opening import open_file

NUM_CHECKED_BYTES = 64
"""Bytes before the current offset that are compared, to detect a file that was rewritten."""


class Bookmark:
    """How far a file was read, and whether it is still the same file."""

    def __init__(self) -> None:
        self.offset = 0
        self._seen: tuple[int, int, bytes] | None = None

    def is_in(self, descriptor: int) -> bool:
        """Whether an open file is the one that was read; true before the first read."""
        return self._seen is None or self._look(descriptor) == self._seen

    def move(self, descriptor: int, offset: int) -> None:
        """Set it to the offset up to which an open file was read."""
        self.offset = offset
        self._seen = self._look(descriptor)

    def _look(self, descriptor: int) -> tuple[int, int, bytes]:
        status = os.fstat(descriptor)
        start = max(0, self.offset - NUM_CHECKED_BYTES)
        return status.st_dev, status.st_ino, os.pread(descriptor, self.offset - start, start)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLines:
    """The result of one read."""

    lines: tuple[bytes, ...] = ()
    """With their ends."""
    offset: int = 0
    """Where the first of them begins."""
    is_restarted: bool = False
    """The file was replaced or truncated: what was read from it before is no longer valid."""
    num_too_long: int = 0
    """Lines that were skipped because they are longer than one read."""
    has_more: bool = False
    """Whether the next read will return lines at once."""


class LineTail:
    """Remembers how far `path` was read; the file need not exist yet."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        """Read at most `max_bytes` a call."""
        self._path = path
        self._max_bytes = max_bytes
        self._restart()

    def _restart(self) -> None:
        self.bookmark = Bookmark()
        self._is_in_long_line = False

    def read(self) -> NewLines:
        """The whole lines that were added since the last call; none of a file that cannot be read."""
        try:
            with open_file(self._path) as file:
                return self._read_from(file.fileno())
        except FileNotFoundError:
            is_restarted = self.bookmark.offset > 0
            self._restart()
            return NewLines(is_restarted=is_restarted)
        except OSError:  # no permission, a folder, a network share that is unreachable: what was read stays valid
            return NewLines()

    def _read_from(self, descriptor: int) -> NewLines:
        is_restarted = not self.bookmark.is_in(descriptor)
        if is_restarted:
            self._restart()
        offset, num_too_long = self.bookmark.offset, 0
        block = os.pread(descriptor, self._max_bytes, offset)
        taken = block[: block.rfind(b"\n") + 1]
        lines = BytesIO(taken).readlines()
        if not taken and len(block) == self._max_bytes:
            num_too_long, self._is_in_long_line, taken = int(not self._is_in_long_line), True, block
        elif taken and self._is_in_long_line:
            offset += len(lines.pop(0))
            self._is_in_long_line = False
        self.bookmark.move(descriptor, self.bookmark.offset + len(taken))
        return NewLines(
            lines=tuple(lines),
            offset=offset,
            is_restarted=is_restarted,
            num_too_long=num_too_long,
            has_more=bool(taken) and self.bookmark.offset < os.fstat(descriptor).st_size,
        )
