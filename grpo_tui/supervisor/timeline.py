"""The daemon's timeline, `events.jsonl` in the run folder: what it said, kept so that a screen can go back in time.

Lines are those of `grpo_engine.wire.supervisor`: a `Snapshot` with its time where a daemon begins or takes a run over
(and where lines were lost), then `ServiceChanged`, `RunChanged` and `Notice`, and every few seconds a `UsageSampled`.
Event numbers begin anew with each daemon. Written by one daemon at a time, in a thread; a full disk, a hanging one or a
deleted folder costs lines, and nothing else. In a run of weeks the older samples of usage become rarer and the oldest
lines go, so that the file stays below `MAX_BYTES`. Killed, a daemon leaves at most half a last line.
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
from grpo_engine.wire.supervisor import (
    ENDED_RUN_STATES,
    Event,
    Notice,
    RunChanged,
    RunStatus,
    ServiceChanged,
    ServiceStatus,
    Snapshot,
    UsageSampled,
    read_from_daemon,
)
from grpo_tui.paths import TIMELINE_FILE

MAX_BYTES = 32_000_000
"""Some two days of four services in full detail, and weeks with older samples thinned; read in a second or so."""
KEPT_SHARE = 0.7
"""Of `MAX_BYTES`, after older lines were thinned or dropped: it is not done at every write."""
RECENT_SHARE = 0.25
"""The newest part of the file is never thinned."""
USAGE_EVERY_S = 5.0
FELT_BYTES, FELT_SHARE = 64 << 20, 0.05
"""Memory that moved by more than both is kept at once."""
GATHER_S = 0.25
"""Lines that come within this time are written together."""
MAX_WAITING_LINES = 5000
"""What a hanging disk may keep waiting in memory."""
USAGE_START = b'{"type":"usage"'
_COUNTED = re.compile(r"\d+(?:\.\d+)?")
log = logging.getLogger(__name__)


class Timeline:
    """Keeps events for `events.jsonl`; `keep` never blocks, and `run` is a task of the supervisor's."""

    def __init__(self, run_folder: Path, status: Callable[[], RunStatus], *, max_bytes: int = MAX_BYTES) -> None:
        """Append to the timeline of a run; `status` makes its snapshots."""
        self._path = run_folder / TIMELINE_FILE
        self._status = status
        self._max_bytes = max_bytes
        self._waiting: deque[bytes] = deque()
        self._has_news = asyncio.Event()
        self._one_at_a_time = threading.Lock()
        self._needs_snapshot = False
        self._has_written = False
        self._number = 0
        self._told: dict[str, tuple[object, ...]] = {}
        self._usage: UsageSampled | None = None
        self._wants_usage = True
        self._fault: str | None = None

    def begin(self) -> None:
        """Begin with a snapshot; what waits to be written is in it."""
        self._needs_snapshot = False
        self._waiting.clear()
        self._queue(to_line(Snapshot(number=self._number, time=time.time(), status=self._status())))

    def keep(self, event: Event) -> None:
        """Take an event up, unless it tells nothing that the line before it did not."""
        self._number = event.number
        if isinstance(event, ServiceChanged):
            news = _news(event.service)
            if self._told.get(event.service.name) == news:
                return
            self._wants_usage = self._wants_usage or self._told.get(event.service.name, (None,))[0] != news[0]
            self._told[event.service.name] = news
        elif isinstance(event, UsageSampled):
            if not (self._wants_usage or _is_worth_keeping(self._usage, event)):
                return
            self._usage, self._wants_usage = event, False
        self._queue(to_line(event))

    async def run(self) -> None:
        """Write what is kept, until cancelled."""
        while True:
            await self._has_news.wait()
            await self.write()
            await asyncio.sleep(GATHER_S)

    async def write(self) -> None:
        """Write now. What cannot be written is lost, told once, and made good by a snapshot."""
        self._has_news.clear()
        if self._needs_snapshot:
            self.begin()
        try:
            await asyncio.to_thread(self._append)
        except OSError as error:
            self._needs_snapshot = True
            if self._fault is None:
                log.error("%s cannot be written: %s; the run goes on without it", self._path, error.strerror or error)
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
        with self._one_at_a_time:  # a write whose task was cancelled goes on in its thread
            lines = b"".join(self._waiting.popleft() for _ in range(len(self._waiting)))
            with self._path.open("ab+", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                if size == 0 and self._has_written:  # somebody deleted it
                    self._needs_snapshot = True
                is_torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
                content = b"\n" + lines if is_torn else lines
                while content:  # a full disk takes a part, and then refuses
                    content = content[os.write(file.fileno(), content) :]
                size = file.seek(0, os.SEEK_END)
            self._has_written = True
            if size > self._max_bytes:
                shorten(self._path, int(self._max_bytes * KEPT_SHARE), int(self._max_bytes * RECENT_SHARE))


def after_event(status: RunStatus, event: Snapshot | Event) -> RunStatus:
    """The status document after an event; a notice changes nothing in it."""
    match event:
        case Snapshot():
            return event.status
        case ServiceChanged():
            services = [event.service if each.name == event.service.name else each for each in status.services]
            return status.model_copy(update={"services": services})
        case RunChanged():
            ended_at = event.time if event.state in ENDED_RUN_STATES else None
            return status.model_copy(update={"state": event.state, "ended_at": ended_at})
        case UsageSampled():
            services = [_with_usage(each, event) for each in status.services]
            return status.model_copy(
                update={"services": services, "gpus": event.gpus, "gpu_note": event.gpu_note},
            )
        case Notice():
            return status


def _with_usage(service: ServiceStatus, usage: UsageSampled) -> ServiceStatus:
    if service.pid is None:  # it has ended since, maybe: a sample of before says nothing of it
        return service.model_copy(update={"cpu_percent": None, "rss_bytes": None, "gpu_memory_bytes": None})
    return service.model_copy(
        update={
            "cpu_percent": usage.cpu_percent.get(service.name),
            "rss_bytes": usage.rss_bytes.get(service.name),
            "gpu_memory_bytes": usage.gpu_memory_bytes.get(service.name),
        }
    )


def shorten(path: Path, wanted_bytes: int, recent_bytes: int) -> None:
    """Make a timeline shorter: every second older sample of usage goes, and if need be the oldest lines of all.

    What is dropped at the beginning is folded into one snapshot. The file is replaced whole, so a reader sees the old
    one or the new one.

    Args:
        path: of the timeline.
        wanted_bytes: how large it may be afterwards, as far as the recent part allows.
        recent_bytes: how much at its end stays as it is.

    Raises:
        OSError: it cannot be written; it is as it was then.
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
    except PeerError:  # half a line that a killed daemon left
        return status, at
    if isinstance(event, Snapshot):
        return event.status, event.time or at
    if status is None or not isinstance(event, Event):
        return status, at
    return after_event(status, event), event.time


def _news(service: ServiceStatus) -> tuple[object, ...]:
    """What a line about a service tells, its state first; not its figures, and not the seconds in its explanation."""
    why = _COUNTED.sub("#", service.why or "")
    state = (service.state, service.attempt, service.restarts, service.exit_code)
    return (state, service.health, service.probe, service.phase, why, service.is_refused)


def _is_worth_keeping(before: UsageSampled | None, now: UsageSampled) -> bool:
    """Whether enough time went by since the last sample that was kept, or memory moved."""
    if before is None or not 0 <= now.time - before.time < USAGE_EVERY_S:
        return True
    if before.rss_bytes.keys() != now.rss_bytes.keys():  # a service came or went
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


def _has_moved(before: int, now: int) -> bool:
    return abs(now - before) > max(FELT_BYTES, FELT_SHARE * before)
