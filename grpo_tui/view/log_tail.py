"""Read the end of a log file that grows, is cut, or is replaced, in bounded memory and time.

Opens at the tail, whatever the size. A reader that falls behind a flood skips ahead and says how much it skipped. Lines
come out as text: invalid UTF-8 replaced, of a progress bar only its latest state, no control sequences but colours.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from grpo_tui.view.format import bytes_text

FIRST_BYTES = 256 * 1024
"""How much of an existing log is shown at first."""
MAX_BYTES_A_READ = 512 * 1024
"""More than this since the last read is a flood: only its last `FIRST_BYTES` are worth showing."""
MAX_LINE_CHARACTERS = 4000
CHECKED_BYTES = 64
"""As many bytes before the offset are compared with what was read, to notice a file that was cut and has regrown."""

_NOT_A_COLOUR = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # window titles, links
    r"|\x1b\[[0-?]*[ -/]*[@-ln-~]"  # cursor movement and the like: every CSI sequence but colours, which end in `m`
    r"|\x1b[PX^_][^\x1b]*\x1b\\"  # device control strings
    r"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"  # two-character escapes
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_COLOUR_OR_TAB = re.compile(r"(\x1b\[[0-9;:]*m|\t)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;:]*m)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    """What one read found."""

    lines: tuple[str, ...] = ()
    """Whole lines, the oldest first."""
    open_line: str = ""
    """The last line, which has no end yet: replaces the open line of the read before."""
    is_restarted: bool = False
    """The file was replaced or cut: these lines stand in place of all that was read before."""
    has_changed: bool = False
    """Whether there is anything to show that was not there before."""


class LogTail:
    """Remembers how far `path` was read; the file need not exist yet."""

    def __init__(self, path: Path, *, first_bytes: int = FIRST_BYTES, max_bytes: int = MAX_BYTES_A_READ) -> None:
        self._path = path
        self._first_bytes = first_bytes
        self._max_bytes = max_bytes
        self._forget()

    def _forget(self) -> None:
        self._offset: int | None = None
        self._identity: tuple[int, int] | None = None
        self._before_offset = b""
        self._rest = b""

    def read(self) -> LogChunk:
        """Read what was added since the last call; the first call reads the tail."""
        try:
            with self._path.open("rb") as file:
                return self._read_from(file.fileno())
        except FileNotFoundError:
            was_read = self._offset is not None
            self._forget()
            return LogChunk(is_restarted=was_read, has_changed=was_read)

    def _read_from(self, descriptor: int) -> LogChunk:
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        is_restarted = self._offset is not None and not self._continues(descriptor, identity, status.st_size)
        if is_restarted:
            self._forget()
        self._identity = identity
        if self._offset is None:
            start, skipped = max(0, status.st_size - self._first_bytes), 0
        elif status.st_size - self._offset > self._max_bytes:
            start = status.st_size - self._first_bytes
            skipped = start - self._offset
        else:
            start, skipped = self._offset, 0
        is_continuous = start == self._offset
        block = os.pread(descriptor, status.st_size - start, start)
        if not block:
            self._offset = start
            return LogChunk(is_restarted=is_restarted, has_changed=is_restarted, open_line=_as_text(self._rest))
        self._offset = start + len(block)
        self._before_offset = (self._before_offset + block if is_continuous else block)[-CHECKED_BYTES:]
        data = self._rest + block if is_continuous else _from_first_whole_line(block, at_start=start == 0)
        lines = data.split(b"\n")
        self._rest = lines.pop()[-4 * MAX_LINE_CHARACTERS :]
        texts = [_as_text(line) for line in lines]
        if skipped:
            texts.insert(0, f"··· {bytes_text(skipped)} went by too fast to show; the whole of it is in {self._path}")
        return LogChunk(lines=tuple(texts), open_line=_as_text(self._rest), is_restarted=is_restarted, has_changed=True)

    def _continues(self, descriptor: int, identity: tuple[int, int], size: int) -> bool:
        """Whether the file still begins with what was read of it."""
        assert self._offset is not None
        if identity != self._identity or size < self._offset:
            return False
        checked = len(self._before_offset)
        return os.pread(descriptor, checked, self._offset - checked) == self._before_offset


def without_colours(line: str) -> str:
    """The characters of a line without its colour sequences."""
    return _COLOUR.sub("", line)


def _from_first_whole_line(block: bytes, *, at_start: bool) -> bytes:
    return block if at_start else block[block.find(b"\n") + 1 :]


def _as_text(line: bytes) -> str:
    """One line as it would stand on a terminal once written: the latest state of a progress bar, no cursor movement."""
    latest = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
    text = latest[: 4 * MAX_LINE_CHARACTERS].decode("utf-8", errors="replace")
    text = _CONTROL.sub("", _NOT_A_COLOUR.sub("", text))
    if "\t" in text:
        text = _with_tabs_expanded(text)
    return text if len(text) <= MAX_LINE_CHARACTERS else text[:MAX_LINE_CHARACTERS] + "…"


def _with_tabs_expanded(text: str) -> str:
    """Tabs to the next multiple of eight columns; colours take no column."""
    pieces: list[str] = []
    column = 0
    for piece in _COLOUR_OR_TAB.split(text):
        if piece == "\t":
            pieces.append(" " * (8 - column % 8))
            column += len(pieces[-1])
        else:
            pieces.append(piece)
            column += 0 if piece.startswith("\x1b") else len(piece)
    return "".join(pieces)
