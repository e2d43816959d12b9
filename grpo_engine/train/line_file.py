"""Files of JSON lines that a run adds to, step by step, and that a resumed run goes on with."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

MAX_WAITING_BYTES = 64 * 2**20
"""Of lines that a full disk did not take; later ones are dropped."""
_STEP_OF_OURS = re.compile(rb'\{"time":[^,"]*,"step":(\d+)[,}]')
"""As every line begins that a recorder wrote: a long one need not be read whole."""

log = logging.getLogger(__name__)


class LineFile:
    """A file that lines are added to, and that ends no run: what the disk has no room for is written once it has."""

    def __init__(self, path: Path, *, max_bytes: int | None = None) -> None:
        """Open it, or make it.

        Args:
            max_bytes: when it is longer, every second of its steps is dropped: what is old gets sparser, the newest
                stays whole.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._waiting = b""
        self._has_failed = False

    def append(self, line: bytes) -> None:
        """Write what waits and this line; each alone, so that a reader sees it at once."""
        if len(self._waiting) < MAX_WAITING_BYTES:
            self._waiting += line
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._go_on_anew()
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]  # a disk may take half of it
        except OSError as error:
            if not self._has_failed:
                log.error(
                    "%s: cannot be written: %s; training goes on, and what is missing follows once there is room",
                    self._path,
                    error.strerror,
                )
            self._has_failed = True
        else:
            if self._has_failed:
                log.info("%s: can be written again", self._path)
            self._has_failed = False
            if self._max_bytes is not None and self._file.tell() > self._max_bytes:
                self._thin_out()

    def _go_on_anew(self) -> None:
        """Make the file again that somebody deleted: what is written into the old one nobody can read."""
        renewed = self._path.open("ab", buffering=0)
        self._file.close()
        self._file = renewed

    def keep_through(self, step: int) -> int:
        """Cut the file off before the first one of a later step, or that a crash left half-written.

        Whole lines that are cut off go to a file beside it. Returns the last step that is left; 0 when there is none.
        """
        content = self._path.read_bytes()
        end, last = 0, 0
        for line in content.splitlines(keepends=True):
            number = _step_of(line)
            if number > step or not line.endswith(b"\n"):
                break
            end, last = end + len(line), max(last, number)
        rest = content[end : content.rfind(b"\n") + 1]
        if rest:
            aside = self._path.with_name(f"{self._path.stem}-set-aside{self._path.suffix}")
            log.warning("%s: what was recorded after step %d is now in %s", self._path, last, aside)
            with aside.open("ab") as file:
                file.write(rest)
        if end < len(content):
            os.truncate(self._path, end)
        return last

    def _thin_out(self) -> None:
        """Drop the lines of every second step, the newest kept; readers see the old file whole or the new one."""
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            steps = sorted(set(self._steps()), reverse=True)
            kept = set(steps[::2])
            with self._path.open("rb") as lines, beside.open("wb") as sparser:
                sparser.writelines(line for line in lines if _step_of(line) in kept)
            renewed = beside.open("ab", buffering=0)
            beside.replace(self._path)
            self._file.close()
            self._file = renewed
            log.info("%s: was over %d bytes: every second of its steps is left", self._path, self._max_bytes)
        except OSError as error:
            with suppress(OSError):
                beside.unlink()
            log.warning("%s: cannot be made shorter: %s; it grows on", self._path, error.strerror)
            self._max_bytes = 2 * self._file.tell()  # tried again then

    def _steps(self) -> Iterator[int]:
        with self._path.open("rb") as lines:
            yield from map(_step_of, lines)

    def close(self) -> None:
        """Try once more, and say what was lost."""
        if self._waiting:
            self.append(b"")
        if self._waiting:
            log.error("%s: the last %d bytes are lost: there was no room", self._path, len(self._waiting))
        self._file.close()


def _step_of(line: bytes) -> int:
    if ours := _STEP_OF_OURS.match(line):
        return int(ours[1])
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return 0  # of no step, so of no later one
