"""A service's log, capped in size: the newest part is kept, and a reader always knows where in the log it is.

A service holds its log file itself, so the file cannot be exchanged. It is cut at its beginning instead, under the
hands of whoever appends: `fallocate` takes whole blocks out of it, at once and without loss. The file then begins with

    === capped · dropped 128004096 bytes · header 00215 bytes
    === attempt 3 · 2026-01-31 12:00:00 · python server.py

that is, with how many bytes were dropped since the log began, how long these lines are together with the spaces that
fill them up to the end of a line, and the line that opened the attempt from which the first line below comes. The lines
stand in place of the bytes that were there, so that absolute offset = dropped + offset in the file, for ever.
All offsets here, and a keeper's `log_offset`, are absolute.

Where a file system cannot take blocks out (tmpfs, btrfs, NFS), a few of the newest megabytes are copied to the front
and the file is cut behind them. What is appended between the last copied byte and the cut, some microseconds, is lost,
and the line at that place may be torn. Until the cut the first line says from which size on the older number holds
("dropped 0 from 256000123 bytes on"), and readers wait.

Standard library only; supervisor, screen and command line read through it.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_tui.supervisor.keeper import CAPPED, extent

KEPT_BYTES_MIN = 64 * 1024
"""At least so much is kept: room for the header lines, and something below them."""
COPIED_BYTES_MAX = 4 * 1024 * 1024
"""At most so much is kept where it has to be copied."""
BLOCK_BYTES = 1 << 20
MOVING_MS_MAX = 200
"""Who copies a log takes less than this, or was killed and has left the log as it was, but for its oldest part."""
OLDER_COUNT_BYTES = 64
"""Room in the header for the older count, while a log is copied down."""
ATTEMPT_LINE_BYTES = 2000
"""So much of an attempt's first line is repeated in the header."""
LINE_SEARCH_BYTES = 4096
"""So far behind the header the end of a line is looked for; else the rest of a long line follows."""
LOOK_EVERY_S = 1.0
LOOK_SOONEST_S = 0.05
"""A log that fills up is looked at when it should be full, but not more often than this."""

HEADER_START = "=== capped · ".encode()
ATTEMPT_START = b"=== attempt "
"""How lines begin that are ours, not the service's."""
LAST_LINES = 8
LAST_LINE_BYTES = 1024
"""Read for each line that is wanted."""
LAST_LINE_CHARS = 400

_COLLAPSE_RANGE = 0x08
_CANNOT = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
"""How a file system says that it cannot take blocks out of a file."""

log = logging.getLogger(__name__)


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """What a log file holds at the moment, as absolute offsets."""

    dropped: int
    """Of the first byte that is there."""
    content: int
    """Of the first byte below our header; where nothing was dropped there is no header."""
    end: int


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes read from a log."""

    data: bytes
    offset: int
    """Absolute, of the first byte: later than asked for where that is dropped, 0 where the log began anew."""
    place: Place

    def follows(self, offset: int) -> bool:
        """Whether these are the very bytes that came after `offset`, with nothing lost in between."""
        return self.offset == offset >= self.place.content

    @property
    def end(self) -> int:
        """Absolute offset behind the last byte."""
        return self.offset + len(self.data)

    @property
    def is_start(self) -> bool:
        """Whether no older line is there."""
        return self.offset <= self.place.content


def place(descriptor: int) -> Place:
    """Where a log begins and ends now. Waits while its newest part is being copied to the front, some milliseconds."""
    for _ in range(MOVING_MS_MAX):
        now = extent(descriptor)
        if not now.is_moving:
            break
        time.sleep(0.001)
    return Place(now.dropped, now.dropped + now.header, now.dropped + now.size)


def written_so_far(log: Path) -> int:
    """Absolute offset of the end of a log; 0 where there is none."""
    try:
        with log.open("rb", buffering=0) as file:
            return place(file.fileno()).end
    except FileNotFoundError:
        return 0


def read_part(descriptor: int, start: int, max_bytes: int, *, with_header: bool = True) -> Part:
    """Read up to `max_bytes` from an absolute offset on; what is dropped is passed over.

    From an offset behind the end nothing is read, or the log from its start when it was emptied by hand.

    Args:
        with_header: where the log has to be read from its start, read our header lines too, on top of `max_bytes`.
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
        if place(descriptor).dropped == now.dropped:  # else the bytes may come from before and after a cut
            return Part(data, offset, now)


def last_lines(path: Path, offset: int, num_lines: int = LAST_LINES) -> tuple[str, ...]:
    """The last lines that an attempt wrote, from `offset` in its log on; what a progress bar overwrote is left out."""
    num_bytes = num_lines * LAST_LINE_BYTES
    try:
        with path.open("rb") as file:
            end = place(file.fileno()).end
            part = read_part(file.fileno(), max(min(offset, end), end - num_bytes), num_bytes, with_header=False)
    except OSError:
        return ()
    text = part.data.decode(errors="replace")
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return tuple(line[:LAST_LINE_CHARS] for line in lines if line)[-num_lines:]


# --- capping ----------------------------------------------------------------------------------------------------------


class LogCapper:
    """Keeps logs below their limits: `run` is a task of the supervisor's."""

    def __init__(self, limits: Mapping[Path, int]) -> None:
        """Watch these files, which need not exist yet; limits in bytes."""
        self._limits = dict(limits)
        self._sizes: dict[Path, int] = {}
        self._looked_at_s = time.monotonic()
        self._growth: dict[Path, float] = {}
        """Bytes a second between the last two looks; where a log was capped between them, before."""
        self._faults: dict[Path, str] = {}

    async def run(self) -> None:
        """Look at every log about once a second and cap those that are too long, until cancelled."""
        while True:
            wait_s = self.look()
            if too_long := self.too_long():
                capped = [await asyncio.to_thread(self.cap, path) for path in too_long]
                wait_s = LOOK_SOONEST_S if any(capped) else LOOK_EVERY_S
            await asyncio.sleep(wait_s)

    def look(self) -> float:
        """Note every size; in how many seconds to look again: sooner where a log will be full before."""
        now_s = time.monotonic()
        seconds, self._looked_at_s = now_s - self._looked_at_s, now_s
        wait_s = LOOK_EVERY_S
        for path, limit_bytes in self._limits.items():
            size_before, size = self._sizes.get(path), _size(path)
            self._sizes[path] = size
            if size_before is not None and size >= size_before:
                self._growth[path] = (size - size_before) / seconds
            if growth := self._growth.get(path):
                wait_s = min(wait_s, (limit_bytes - size) / growth)
        return max(wait_s, LOOK_SOONEST_S)

    def too_long(self) -> list[Path]:
        """The logs that were over their limits at the last look."""
        return [path for path, limit_bytes in self._limits.items() if self._sizes[path] > limit_bytes]

    def cap(self, path: Path) -> bool:
        """Drop the older half of a log; whether that was possible."""
        limit_bytes = self._limits[path]
        try:
            dropped_bytes = cap(path, limit_bytes)
        except OSError as error:
            if self._faults.get(path) != str(error):
                log.info("%s: cannot be capped to %d bytes: %s", path.name, limit_bytes, error)
                self._faults[path] = str(error)
            return False
        self._faults.pop(path, None)
        log.info("%s: dropped its oldest %d bytes; its limit is %d", path.name, dropped_bytes, limit_bytes)
        return True


def _size(path: Path) -> int:
    """Of a file; 0 when there is none, also where nothing can be seen."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def cap(path: Path, limit_bytes: int) -> int:
    """Drop the older half of a log that is over its limit, while others append to it; how many bytes were dropped.

    Raises OSError when the file cannot be written; it is as it was then, or its older half has a stray header line.
    """
    with path.open("r+b", buffering=0) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        block_bytes = min(os.fstatvfs(descriptor).f_bsize, KEPT_BYTES_MIN)
        cut = (size - max(limit_bytes // 2, KEPT_BYTES_MIN)) // block_bytes * block_bytes
        if size <= limit_bytes or cut <= 0:
            return 0
        dropped = extent(descriptor).dropped
        header = _header(descriptor, cut, dropped + cut)
        os.fdatasync(descriptor)  # `fallocate` would do that, and keep the service waiting meanwhile
        os.pwrite(descriptor, header, cut)  # where the file will begin: so at no time it begins without
        try:
            _collapse(descriptor, cut)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            if size - cut > COPIED_BYTES_MAX:
                cut = size - COPIED_BYTES_MAX
                header = _header(descriptor, cut, dropped + cut)
            _copy_down(descriptor, cut, header, dropped)
        return cut


def _collapse(descriptor: int, num_bytes: int) -> None:
    """Take the first bytes, whole blocks, out of a file."""
    libc = ctypes.CDLL(None, use_errno=True)
    begin, length = ctypes.c_longlong(0), ctypes.c_longlong(num_bytes)
    if libc.fallocate(descriptor, _COLLAPSE_RANGE, begin, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _copy_down(descriptor: int, cut: int, header: bytes, dropped: int) -> None:
    """Copy what follows `cut` to the front, also what is appended meanwhile, and cut the file behind it."""
    size = os.fstat(descriptor).st_size
    first_line, newline, rest = header.partition(b"\n")
    words = CAPPED.match(first_line)
    assert words is not None
    until_cut = words[0] + f" · dropped {dropped} from {size} bytes on".encode()
    os.pwrite(descriptor, until_cut.ljust(len(first_line)) + newline + rest, 0)
    copied = len(header)
    while block := os.pread(descriptor, min(BLOCK_BYTES, cut), cut + copied):
        os.pwrite(descriptor, block, copied)
        copied += len(block)
    os.ftruncate(descriptor, copied)
    os.pwrite(descriptor, header, 0)


def _header(descriptor: int, cut: int, dropped: int) -> bytes:
    """Header lines that fill the file from `cut` to the end of a line."""
    attempt, content = _last_attempt(descriptor, 0, cut), cut
    while True:
        shortest = OLDER_COUNT_BYTES + len(_header_lines(dropped, 0, attempt, is_torn=True))
        before, content = content, max(content, cut + shortest)
        searched = os.pread(descriptor, LINE_SEARCH_BYTES, content - 1)
        newline = searched.find(b"\n")
        content += max(newline, 0)
        newer = _last_attempt(descriptor, before, content)
        if newer is None:
            return _header_lines(dropped, content - cut, attempt, is_torn=newline < 0)
        attempt = newer  # it would be written over


def _header_lines(dropped: int, header_bytes: int, attempt: bytes | None, *, is_torn: bool) -> bytes:
    """The lines, filled up with spaces to `header_bytes`."""
    words = f"=== capped · dropped {dropped} bytes · header {header_bytes:05d} bytes"
    note = " · the beginning of the line below is dropped too" if is_torn else ""
    last = b"" if attempt is None else attempt + b"\n"
    return (words + note).encode().ljust(header_bytes - len(last) - 1) + b"\n" + last


def _last_attempt(descriptor: int, start: int, stop: int) -> bytes | None:
    """The last line that opens an attempt and begins between two offsets in the file, without its end."""
    while stop > start:
        low = max(start, stop - BLOCK_BYTES)
        num_bytes = stop - low + len(ATTEMPT_START)
        # An attempt's line is told by the end of the line before it; the file's first line has none.
        block = os.pread(descriptor, num_bytes, low - 1) if low else b"\n" + os.pread(descriptor, num_bytes - 1, 0)
        found = block.rfind(b"\n" + ATTEMPT_START)
        if found >= 0:
            line = os.pread(descriptor, ATTEMPT_LINE_BYTES, low + found).partition(b"\n")[0]
            return line.decode(errors="ignore").encode()
        stop = low
    return None
