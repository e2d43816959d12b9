"""Other runs of the same folder, to compare with: what each is, and its metrics, in bounded memory and time."""

from __future__ import annotations

import errno
import json
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_engine.wire.checkpoints import ParentRun
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.run_folder import METRICS_FILE, PARENT_FILE, STATE_FILE
from grpo_tui.run_files.metrics import MAX_BYTES_A_READ, MetricsTail, newest_lines, read_line
from grpo_tui.run_files.opening import open_file
from grpo_tui.run_files.whole_file import read_whole
from grpo_tui.view.metrics.history import MetricHistory, extended
from grpo_tui.view.metrics.names import measured_as

MAX_RUNS = 200
"""The newest; a person reads no longer list."""
WHOLE_BYTES = 16 << 20
"""Of a longer file only every so many lines are read, and all evaluations."""
LINES_A_BATCH = 500
MAX_ANCESTORS = 16
"""Of a branch of a branch …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRun:
    """A run that has metrics."""

    folder: Path
    profile: str = ""
    state: str = ""
    last_step: int | None = None
    last_reward: float | None = None
    last_time: float | None = None
    """When its last step ended, in Unix seconds."""

    @property
    def run(self) -> str:
        """Its id."""
        return self.folder.name


def other_runs(run_folder: Path) -> list[OtherRun]:
    """Runs beside this one that have metrics, the newest first."""
    found: list[tuple[float, Path]] = []
    for path in run_folder.parent.glob(f"*/{METRICS_FILE}"):
        try:
            if path.parent.name != run_folder.name and path.stat().st_size:
                found.append((path.stat().st_mtime, path.parent))
        except OSError:  # ended and deleted meanwhile
            continue
    return [_look_at(folder) for _, folder in sorted(found, reverse=True)[:MAX_RUNS]]


def read_history(run_folder: Path) -> MetricHistory:
    """The metrics of a run.

    Raises:
        OSError: its file cannot be read.
    """
    path = run_folder / METRICS_FILE
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    size = status.st_size
    history = MetricHistory()
    if size <= WHOLE_BYTES:
        tail = MetricsTail(path)
        while (chunk := tail.read()).has_more or chunk.lines:
            history = extended(history, chunk.lines)
        return history
    batch: list[MetricsLine] = []
    for line in _some_lines(path, -(-size // WHOLE_BYTES)):
        batch.append(line)
        if len(batch) == LINES_A_BATCH:
            history, batch = extended(history, batch), []
    return extended(history, batch)


def read_parent(run_folder: Path) -> ParentRun | None:
    """The run that this one branched off; None where there is none, or its note is damaged."""
    try:
        return ParentRun.model_validate_json(read_whole(run_folder / PARENT_FILE))
    except (OSError, ValidationError):
        return None


def read_lineage(run_folder: Path, *, max_ancestors: int = MAX_ANCESTORS) -> MetricHistory:
    """The metrics of a run, after those of the run that it branched off up to there.

    Raises:
        OSError: its file cannot be read; those of its ancestors may be gone.
    """
    own, parent = read_history(run_folder), read_parent(run_folder)
    if parent is None or max_ancestors == 0:
        return own
    try:
        before = read_lineage(run_folder.parent / parent.run, max_ancestors=max_ancestors - 1)
    except OSError:
        return own
    inherited = [line for line in before.lines if line.step <= parent.step]
    return extended(extended(MetricHistory(), inherited), own.lines)


def _some_lines(path: Path, stride: int) -> Iterator[MetricsLine]:
    with open_file(path) as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_BYTES_A_READ), b"")):
            if number % stride == 0 or b'"eval' in raw or b'"val-' in raw:
                line = read_line(raw)
                if line is not None:
                    yield line


def _look_at(folder: Path) -> OtherRun:
    status = _read_status(folder / STATE_FILE)
    last = None
    with suppress(OSError):
        last = next(reversed(newest_lines(folder)), None)
    name = measured_as("reward/mean", last.metrics) if last else None
    return OtherRun(
        folder=folder,
        profile=str(status.get("profile") or ""),
        state=str(status.get("state") or ""),
        last_step=last.step if last else None,
        last_reward=last.metrics[name] if last and name else None,
        last_time=last.time if last else None,
    )


def _read_status(path: Path) -> dict[str, Any]:
    try:
        status = json.loads(read_whole(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return status if isinstance(status, dict) else {}
