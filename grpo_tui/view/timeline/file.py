"""Read a run's `events.jsonl`: its events, and the state of the run at any moment.

The file grows, may be replaced by a shorter one, may end in half a line where a supervisor was killed, or be missing.
Memory holds times and offsets of its lines, and a checkpoint of the state every 256 lines; the lines after a checkpoint
are read again for a moment, so that a moment of a run of weeks costs milliseconds.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_right
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from grpo_engine.errors import PeerError
from grpo_engine.wire.run_folder import CHECKPOINTS, TIMELINE_FILE, checkpoint_step, service_log
from grpo_engine.wire.supervisor import (
    ENDED_RUN_STATES,
    Event,
    Notice,
    RunChanged,
    RunStatus,
    ServiceChanged,
    ServiceState,
    ServiceStatus,
    Snapshot,
    UsageSampled,
    read_from_daemon,
)
from grpo_tui.run_files.line_tail import LineTail
from grpo_tui.run_files.log_file import place, read_part
from grpo_tui.run_files.opening import open_file
from grpo_tui.run_files.timeline import USAGE_START, after_event
from grpo_tui.view.format import bytes_text
from grpo_tui.view.logs.tail import FIRST_BYTES, LogView, as_text
from grpo_tui.view.phases import StartPhases, Transitions, with_service, with_services
from grpo_tui.view.timeline.state import Mark, MarkKind, Past

MAX_BYTES_A_READ = 2 << 20
"""A longer line is not an event, and is skipped."""
MAX_STATUSES_A_READ = 500_000
"""Of services, which an event copies: some tenths of a second. Of 3,500 services a read would take half a minute, for
which a screen that was left would wait."""
CHECKPOINT_LINES = 256
"""So many lines are read again at most for a moment."""
MAX_MARKS = 5000
"""The newest are kept."""
MAX_NOTICES = 20
LOG_SLACK_S = 0.5
"""A usage sample with the log ends follows each change of state: a crash is shown with its last log lines."""
WHOLE = 1 << 62
"""As the end of a log: wherever it ends."""
MARK_KINDS = {
    ServiceState.READY: MarkKind.READY,
    ServiceState.UNHEALTHY: MarkKind.WARNING,
    ServiceState.BACKOFF: MarkKind.WARNING,
    ServiceState.FAILED: MarkKind.FAILURE,
}
_TIME = re.compile(rb'"time":(\d{1,11}(?:\.\d+)?)[,}]')
"""As `Time` bounds it: of a line that claims any other a sample would be shown at no moment that a clock has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The state after a line, without usage samples."""

    status: RunStatus | None = None
    transitions: Transitions = field(default_factory=dict)
    start_phases: StartPhases = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()


class TimelineFile:
    """Follows the timeline of one run; used by one thread at a time."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._path = run_folder / TIMELINE_FILE
        self._tail = LineTail(self._path, max_bytes=MAX_BYTES_A_READ)
        self._forget()

    def _forget(self) -> None:
        self._unread: deque[tuple[bytes, int]] = deque()
        """Lines for the next read, and where they begin."""
        self._times = array("d")
        self._places = array("q")
        self._usage_lines = array("q")
        self._snapshot_line = -1
        self._snapshot_lines = array("q")
        self._now = Replay()
        self._checkpoints: list[Replay] = []
        self._marks: list[Mark] = []

    @property
    def begins(self) -> float | None:
        """Unix time of the first line."""
        return self._times[0] if self._times else None

    @property
    def ends(self) -> float | None:
        """Unix time of the last line."""
        return self._times[-1] if self._times else None

    @property
    def num_lines(self) -> int:
        """How many there are so far."""
        return len(self._times)

    def marks(self) -> tuple[Mark, ...]:
        """What happened, and the checkpoints that the trainer still keeps."""
        return (*self._marks, *self._saved())

    def read(self) -> bool:
        """Read what was added, at most some megabytes or tenths of a second; returns whether there is more."""
        has_more = bool(self._unread)
        if not has_more:
            new = self._tail.read()
            if new.is_restarted:
                self._forget()
            begin = new.offset
            for line in new.lines:
                self._unread.append((line, begin))
                begin += len(line)
            has_more = new.has_more
        num_statuses = 0
        while self._unread and num_statuses < MAX_STATUSES_A_READ:
            self._take(*self._unread.popleft())
            num_statuses += 1 if self._now.status is None else len(self._now.status.services)
        return has_more or bool(self._unread)

    def past(self, moment: float, service: str | None) -> Past:
        """The state of the run at a moment, with the log of a service as it was then."""
        replay, ends, is_guessed = self._replayed(moment)
        log = LogView(service=service)
        if service is not None:
            path = service_log(self._folder, service)
            is_over = replay.status is not None and replay.status.state in ENDED_RUN_STATES
            end = WHOLE if is_over else ends.get(service)
            log = log_until(path, service, end, whole_lines=is_guessed and not is_over)
        return Past(
            moment=moment,
            status=replay.status,
            transitions=replay.transitions,
            start_phases=replay.start_phases,
            notices=replay.notices,
            log=log,
            log_ends={} if replay.status is not None and replay.status.state in ENDED_RUN_STATES else ends,
        )

    # --- index -----------------------------------------------------------------------------------------------------

    def _take(self, line: bytes, begin: int) -> None:
        """Add one line to the index; one that cannot be read takes no place in it."""
        number = len(self._times)
        if line.startswith(USAGE_START):
            found = _TIME.search(line)
            if found is None:
                return
            self._usage_lines.append(number)
            self._note(float(found[1]), number, begin)
            return
        event = _event(line)
        if event is None:
            return
        time = event.time
        if time is None:
            assert isinstance(event, Snapshot)
            time = self._times[-1] if self._times else event.status.started_at or 0.0
        if isinstance(event, Snapshot):
            self._snapshot_lines.append(number)
        self._mark(event, time)
        self._note(time, number, begin)
        self._now = replayed(self._now, event, time)

    def _note(self, time: float, number: int, begin: int) -> None:
        if number % CHECKPOINT_LINES == 0:
            self._checkpoints.append(self._now)
        self._times.append(max(time, self._times[-1]) if self._times else time)  # the clock may have been set back
        self._places.append(begin)

    def _mark(self, event: Snapshot | Event, time: float) -> None:
        before = self._now.status
        mark = None
        match event:
            case Snapshot():
                if before is not None and event.status.supervisor != before.supervisor:
                    is_resumed = event.status.started_at != before.started_at
                    words = "the run was resumed" if is_resumed else "a new supervisor took the run over"
                    mark = Mark(time=time, kind=MarkKind.SUPERVISOR, words=words)
            case ServiceChanged(service=service):
                known = before.services if before is not None else ()
                was = next((each.state for each in known if each.name == service.name), None)
                if was is not service.state:
                    mark = Mark(time=time, kind=_kind(service), words=_words(service, was))
            case RunChanged(state=state):
                kind = MarkKind.STATE if state in ENDED_RUN_STATES else None
                if kind is not None:
                    mark = Mark(time=time, kind=kind, words=f"the run is over: {state}")
            case Notice(severity=severity) if severity != "info":
                subject = f"{event.service}: " if event.service else ""
                kind = MarkKind.FAILURE if severity == "error" else MarkKind.WARNING
                mark = Mark(time=time, kind=kind, words=subject + event.text)
            case _:
                pass
        if mark is not None:
            self._marks.append(mark)
            del self._marks[:-MAX_MARKS]

    def _saved(self) -> list[Mark]:
        """The checkpoints that are there."""
        marks = []
        try:
            folders = list((self._folder / CHECKPOINTS).iterdir())
        except OSError:
            return []
        for folder in folders:
            if (step := checkpoint_step(folder)) is not None:
                words = f"checkpoint of step {step} saved"
                with suppress(OSError):  # the trainer keeps the newest ones, and has just removed it
                    marks.append(Mark(time=folder.stat().st_mtime, kind=MarkKind.CHECKPOINT, words=words))
        return sorted(marks, key=lambda mark: mark.time)

    # --- a moment --------------------------------------------------------------------------------------------------

    def _replayed(self, moment: float) -> tuple[Replay, dict[str, int], bool]:
        """Everything as it stood, how far each log went, as far as that is known, and whether that is guessed."""
        first = min(1, len(self._times))  # before the first line everything stood as it tells
        count = max(first, bisect_right(self._times, moment))
        later = max(first, bisect_right(self._times, moment + LOG_SLACK_S))
        usage = self._usage_line(count)
        try:
            with open_file(self._path) as file:
                if not self._tail.bookmark.is_in(file.fileno()):
                    return Replay(), {}, False  # it was replaced: the next `read` takes it up
                replay = self._fold(file.fileno(), count)
                sample = self._usage_at(file.fileno(), usage)
                latest = self._usage_line(later)
                before, after = self._usage_at(file.fileno(), latest), self._usage_at(file.fileno(), self._next(latest))
        except OSError:
            return Replay(), {}, False
        if sample is not None and replay.status is not None and usage > self._last_snapshot(count):
            replay = replace(replay, status=after_event(replay.status, sample))
        if before is None:
            return replay, {}, False
        if after is None or moment <= before.time:
            return replay, before.log_bytes, False
        return replay, _grown(before, after, moment), True

    def _fold(self, descriptor: int, count: int) -> Replay:
        if count == 0:
            return Replay()
        first = (count - 1) // CHECKPOINT_LINES * CHECKPOINT_LINES
        replay = self._checkpoints[first // CHECKPOINT_LINES]
        begin = self._places[first]
        end = self._places[count] if count < len(self._places) else self._tail.bookmark.offset
        lines = os.pread(descriptor, end - begin, begin).splitlines(keepends=True)
        place_of = begin
        number = first
        for line in lines:
            is_indexed = number < count and self._places[number] == place_of
            place_of += len(line)
            if not is_indexed:
                continue
            if not line.startswith(USAGE_START) and (event := _event(line)) is not None:
                replay = replayed(replay, event, self._times[number])
            number += 1
        return replay

    def _usage_line(self, count: int) -> int:
        """The number of the last sample among the first so many lines; -1 for none."""
        found = bisect_right(self._usage_lines, count - 1)
        return self._usage_lines[found - 1] if found else -1

    def _next(self, usage_line: int) -> int:
        """The number of the sample after one; -1 for none."""
        found = bisect_right(self._usage_lines, usage_line)
        return self._usage_lines[found] if usage_line >= 0 and found < len(self._usage_lines) else -1

    def _last_snapshot(self, count: int) -> int:
        found = bisect_right(self._snapshot_lines, count - 1)
        return self._snapshot_lines[found - 1] if found else -1

    def _usage_at(self, descriptor: int, number: int) -> UsageSampled | None:
        if number < 0:
            return None
        begin = self._places[number]
        end = self._places[number + 1] if number + 1 < len(self._places) else self._tail.bookmark.offset
        event = _event(os.pread(descriptor, end - begin, begin).splitlines(keepends=True)[0])
        return event if isinstance(event, UsageSampled) else None


def replayed(replay: Replay, event: Snapshot | Event, time: float) -> Replay:
    """The state after an event."""
    match event:
        case Snapshot():
            seen = with_services(replay.transitions, replay.start_phases, event.status.services, time)
            return replace(replay, status=event.status, transitions=seen[0], start_phases=seen[1])
        case ServiceChanged():
            if replay.status is None or all(each.name != event.service.name for each in replay.status.services):
                return replay
            heard = with_service(replay.transitions, replay.start_phases, event.service, time, phase_since=time)
            status = after_event(replay.status, event)
            return replace(replay, status=status, transitions=heard[0], start_phases=heard[1])
        case RunChanged():
            return replace(replay, status=replay.status and after_event(replay.status, event))
        case Notice():
            return replace(replay, notices=(*replay.notices, event)[-MAX_NOTICES:])
        case UsageSampled():
            return replay


def _grown(before: UsageSampled, after: UsageSampled, moment: float) -> dict[str, int]:
    """How far logs went between two samples, if they grew evenly."""
    share = (moment - before.time) / max(after.time - before.time, 1e-9)
    ends = before.log_bytes
    return {
        name: end + int(max(0, after.log_bytes.get(name, end) - end) * min(share, 1.0)) for name, end in ends.items()
    }


def _event(line: bytes) -> Snapshot | Event | None:
    if not line.endswith(b"\n"):
        return None
    try:
        event = read_from_daemon(line)
    except PeerError:
        return None
    return event if isinstance(event, Snapshot | Event) else None


def _kind(service: ServiceStatus) -> MarkKind:
    if service.state is ServiceState.STARTING and (service.attempt > 1 or service.restarts):  # in place: one attempt
        return MarkKind.RESTART
    return MARK_KINDS.get(service.state, MarkKind.STATE)


def _words(service: ServiceStatus, was: ServiceState | None) -> str:
    why = f": {service.why}" if service.why and service.state in MARK_KINDS else ""
    came = f"{was} → " if was is not None else ""
    return f"{service.name} {came}{service.state}{why}"


# --- logs -------------------------------------------------------------------------------------------------------------


def log_until(path: Path, service: str, end: int | None, *, whole_lines: bool = False) -> LogView:
    """The last lines of a log, up to an absolute offset; None: it is not known how long the log was.

    Args:
        whole_lines: leave the last line out where the offset is in the midst of it.
    """
    if end is None:
        return LogView(service=service, lines=("··· the length of this log at that time was not recorded",))
    try:
        with open_file(path) as file:
            now = place(file.fileno())
            end = min(end, now.end)
            if end <= now.content and now.dropped:
                later = bytes_text(now.content - end)
                words = f"··· these lines were dropped from the log since then: it now begins {later} later"
                return LogView(service=service, lines=(words,))
            start = max(0, now.content if now.dropped else 0, end - FIRST_BYTES)
            part = read_part(file.fileno(), start, end - start, with_header=False)
    except OSError as error:
        return LogView(service=service, lines=(f"··· {path.name} cannot be read: {error.strerror or error}",))
    data = part.data[: max(0, end - part.offset)]
    if not part.is_start:
        data = data[data.find(b"\n") + 1 :]
    *lines, rest = data.split(b"\n")
    return LogView(service=service, lines=tuple(map(as_text, lines)), open_line="" if whole_lines else as_text(rest))
