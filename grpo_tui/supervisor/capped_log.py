"""Capping a service's log: once it is over its limit, the older half is dropped while the service appends.

`fallocate` removes whole blocks from the beginning, at once and without loss. Where a file system cannot do that
(tmpfs, btrfs, NFS), a few of the newest megabytes are copied to the front and the file is cut behind them: bytes
appended between the last copied byte and the cut, some microseconds, are lost, and the line there may be cut.
The header that the file then has is described, and read, in `grpo_tui.run_files.log_file`.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from grpo_tui.keeper_process import CAPPED, extent
from grpo_tui.run_files.log_file import ATTEMPT_START

KEPT_BYTES_MIN = 64 * 1024
"""At least this much is kept: room for the header lines, and something below them."""
COPIED_BYTES_MAX = 4 * 1024 * 1024
"""At most this much is kept where it has to be copied."""
BLOCK_BYTES = 1 << 20
OLDER_COUNT_BYTES = 64
"""Room in the header for the older count, while a log is copied down."""
ATTEMPT_LINE_BYTES = 2000
"""This much of an attempt's first line is repeated in the header."""
LINE_SEARCH_BYTES = 4096
"""The end of a line is looked for this far behind the header; else the rest of a long line follows."""
CHECK_EVERY_S = 1.0
MIN_CHECK_S = 0.05
"""A log that fills up is checked when it should be full, but not more often than this."""

_COLLAPSE_RANGE = 0x08
_CANNOT = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
"""Errors of a file system that cannot remove blocks from a file."""

log = logging.getLogger(__name__)


class LogCapper:
    """Keeps logs below their limits; `run` is a task of the supervisor."""

    def __init__(self, limits: Mapping[Path, int]) -> None:
        """Watch these files, which need not exist yet, and those that are added to them; limits in bytes."""
        self._limits = limits
        self._sizes: dict[Path, int] = {}
        self._checked_at_s = time.monotonic()
        self._growth: dict[Path, float] = {}
        """Bytes per second between the last two checks; where a log was capped between them, between the two before."""
        self._faults: dict[Path, str] = {}

    async def run(self) -> None:
        """Check every log about once a second and cap those that are too long, until cancelled."""
        while True:
            wait_s = self.look()
            if too_long := self.too_long():
                capped = [await asyncio.to_thread(self.cap, path) for path in too_long]
                wait_s = MIN_CHECK_S if any(capped) else CHECK_EVERY_S
            await asyncio.sleep(wait_s)

    def look(self) -> float:
        """Record every size; return in how many seconds to check again, sooner where a log will be full before."""
        now_s = time.monotonic()
        seconds, self._checked_at_s = now_s - self._checked_at_s, now_s
        wait_s = CHECK_EVERY_S
        for path, limit_bytes in self._limits.items():
            size_before, size = self._sizes.get(path), _size(path)
            self._sizes[path] = size
            if size_before is not None and size >= size_before:
                self._growth[path] = (size - size_before) / seconds
            if growth := self._growth.get(path):
                wait_s = min(wait_s, (limit_bytes - size) / growth)
        return max(wait_s, MIN_CHECK_S)

    def too_long(self) -> list[Path]:
        """The logs that were over their limits at the last check."""
        return [path for path, limit_bytes in self._limits.items() if self._sizes[path] > limit_bytes]

    def cap(self, path: Path) -> bool:
        """Drop the older half of a log; return whether that was possible."""
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
    """Size of a file; 0 where there is none or it cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def cap(path: Path, limit_bytes: int) -> int:
    """Drop the older half of a log that is over its limit, while others append to it; return the bytes dropped.

    Raises:
        OSError: the file cannot be written; it is unchanged, but for a stray header line in its older half.
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
        os.fdatasync(descriptor)  # `fallocate` would flush too, and block the service meanwhile
        before = os.pread(descriptor, len(header), 0)
        os.pwrite(descriptor, _marked(header, dropped, size), 0)  # readers wait, or they could read the header at `cut`
        try:
            os.pwrite(descriptor, header, cut)  # where the file will begin, so that it never begins without a header
            _collapse(descriptor, cut)
        except OSError as error:
            if error.errno not in _CANNOT:
                os.pwrite(descriptor, before, 0)
                raise
            if size - cut > COPIED_BYTES_MAX:
                cut = size - COPIED_BYTES_MAX
                header = _header(descriptor, cut, dropped + cut)
                os.pwrite(descriptor, _marked(header, dropped, size), 0)
            _copy_down(descriptor, cut, header)
        return cut


def _collapse(descriptor: int, num_bytes: int) -> None:
    """Remove the first bytes, whole blocks, from a file."""
    libc = ctypes.CDLL(None, use_errno=True)
    begin, length = ctypes.c_longlong(0), ctypes.c_longlong(num_bytes)
    if libc.fallocate(descriptor, _COLLAPSE_RANGE, begin, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _marked(header: bytes, dropped: int, size: int) -> bytes:
    """The header, with the mark that the older count of dropped bytes holds while the file has its size."""
    first_line, newline, rest = header.partition(b"\n")
    words = CAPPED.match(first_line)
    assert words is not None
    until_cut = words[0] + f" · dropped {dropped} from {size} bytes on".encode()
    return until_cut.ljust(len(first_line)) + newline + rest


def _copy_down(descriptor: int, cut: int, header: bytes) -> None:
    """Copy what follows `cut` to the front, including what is appended meanwhile, and truncate the file behind it."""
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
        attempt = newer  # the header would overwrite it


def _header_lines(dropped: int, header_bytes: int, attempt: bytes | None, *, is_torn: bool) -> bytes:
    """The header lines, padded with spaces to `header_bytes`."""
    words = f"=== capped · dropped {dropped} bytes · header {header_bytes:05d} bytes"
    note = " · the beginning of the line below is dropped too" if is_torn else ""
    last = b"" if attempt is None else attempt + b"\n"
    return (words + note).encode().ljust(header_bytes - len(last) - 1) + b"\n" + last


def _last_attempt(descriptor: int, start: int, stop: int) -> bytes | None:
    """The last line that opens an attempt and begins between two offsets in the file, without its newline."""
    while stop > start:
        low = max(start, stop - BLOCK_BYTES)
        num_bytes = stop - low + len(ATTEMPT_START)
        # An attempt's line is found by the newline before it; the file's first line has none.
        block = os.pread(descriptor, num_bytes, low - 1) if low else b"\n" + os.pread(descriptor, num_bytes - 1, 0)
        found = block.rfind(b"\n" + ATTEMPT_START)
        if found >= 0:
            line = os.pread(descriptor, ATTEMPT_LINE_BYTES, low + found).partition(b"\n")[0]
            return line.decode(errors="ignore").encode()
        stop = low
    return None
