"""Read a growing `metrics.jsonl` piece by piece: whole lines, bounded bytes a call, a replaced file from its start.

A line that cannot be read is counted and left out; numbers in it that are not finite are left out one by one, so that
one NaN does not hide the rest of its step.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.wire.metrics import MetricsLine

MAX_BYTES_A_READ = 1 << 20


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

    def read(self) -> MetricsChunk:
        """Read the whole lines that were added since the last call, at most about a megabyte of them."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_restarted = self._notice_replacement((status.st_dev, status.st_ino), status.st_size)
                file.seek(self._offset)
                block = file.read(MAX_BYTES_A_READ)
                if b"\n" not in block and len(block) == MAX_BYTES_A_READ:
                    block += file.readline()
        except FileNotFoundError:
            is_restarted, self._offset, self._identity = self._offset > 0, 0, None
            return MetricsChunk(is_restarted=is_restarted)
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        read = [_read_line(line) for line in whole.splitlines() if line.strip()]
        lines = tuple(line for line in read if line is not None)
        return MetricsChunk(
            lines=lines,
            is_restarted=is_restarted,
            num_bad_lines=len(read) - len(lines),
            has_more=bool(whole) and self._offset < status.st_size,
        )

    def _notice_replacement(self, identity: tuple[int, int], size: int) -> bool:
        is_replaced = self._identity is not None and (identity != self._identity or size < self._offset)
        self._identity = identity
        if is_replaced:
            self._offset = 0
        return is_replaced


def _read_line(line: bytes) -> MetricsLine | None:
    try:
        return MetricsLine.model_validate_json(line)
    except ValidationError:
        return _read_finite_part(line)


def _read_finite_part(line: bytes) -> MetricsLine | None:
    try:
        record = json.loads(line)
        metrics = {name: value for name, value in record["metrics"].items() if math.isfinite(value)}
        return MetricsLine.model_validate({**record, "metrics": metrics})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
