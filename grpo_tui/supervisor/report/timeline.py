"""Writes the timeline, `events.jsonl`: the supervisor's events, kept so that a screen can go back in time.

`grpo_tui.run_files.timeline` says what its lines are. Written by one supervisor at a time, in a thread; a full disk, a
hanging one or a deleted folder loses lines, and has no other effect. Older usage samples are thinned out and the oldest
lines dropped, so that the file of a run of weeks stays below `MAX_BYTES`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import to_line
from grpo_engine.wire.run_folder import TIMELINE_FILE
from grpo_engine.wire.supervisor import (
    Event,
    RunStatus,
    ServiceChanged,
    ServiceStatus,
    Snapshot,
    UsageSampled,
    read_from_daemon,
)
from grpo_tui.run_files.timeline import USAGE_START, after_event

MAX_BYTES = 32_000_000
"""About two days of four services in full detail, and weeks with older samples thinned; read in about a second."""
KEPT_SHARE = 0.7
"""Of `MAX_BYTES`, after older lines were thinned or dropped, so that this is rare."""
RECENT_SHARE = 0.25
"""The newest part of the file is never thinned."""
USAGE_EVERY_S = 5.0
MOVED_BYTES, MOVED_SHARE = 64 << 20, 0.05
"""A sample in which memory changed by more than both is kept at once."""
GATHER_S = 0.25
"""Lines that arrive within this time are written together."""
MAX_WAITING_LINES = 5000
"""Held in memory at most while a disk hangs."""
_COUNTED = re.compile(r"\d+(?:\.\d+)?")
log = logging.getLogger(__name__)


class Timeline:
    """Collects events for `events.jsonl`; `keep` never blocks, `run` is a task of the supervisor."""

    def __init__(self, run_folder: Path, status: Callable[[], RunStatus], *, max_bytes: int = MAX_BYTES) -> None:
        """Append to the timeline of a run; `status` returns the document for snapshots."""
        self._path = run_folder / TIMELINE_FILE
        self._status = status
        self._max_bytes = max_bytes
        self._waiting: deque[bytes] = deque()
        self._has_news = asyncio.Event()
        self._one_at_a_time = threading.Lock()
        self._needs_snapshot = False
        self._has_written = False
        self._number = 0
        self._last_lines: dict[str, tuple[object, ...]] = {}
        self._usage: UsageSampled | None = None
        self._wants_usage = True
        self._fault: str | None = None

    def begin(self) -> None:
        """Start with a snapshot; it replaces the lines that wait to be written."""
        self._needs_snapshot = False
        self._waiting.clear()
        self._queue(to_line(Snapshot(number=self._number, time=time.time(), status=self._status())))

    def keep(self, event: Event) -> None:
        """Queue an event, unless it adds nothing to the line before it."""
        self._number = event.number
        if isinstance(event, ServiceChanged):
            news = _news(event.service)
            if self._last_lines.get(event.service.name) == news:
                return
            self._wants_usage = self._wants_usage or self._last_lines.get(event.service.name, (None,))[0] != news[0]
            self._last_lines[event.service.name] = news
        elif isinstance(event, UsageSampled):
            if not (self._wants_usage or _is_worth_keeping(self._usage, event)):
                return
            self._usage, self._wants_usage = event, False
            event = _without_processes(event)
        self._queue(to_line(event))

    async def run(self) -> None:
        """Write queued events until cancelled."""
        while True:
            await self._has_news.wait()
            await self.write()
            await asyncio.sleep(GATHER_S)

    async def write(self) -> None:
        """Write now. Lines that cannot be written are lost, logged once, and replaced by a snapshot."""
        self._has_news.clear()
        if self._needs_snapshot:
            self.begin()
        try:
            await asyncio.to_thread(self._append)
        except OSError as error:
            self._needs_snapshot = True
            if self._fault is None:
                log.error("%s cannot be written: %s; the run continues without it", self._path, error.strerror or error)
            self._fault = str(error)
        else:
            self._fault = None

    def _queue(self, line: bytes) -> None:
        if len(self._waiting) >= MAX_WAITING_LINES:
            self._waiting.clear()
            self._needs_snapshot = True
        self._waiting.append(line)
        self._has_news.set()

    def _append(self) -> None:
        with self._one_at_a_time:  # a write continues in its thread when its task is cancelled
            lines = b"".join(self._waiting.popleft() for _ in range(len(self._waiting)))
            with self._path.open("ab+", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                if size == 0 and self._has_written:  # it was deleted
                    self._needs_snapshot = True
                is_torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
                content = b"\n" + lines if is_torn else lines
                while content:  # a full disk accepts a part of it
                    content = content[os.write(file.fileno(), content) :]
                size = file.seek(0, os.SEEK_END)
            self._has_written = True
            if size > self._max_bytes:
                shorten(self._path, int(self._max_bytes * KEPT_SHARE), int(self._max_bytes * RECENT_SHARE))


def shorten(path: Path, wanted_bytes: int, recent_bytes: int) -> None:
    """Make a timeline shorter: drop every second older usage sample and, if needed, the oldest lines.

    Lines dropped at the beginning are merged into one snapshot. The file is replaced atomically.

    Args:
        path: of the timeline.
        wanted_bytes: its size afterwards, unless the recent part is larger.
        recent_bytes: size of the part at its end that is not changed.

    Raises:
        OSError: it cannot be written; it is unchanged.
    """
    size = path.stat().st_size
    lines_bytes = sum(len(line) for line in _thinned(path, size - recent_bytes))
    surplus = max(0, lines_bytes - wanted_bytes)
    shorter = path.with_name(f"{path.name}.shorter")
    try:
        with shorter.open("wb") as file:
            status, at, dropped = None, 0.0, 0
            for line in _thinned(path, size - recent_bytes):
                if dropped < surplus:
                    dropped += len(line)
                    status, at = _folded(status, at, line)
                    continue
                if status is not None:
                    file.write(to_line(Snapshot(number=0, time=at, status=status)))
                    status = None
                file.write(line)
        shorter.replace(path)
    finally:
        shorter.unlink(missing_ok=True)


def _thinned(path: Path, recent_from: int) -> Iterator[bytes]:
    """The whole lines of a timeline, with every second sample of usage before an offset left out."""
    is_left_out = False
    with path.open("rb") as file:
        place = 0
        for line in file:
            place += len(line)
            if place < recent_from and line.startswith(USAGE_START):
                is_left_out = not is_left_out
                if is_left_out:
                    continue
            if line.endswith(b"\n"):
                yield line


def _folded(status: RunStatus | None, at: float, line: bytes) -> tuple[RunStatus | None, float]:
    try:
        event = read_from_daemon(line)
    except PeerError:  # half a line, left by a killed supervisor
        return status, at
    if isinstance(event, Snapshot):
        return event.status, event.time or at
    if status is None or not isinstance(event, Event):
        return status, at
    return after_event(status, event), event.time


def _news(service: ServiceStatus) -> tuple[object, ...]:
    """What a line about a service says, its state first; without figures and the seconds in `why`."""
    why = _COUNTED.sub("#", service.why or "")
    state = (service.state, service.attempt, service.restarts, service.exit_code)
    said = (service.waits_for, service.waits_since, [fault.path for fault in service.write_faults])
    stall = service.rank_stall and service.rank_stall.text
    return (state, service.health, service.probe, service.phase, why, service.is_refused, said, stall)


def _is_worth_keeping(before: UsageSampled | None, now: UsageSampled) -> bool:
    """Whether enough time has passed since the last sample that was kept, or memory changed."""
    if before is None or not 0 <= now.time - before.time < USAGE_EVERY_S:
        return True
    if before.rss_bytes.keys() != now.rss_bytes.keys():  # a service started or exited
        return True
    if _states(before) != _states(now):
        return True
    return any(
        _has_moved(earlier.get(name, 0), later.get(name, 0))
        for earlier, later in (
            (before.rss_bytes, now.rss_bytes),
            (before.gpu_memory_bytes, now.gpu_memory_bytes),
            (
                {g.uuid: g.memory_used_bytes or 0 for g in before.gpus},
                {g.uuid: g.memory_used_bytes or 0 for g in now.gpus},
            ),
        )
        for name in {*earlier, *later}
    )


def _states(sample: UsageSampled) -> list[tuple[str, str, float]]:
    return [(each.name, each.state, each.since) for each in sample.machines or ()]


def _without_processes(sample: UsageSampled) -> UsageSampled:
    """A sample without the processes on GPUs of other machines: of 64 GPUs they would be half of the file."""
    if not any(machine.gpus for machine in sample.machines or ()):
        return sample
    machines = [
        machine.model_copy(update={"gpus": [gpu.model_copy(update={"processes": []}) for gpu in machine.gpus]})
        for machine in sample.machines or ()
    ]
    return sample.model_copy(update={"machines": machines})


def _has_moved(before: int, now: int) -> bool:
    return abs(now - before) > max(MOVED_BYTES, MOVED_SHARE * before)
