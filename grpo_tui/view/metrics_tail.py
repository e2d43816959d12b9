"""Read a growing `metrics.jsonl` piece by piece: whole lines, bounded bytes a call, a replaced file from its start.

A line that cannot be read is counted and left out; values in it that are no finite numbers are left out one by one, so
that one NaN does not hide the rest of its step.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.wire.metrics import MetricsLine
from grpo_tui.view.line_tail import LineTail

MAX_BYTES_A_READ = 1 << 20
"""A line that is longer is no line of metrics, and is passed over."""


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
        self._tail = LineTail(path, max_bytes=MAX_BYTES_A_READ)

    def read(self) -> MetricsChunk:
        """Read the whole lines that were added since the last call, at most about a megabyte of them."""
        new = self._tail.read()
        read = [read_line(line) for line in new.lines if line.strip()]
        good = tuple(line for line in read if line is not None)
        return MetricsChunk(
            lines=good,
            is_restarted=new.is_restarted,
            num_bad_lines=new.num_too_long + len(read) - len(good),
            has_more=new.has_more,
        )


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
