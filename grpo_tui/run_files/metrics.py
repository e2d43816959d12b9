"""Reads `metrics.jsonl`: as it grows, or its newest lines alone.

A line that cannot be parsed, or of a step or policy version beyond `MAX_STEP`, is skipped. In the others, only values
that are not finite numbers are left out, so that one NaN does not hide the rest of its step.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.run_folder import METRICS_FILE
from grpo_tui.run_files.line_tail import LineTail
from grpo_tui.run_files.opening import open_file

MAX_BYTES_A_READ = 1 << 20
"""A longer line is not one of metrics, and is skipped."""
TAIL_BYTES = 64 * 1024
"""About a hundred steps of metrics: enough for the latest value of names that do not come with every step."""
MAX_STEP = 10**12
"""Also where a program counts tokens. A line of a later step is damaged; as the newest one it would hide all others."""
MAX_VALUE = 1e100
"""Beyond all that float32 holds; sums, products and squares of values up to it are finite. Larger ones are left out."""
MAX_NAMES = 10_000
"""Of metrics in one file; those of further names are left out. Readers keep thousands of lines, and list all names."""
MAX_NAME_CHARS = 512
"""Metrics of longer names are left out: an environment's name has at most 256, and readers search names by patterns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsChunk:
    """The result of one read."""

    lines: tuple[MetricsLine, ...] = ()
    is_restarted: bool = False
    """The file was replaced or truncated: what was read from it before is no longer valid."""
    num_bad_lines: int = 0
    has_more: bool = False
    """Whether the next read will return lines at once."""


class MetricsTail:
    """Remembers how far `path` was read; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path, max_bytes=MAX_BYTES_A_READ)
        self._names: dict[str, str] = {}
        """Each by itself: lines share them, which JSON gives an own copy of each."""

    def read(self) -> MetricsChunk:
        """Read the whole lines that were added since the last call, at most about a megabyte of them."""
        new = self._tail.read()
        if new.is_restarted:
            self._names.clear()
        read = [read_line(line) for line in new.lines if line.strip()]
        good = tuple(self._of_known_names(line) for line in read if line is not None)
        return MetricsChunk(
            lines=good,
            is_restarted=new.is_restarted,
            num_bad_lines=new.num_too_long + len(read) - len(good),
            has_more=new.has_more,
        )

    def _of_known_names(self, line: MetricsLine) -> MetricsLine:
        """The line without metrics whose names are not among the first `MAX_NAMES` of the file."""
        further = (name for name in line.metrics if name not in self._names)
        self._names.update((name, name) for name in itertools.islice(further, MAX_NAMES - len(self._names)))
        known = {own: value for name, value in line.metrics.items() if (own := self._names.get(name)) is not None}
        return line.model_copy(update={"metrics": known})


def all_steps(run_folder: Path) -> list[MetricsLine]:
    """Every step of a run, one line each, in rising order; none before the first.

    Raises:
        OSError: the file is there and cannot be read.
    """
    steps: list[MetricsLine] = []
    tail = MetricsTail(run_folder / METRICS_FILE)
    while (chunk := tail.read()).has_more or chunk.lines:
        for line in chunk.lines:
            append_step(steps, line)
    return steps


def append_step(steps: list[MetricsLine], line: MetricsLine) -> None:
    """Append a line; a trainer that resumed repeats steps, and then its newer measurement counts.

    Two lines of one step that measure different things, as an evaluation that is written by itself, become one.
    """
    while steps and steps[-1].step > line.step:
        steps.pop()
    if steps and steps[-1].step == line.step:
        before = steps.pop()
        if before.metrics.keys().isdisjoint(line.metrics):
            line = line.model_copy(update={"metrics": {**before.metrics, **line.metrics}})
    steps.append(line)


def newest_lines(run_folder: Path) -> list[MetricsLine]:
    """The lines in the last `TAIL_BYTES` of a run's metrics; none before the first step.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        with open_file(run_folder / METRICS_FILE) as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            tail = file.read(TAIL_BYTES)
    except FileNotFoundError:
        return []
    # The first line of the tail is cut, and the last may be half-written: neither can be parsed.
    return [line for raw in tail.splitlines() if (line := read_line(raw)) is not None]


def spread_lines(
    run_folder: Path, *, num_places: int, bytes_a_place: int, tail_bytes: int = TAIL_BYTES
) -> list[MetricsLine]:
    """Lines at so many places spread evenly over a run's metrics, and its newest ones, in rising order of steps.

    A run of any length costs the same; of a short one it is every line.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        with open_file(run_folder / METRICS_FILE) as file:
            size = file.seek(0, 2)
            old = max(0, size - tail_bytes)
            parts = [(old * place // num_places, bytes_a_place) for place in range(num_places)] + [(old, tail_bytes)]
            if old <= num_places * bytes_a_place:
                parts = [(0, size)]
            raws: list[bytes] = []
            for offset, length in parts:
                file.seek(offset)
                lines = file.read(length).split(b"\n")
                raws += lines[1 if offset else 0 : -1]  # the first and the last are cut
    except FileNotFoundError:
        return []
    steps: list[MetricsLine] = []
    for line in filter(None, map(read_line, raws)):
        append_step(steps, line)
    return steps


def latest_metrics(run_folder: Path) -> dict[str, float]:
    """The latest value of every metric, and `step`; empty before the first step.

    Raises:
        OSError: the file is there and cannot be read.
    """
    latest: dict[str, float] = {}
    for line in newest_lines(run_folder):
        latest |= {**line.metrics, "step": line.step}
    return latest


def read_line(line: bytes) -> MetricsLine | None:
    """Parse a line, without values that are not finite numbers; None where it is not a line of metrics."""
    try:
        read: MetricsLine | None = MetricsLine.model_validate_json(line)
    except ValidationError:
        read = _read_finite_part(line)
    if read is not None and not all(map(_is_kept, read.metrics.items())):
        read = read.model_copy(update={"metrics": dict(filter(_is_kept, read.metrics.items()))})
    return None if read is None or max(abs(read.step), abs(read.policy_version)) > MAX_STEP else read


def _is_kept(metric: tuple[str, float]) -> bool:
    return abs(metric[1]) <= MAX_VALUE and len(metric[0]) <= MAX_NAME_CHARS


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
