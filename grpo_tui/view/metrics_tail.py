"""Read a growing `metrics.jsonl` piece by piece: whole lines, bounded bytes a call, a replaced file from its start.

A line that cannot be read is counted and left out; values in it that are no finite numbers are left out one by one, so
that one NaN does not hide the rest of its step.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from grpo_engine.wire.metrics import MetricsLine

MAX_BYTES_A_READ = 1 << 20
"""A line that is longer is no line of metrics, and is passed over."""
NUM_MARK_BYTES = 64
"""So many bytes before the place that was read to are compared, to notice a file that was written anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsChunk:
    """What one read found."""

    lines: tuple[MetricsLine, ...] = ()
    is_restarted: bool = False
    """The file was replaced or cut: what was read from it before no longer holds."""
    num_bad_lines: int = 0
    has_more: bool = False
    """Whether the next read will find something at once."""


class MetricsTail:
    """Remembers how far `path` was read; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._mark = b""
        self._is_in_long_line = False

    def read(self) -> MetricsChunk:
        """Read the whole lines that were added since the last call, at most about a megabyte of them."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_restarted = self._notice_replacement(file, status)
                file.seek(self._offset)
                block = file.read(MAX_BYTES_A_READ)
        except FileNotFoundError:
            is_restarted = self._offset > 0
            self._begin_anew()
            return MetricsChunk(is_restarted=is_restarted)
        except OSError:  # no permission, a folder, a network share that is away: what was read still holds
            return MetricsChunk()
        if b"\n" not in block and len(block) == MAX_BYTES_A_READ:
            num_bad, self._is_in_long_line, taken = int(not self._is_in_long_line), True, block
            lines: list[bytes] = []
        else:
            taken = block[: block.rfind(b"\n") + 1]
            lines = taken.split(b"\n")
            if taken and self._is_in_long_line:
                lines, self._is_in_long_line = lines[1:], False
            num_bad = 0
        self._offset += len(taken)
        self._mark = (self._mark + taken)[-NUM_MARK_BYTES:]
        read = [read_line(line) for line in lines if line.strip()]
        good = tuple(line for line in read if line is not None)
        return MetricsChunk(
            lines=good,
            is_restarted=is_restarted,
            num_bad_lines=num_bad + len(read) - len(good),
            has_more=bool(taken) and self._offset < status.st_size,
        )

    def _notice_replacement(self, file: BinaryIO, status: os.stat_result) -> bool:
        """Whether what was read is not in the file any more; then it is read from its start."""
        identity = (status.st_dev, status.st_ino)
        is_replaced = self._identity is not None and (
            identity != self._identity or status.st_size < self._offset or not self._is_marked(file)
        )
        if is_replaced:
            self._begin_anew()
        self._identity = identity
        return is_replaced

    def _is_marked(self, file: BinaryIO) -> bool:
        file.seek(self._offset - len(self._mark))
        return file.read(len(self._mark)) == self._mark

    def _begin_anew(self) -> None:
        self._offset, self._identity, self._mark, self._is_in_long_line = 0, None, b"", False


def read_line(line: bytes) -> MetricsLine | None:
    """A line of the file, without what is no finite number in it; None for what is no line of metrics."""
    try:
        return MetricsLine.model_validate_json(line)
    except ValidationError:
        return _read_finite_part(line)


def _read_finite_part(line: bytes) -> MetricsLine | None:
    try:
        record = json.loads(line)
        metrics = {name: value for name, value in record["metrics"].items() if _is_finite_number(value)}
        return MetricsLine.model_validate({**record, "metrics": metrics})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _is_finite_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False
