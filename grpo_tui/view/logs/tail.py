"""Read the end of a log file that grows, is capped, emptied or replaced, in bounded memory and time.

Opens at the tail, whatever the size. That the oldest part of a log is dropped changes nothing for who has read it. A
reader that falls behind a flood skips ahead and says how much it skipped. Lines come out as text: invalid UTF-8
replaced, of a progress bar only its latest state, no control sequences but colours.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_engine.wire.terminal_text import printable
from grpo_tui.run_files.log_file import HEADER_START, place, read_part
from grpo_tui.run_files.opening import open_file
from grpo_tui.view.format import bytes_text
from grpo_tui.view.logs.structured import readable

FIRST_BYTES = 256 * 1024
"""How much of an existing log is shown at first."""
MAX_BYTES_A_READ = 512 * 1024
"""More than this since the last read is a flood: only its last `FLOOD_BYTES` are worth showing."""
FLOOD_BYTES = 16 * 1024
"""Some screens full: who turns more of a flood into text ten times a second keeps keys waiting."""
MAX_LINE_CHARACTERS = 4000
CHECKED_BYTES = 64
"""As many bytes before the offset are compared with what was read, to notice a file that was emptied and regrew."""

_NOT_A_COLOUR = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # window titles, links
    r"|\x1b\[[0-?]*[ -/]*[@-ln-~]"  # cursor movement and the like: every CSI sequence but colours, which end in `m`
    r"|\x1b[PX^_][^\x1b]*\x1b\\"  # device control strings
    r"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"  # two-character escapes
)
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_COLOUR_OR_TAB = re.compile(r"(\x1b\[[0-9;:]*m|\t)")
_PARAMETER = re.compile(r"(?<=[\[;])(?:0*[34]8;0*(?:5;\d*|2;\d*;\d*;\d*)(?=[;m])|[^;m]*)")
"""Of a colour sequence; the numbers of a colour out of 256, or of its red, green and blue, stay together."""
_CONCEAL = re.compile(r"0*8(?::.*)?")
RESET = "\x1b[0m"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    """What one read found."""

    lines: tuple[str, ...] = ()
    """Whole lines, the oldest first."""
    open_line: str = ""
    """The last line, which has no end yet: replaces the open line of the read before."""
    is_restarted: bool = False
    """The file was replaced or emptied: these lines stand in place of all that was read before."""
    has_changed: bool = False
    """Whether there is anything to show that was not there before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """The end of one service's log."""

    service: str | None = None
    lines: tuple[str, ...] = ()
    open_line: str = ""
    """The line that is being written; a progress bar rewrites it."""
    num_dropped: int = 0
    """Lines that went out of memory; the number of `lines[0]`, counted from where reading began."""


class LogTail:
    """Remembers how far `path` was read; the file need not exist yet."""

    def __init__(self, path: Path, *, first_bytes: int = FIRST_BYTES, max_bytes: int = MAX_BYTES_A_READ) -> None:
        self._path = path
        self._first_bytes = first_bytes
        self._max_bytes = max_bytes
        self._fault: int | None = None
        """The number of the error for which the file could not be read the last time."""
        self._forget()

    def _forget(self) -> None:
        self._offset: int | None = None
        self._identity: tuple[int, int] | None = None
        self._before_offset = b""
        self._rest = b""

    def read(self) -> LogChunk:
        """Read what was added since the last call; the first call reads the tail."""
        try:
            with open_file(self._path) as file:
                chunk = self._read_from(file.fileno())
                was_unreadable, self._fault = self._fault is not None, None
                return replace(chunk, is_restarted=True, has_changed=True) if was_unreadable else chunk
        except FileNotFoundError:
            was_read = self._offset is not None
            self._forget()
            return LogChunk(is_restarted=was_read, has_changed=was_read)
        except OSError as error:
            is_known, self._fault = error.errno == self._fault, error.errno
            self._offset = None
            words = f"··· {self._path.name} cannot be read: {error.strerror or error}"
            return LogChunk() if is_known else LogChunk(lines=(words,), is_restarted=True, has_changed=True)

    def _read_from(self, descriptor: int) -> LogChunk:
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        is_restarted = self._offset is not None and not self._continues(descriptor, identity)
        if is_restarted:
            self._forget()
        self._identity = identity
        end = place(descriptor).end
        if self._offset is None:
            start = max(0, end - self._first_bytes)
        else:
            start = self._offset if end - self._offset <= self._max_bytes else self._end_of_flood(end)
        part = read_part(descriptor, start, end - start)
        if not part.data:
            self._offset = part.offset
            return LogChunk(is_restarted=is_restarted, has_changed=is_restarted, open_line=as_text(self._rest))
        is_continuous = self._offset is not None and part.follows(self._offset)
        skipped = 0 if self._offset is None else part.offset - self._offset
        self._offset = part.end
        self._before_offset = (self._before_offset + part.data if is_continuous else part.data)[-CHECKED_BYTES:]
        data = self._rest + part.data if is_continuous else _from_first_whole_line(part.data, at_start=part.is_start)
        lines = data.split(b"\n")
        self._rest = lines.pop()[-4 * MAX_LINE_CHARACTERS :]
        texts = [as_text(line) for line in lines]
        if skipped > 0:
            texts.insert(0, f"··· {bytes_text(skipped)} skipped, too fast to show; see {self._path}")
        return LogChunk(lines=tuple(texts), open_line=as_text(self._rest), is_restarted=is_restarted, has_changed=True)

    def _end_of_flood(self, end: int) -> int:
        return end - min(self._first_bytes, FLOOD_BYTES)

    def _continues(self, descriptor: int, identity: tuple[int, int]) -> bool:
        """Whether the file still holds what was read of it last, as far as it was not dropped."""
        assert self._offset is not None
        if identity != self._identity:
            return False
        start = self._offset - len(self._before_offset)
        part = read_part(descriptor, start, len(self._before_offset))
        return part.data == self._before_offset if part.follows(start) else part.offset > start


def without_colours(line: str) -> str:
    """The characters of a line without its colour sequences."""
    return COLOUR.sub("", line)


def _from_first_whole_line(block: bytes, *, at_start: bool) -> bytes:
    return block if at_start else block[block.find(b"\n") + 1 :]


def on_terminal(line: bytes) -> str:
    """A line as it would stand on a terminal once written: the latest state of a progress bar, no cursor movement."""
    latest = line.rstrip(b"\r").rpartition(b"\r")[2]
    if latest.startswith(HEADER_START):
        latest = latest.rstrip()
    return _harmless(latest.decode("utf-8", errors="replace"))


def ended(line: str) -> str:
    """A line of `on_terminal` that leaves no colour to what is printed after it."""
    colours = COLOUR.findall(line) if "\x1b" in line else ()
    return line if not colours or colours[-1] in (RESET, "\x1b[m") else line + RESET


def _harmless(text: str) -> str:
    """Text, colours and tabs: nothing that a terminal obeys, reorders or does not show."""
    if text.isprintable():
        return text
    pieces = _COLOUR_OR_TAB.split(_NOT_A_COLOUR.sub("", text))
    pieces[::2] = map(printable, pieces[::2])
    pieces[1::2] = [_without_conceal(piece) if "8" in piece else piece for piece in pieces[1::2]]
    return "".join(pieces)


def _without_conceal(colour: str) -> str:
    kept = [each for each in _PARAMETER.findall(colour) if not _CONCEAL.fullmatch(each)]
    return f"\x1b[{';'.join(kept)}m" if kept else ""


def as_text(line: bytes) -> str:
    """The same, cut where it is too long for a screen, without tabs, and readable where it is a JSON object."""
    text = on_terminal(line.rstrip(b"\r").rpartition(b"\r")[2][: 4 * MAX_LINE_CHARACTERS])
    if text.startswith("{"):
        text = _harmless(readable(text))  # JSON may hold escaped control characters
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
