"""JSON-lines files that a run appends to and a resumed run truncates and continues."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import IO

from grpo_engine.serving.reporting import Reporter
from grpo_engine.wire.codec import MAX_FILE_MARKS, num_marks, open_file

MAX_WAITING_BYTES = 64 * 2**20
"""Buffered while the disk is full; later lines are dropped."""
MAX_RECORD_BYTES = 256 * 2**20
"""Of one line: one that is longer counts as the end of the file, where a crash left a line incomplete."""
_STEP_OF_OURS = re.compile(rb'\{"time":[^,"]*,"step":(\d{1,19})[,}]')
"""Start of every line that a recorder wrote; long lines need not be parsed whole."""

log = logging.getLogger(__name__)


class LineFile:
    """A file of lines; a full disk ends no run: lines are buffered and written once there is space."""

    def __init__(self, path: Path, *, max_bytes: int | None = None, reporter: Reporter | None = None) -> None:
        """Open or create the file.

        Args:
            max_bytes: above this size every second step is dropped, except the newest.
            reporter: takes that it cannot be written.
        """
        self._reporter = reporter or Reporter()
        self._path = path
        self._max_bytes = max_bytes
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._waiting = b""
        self._has_failed = False

    def append(self, line: bytes) -> None:
        """Write buffered lines and this one, unbuffered, so that readers see it at once."""
        if len(self._waiting) < MAX_WAITING_BYTES:
            self._waiting += line
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._recreate()
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]  # a nearly full disk takes a part
        except OSError as error:
            if not self._has_failed:
                log.error(
                    "%s: not writable: %s; training continues, lines are buffered until there is space",
                    self._path,
                    error.strerror,
                )
            self._has_failed = True
            self._reporter.cannot_write(self._path, error, effect="lines wait in memory; training continues")
        else:
            self._reporter.can_write(self._path)
            if self._has_failed:
                log.info("%s: writable again", self._path)
            self._has_failed = False
            if self._max_bytes is not None and self._file.tell() > self._max_bytes:
                self._thin_out()

    def _recreate(self) -> None:
        """Create the file again after it was deleted: the open handle is of an unlinked file."""
        renewed = self._path.open("ab", buffering=0)
        self._file.close()
        self._file = renewed

    def keep_through(self, step: int) -> int:
        """Truncate the file before the first line of a later step, or one that a crash left incomplete.

        Complete lines that are removed go to a file beside it. Returns the last remaining step, or 0.
        """
        end, last = 0, 0
        with open_file(self._path) as file:
            lines = iter(partial(file.readline, MAX_RECORD_BYTES), b"")
            for line in takewhile(_is_complete, lines):
                number = _step_of(line)
                if number > step:
                    break
                end, last = end + len(line), max(last, number)
            file.seek(end)
            later = takewhile(_is_complete, lines)
            if first := next(later, b""):
                aside = self._path.with_name(f"{self._path.stem}-set-aside{self._path.suffix}")
                log.warning("%s: records after step %d were moved to %s", self._path, last, aside)
                with aside.open("ab") as beside:
                    beside.writelines(chain([first], later))
        if end < self._path.stat().st_size:
            os.truncate(self._path, end)
        return last

    def _thin_out(self) -> None:
        """Drop the lines of every second step but the newest; the file is replaced atomically."""
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            steps = sorted(set(self._steps()), reverse=True)
            kept = set(steps[::2])
            beside.unlink(missing_ok=True)  # of an earlier process with this number, or a planted link
            with self._path.open("rb") as lines, beside.open("xb") as sparser:
                sparser.writelines(line for line in lines if _step_of(line) in kept)
            renewed = beside.open("ab", buffering=0)
            beside.replace(self._path)
            self._file.close()
            self._file = renewed
            log.info("%s: over %d bytes; every second step was dropped", self._path, self._max_bytes)
        except OSError as error:
            with suppress(OSError):
                beside.unlink()
            log.warning("%s: not thinned out: %s; the file keeps growing", self._path, error.strerror)
            self._max_bytes = 2 * self._file.tell()  # tried again then

    def _steps(self) -> Iterator[int]:
        with self._path.open("rb") as lines:
            yield from map(_step_of, lines)

    def close(self) -> None:
        """Try to write the buffered lines once more, and log how many bytes are lost."""
        if self._waiting:
            self.append(b"")
        if self._waiting:
            log.error("%s: the last %d bytes are lost: no space on the disk", self._path, len(self._waiting))
        self._file.close()


def _is_complete(line: bytes) -> bool:
    return line.endswith(b"\n")


def _step_of(line: bytes) -> int:
    if ours := _STEP_OF_OURS.match(line):
        return int(ours[1])
    try:
        return int(json.loads(line)["step"]) if num_marks(line) <= MAX_FILE_MARKS else 0
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0  # of no step, so of no later one
