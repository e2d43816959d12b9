"""Reading a service's log whose size is capped: the newest part is kept, and every offset stays valid.

A service holds its log file open, so the file cannot be replaced. `supervisor/capped_log.py` removes its oldest blocks
in place while the service appends. The file then begins with

    === capped · dropped 128004096 bytes · header 00215 bytes
    === attempt 3 · 2026-01-31 12:00:00 · python server.py

that is: how many bytes were dropped since the log began, how long this header is (filled with spaces up to the end of a
line), and the line that opened the attempt of the first line below. The header takes the place of bytes that were
there, so absolute offset = dropped + offset in the file, always. All offsets here, and a keeper's `log_offset`, are
absolute.

Where a file system cannot remove blocks (tmpfs, btrfs, NFS), the newest part is copied to the front. While blocks are
removed or copied, the first line says from which size on the older number holds ("dropped 0 from 256000123 bytes on"),
and readers wait.

Standard library only; supervisor, screen and command line read through it. `grpo_tui/keeper_process.py`, which can
import nothing, has the pattern of the first line.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_tui.keeper_process import ATTEMPT_OPENING, extent
from grpo_tui.run_files.opening import open_file

MOVING_MS_MAX = 200
"""Capping takes less than this; a header that says longer that bytes are moved was left by a killed supervisor, and
the log is as before, but for its oldest part."""
HEADER_START = "=== capped · ".encode()
ATTEMPT_START = ATTEMPT_OPENING.encode()
"""How lines begin that the supervisor and keepers write, not the service."""
LINE_END = re.compile(r"[\r\n]")
MAX_SEARCHED_CHARS = 16_384
"""Of a line in which a pattern is searched at once, holding the GIL: some take time in proportion to the square."""
LAST_LINES = 8
LAST_LINE_BYTES = 1024
"""Read for each line that is wanted."""
LAST_LINE_CHARS = 400


@dataclass(frozen=True, slots=True)
class Place:
    """What a log file holds at the moment, as absolute offsets."""

    dropped: int
    """Of the first byte in the file."""
    content: int
    """Of the first byte below the header; a log of which nothing was dropped has no header."""
    end: int


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes read from a log."""

    data: bytes
    offset: int
    """Absolute, of the first byte: later than requested where that was dropped, 0 where the log was emptied."""
    place: Place

    def follows(self, offset: int) -> bool:
        """Whether these bytes follow `offset` directly, with nothing dropped in between."""
        return self.offset == offset >= self.place.content

    @property
    def end(self) -> int:
        """Absolute offset behind the last byte."""
        return self.offset + len(self.data)

    @property
    def is_start(self) -> bool:
        """Whether there is no older line."""
        return self.offset <= self.place.content


def place(descriptor: int) -> Place:
    """Where a log begins and ends now. Waits some milliseconds while its newest part is copied to the front."""
    for _ in range(MOVING_MS_MAX):
        now = extent(descriptor)
        if not now.is_moving:
            break
        time.sleep(0.001)
    return Place(now.dropped, now.dropped + now.header, now.dropped + now.size)


def written_so_far(log: Path) -> int:
    """Absolute offset of the end of a log; 0 where there is none."""
    try:
        with open_file(log) as file:
            return place(file.fileno()).end
    except FileNotFoundError:
        return 0


def read_part(descriptor: int, start: int, max_bytes: int, *, with_header: bool = True) -> Part:
    """Read up to `max_bytes` from an absolute offset on; dropped bytes are skipped.

    From an offset behind the end nothing is read, or the log from its start where it was emptied by a person.

    Args:
        with_header: where the log has to be read from its start, read the header lines too, in addition to `max_bytes`.
    """
    while True:
        now = place(descriptor)
        offset = start
        if start > now.end:
            offset = now.end if now.dropped else 0
        if offset < now.content:
            offset = now.dropped if with_header else now.content
        length = max_bytes + max(0, now.content - offset)
        data = os.pread(descriptor, length, offset - now.dropped)
        if place(descriptor).dropped == now.dropped:  # else the log was capped between the two reads
            return Part(data, offset, now)


def searched_lines(data: bytes) -> Iterator[str]:
    """The lines of a part, also those that a progress bar overwrote; one that is too long to be searched in pieces."""
    for line in LINE_END.split(data.decode(errors="replace")):
        for start in range(0, len(line) or 1, MAX_SEARCHED_CHARS):
            yield line[start : start + MAX_SEARCHED_CHARS]


def last_lines(path: Path, offset: int, num_lines: int = LAST_LINES) -> tuple[str, ...]:
    """The last lines that an attempt wrote, from `offset` in its log on; text that a progress bar overwrote is left
    out."""
    num_bytes = num_lines * LAST_LINE_BYTES
    try:
        with open_file(path) as file:
            end = place(file.fileno()).end
            part = read_part(file.fileno(), max(min(offset, end), end - num_bytes), num_bytes, with_header=False)
    except OSError:
        return ()
    text = part.data.decode(errors="replace")
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return tuple(line[:LAST_LINE_CHARS] for line in lines if line)[-num_lines:]
