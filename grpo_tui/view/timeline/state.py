"""The moment that the screen shows: the present, or a moment in the past of the run. Pure."""

from __future__ import annotations

import math
import re
import time as clock
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from grpo_engine.wire.metrics import EVALUATION_PREFIX, MetricsLine
from grpo_engine.wire.supervisor import Notice, RunStatus
from grpo_tui.view.logs.tail import LogView
from grpo_tui.view.phases import StartPhase, Transition

STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
NUM_SMALL_STEPS = 300
"""A run is about so many small steps long."""
LARGE_STEPS = 10
"""Small steps in a large one."""
SAME_MOMENT_S = 1e-3


class MarkKind(StrEnum):
    """Kinds of events on the timeline, the most severe last."""

    STATE = "state"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    READY = "ready"
    RESTART = "restart"
    SUPERVISOR = "supervisor"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened."""

    time: float
    kind: MarkKind
    words: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Past:
    """The state of the run at a moment, from its files."""

    moment: float
    status: RunStatus | None
    """None if the timeline does not go back so far."""
    transitions: Mapping[str, tuple[Transition, ...]]
    start_phases: Mapping[str, tuple[StartPhase, ...]]
    notices: tuple[Notice, ...]
    """The latest until then."""
    log: LogView
    """Of the service that was selected when this was read."""
    log_ends: Mapping[str, int] = field(default_factory=dict)
    """End of each service's log in bytes since it began, where usage samples have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Travel:
    """The timeline of the screen."""

    is_open: bool = False
    """Whether the timeline is open; the screen shows the past then."""
    moment: float = 0.0
    """Unix seconds that were asked for."""
    past: Past | None = None
    """The state that was read last; of another moment while the one of `moment` is being read."""
    begins: float | None = None
    ends: float | None = None
    """Of the whole run, as far as it is known."""
    marks: tuple[Mark, ...] = ()
    """What happened, in rising order of time."""
    is_run_over: bool = False
    """Whether the timeline ends with the run, and not now."""
    is_typing: bool = False
    """Whether a time or a step is being typed."""
    note: str = ""
    """A message: the timeline is missing, or the typed text is not a moment."""

    @property
    def until(self) -> float | None:
        """Up to when data counts; None while the screen shows the present."""
        return self.past.moment if self.is_open and self.past is not None else None


class TravelChange:
    """Base of all that changes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(TravelChange):
    """The timeline was opened, at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(TravelChange):
    """Back to the present; of a run that is over, to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WentTo(TravelChange):
    """Go to a moment, in Unix seconds; it is held within the run."""

    moment: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(TravelChange):
    """Move by `by` small steps."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Jumped(TravelChange):
    """To the next (1) or the previous (-1) of something, or to an end of the run."""

    to: Literal["event", "step", "end"]
    direction: Literal[-1, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TypingBegan(TravelChange):
    """A time or a step will be typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed(TravelChange):
    """It was; empty for nothing."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned(TravelChange):
    """The timeline was read on."""

    begins: float | None
    ends: float | None
    marks: tuple[Mark, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRead(TravelChange):
    """What stood at a moment was read."""

    past: Past


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What else is known of the run's time."""

    now: float
    is_over: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    steps: Sequence[MetricsLine] = ()


def after(travel: Travel, change: TravelChange, known: Known) -> Travel:
    """What it is after a change."""
    match change:
        case Opened():
            return replace(travel, is_open=True, moment=extent(travel, known)[1], past=None, note="")
        case Closed() if known.is_over:  # there is no present to go back to
            return replace(_at(travel, extent(travel, known)[1], known), is_typing=False)
        case Closed():
            return replace(travel, is_open=False, is_typing=False, past=None)
        case WentTo():
            return _at(travel, change.moment, known)
        case Moved():
            return _at(travel, travel.moment + change.by * small_step_s(travel, known), known)
        case Jumped():
            return _at(travel, _jump(travel, change, known), known)
        case TypingBegan():
            return replace(travel, is_typing=True, note="")
        case Typed():
            closed = replace(travel, is_typing=False, note="")
            if not change.text.strip():
                return closed
            found = read_target(change.text, travel.moment, known)
            return replace(closed, note=found) if isinstance(found, str) else _at(closed, found, known)
        case Learned():
            learned = replace(
                travel, begins=change.begins, ends=change.ends, marks=change.marks, note=change.note or travel.note
            )
            is_at_end = known.is_over and travel.moment >= extent(travel, known)[1] - SAME_MOMENT_S
            return replace(learned, moment=extent(learned, known)[1]) if is_at_end else learned
        case PastRead():
            return replace(travel, past=change.past)
        case _:
            raise AssertionError(change)


def extent(travel: Travel, known: Known) -> tuple[float, float]:
    """When the run began, and when it ended, or now; Unix seconds."""
    times = [each for each in (travel.begins, known.started_at) if each is not None]
    times += [line.time for line in (*known.steps[:1], *known.steps[-1:])]
    if not known.is_over:
        return min([*times, known.now]), known.now
    ends = [each for each in (travel.ends, known.ended_at) if each is not None]
    return min([*times, *ends], default=known.now), max([*times, *ends], default=known.now)


def small_step_s(travel: Travel, known: Known) -> float:
    """Seconds of a small step: a round number, longer in a longer run."""
    begin, end = extent(travel, known)
    place = bisect_left(STEPS_S, (end - begin) / NUM_SMALL_STEPS)
    return STEPS_S[min(place, len(STEPS_S) - 1)]


def all_marks(travel: Travel, steps: Sequence[MetricsLine]) -> tuple[Mark, ...]:
    """What the timeline marks, and the evaluations among the steps, in rising order of time."""
    evaluations = [
        Mark(time=line.time, kind=MarkKind.EVALUATION, words=f"evaluation after step {line.step}")
        for line in steps
        if any(name.startswith(EVALUATION_PREFIX) for name in line.metrics)
    ]
    return tuple(sorted((*travel.marks, *evaluations), key=lambda mark: mark.time))


def clock_at(moment: float) -> str:
    """The time of day there, on this machine's clock: `14:03:05`."""
    return clock.strftime("%H:%M:%S", clock.localtime(moment))


def date_at(moment: float) -> str:
    """The day there: `22 Nov`."""
    return clock.strftime("%-d %b", clock.localtime(moment))


def _at(travel: Travel, moment: float, known: Known) -> Travel:
    begin, end = extent(travel, known)
    return replace(travel, moment=min(max(moment, begin), end), note="")


def _jump(travel: Travel, jump: Jumped, known: Known) -> float:
    begin, end = extent(travel, known)
    if jump.to == "end":
        return end if jump.direction > 0 else begin
    times = [mark.time for mark in all_marks(travel, known.steps)]
    if jump.to == "step":
        times = [line.time for line in known.steps]
    if jump.direction > 0:
        place = bisect_right(times, travel.moment + SAME_MOMENT_S)
        return times[place] if place < len(times) else end
    place = bisect_left(times, travel.moment - SAME_MOMENT_S)
    return times[place - 1] if place else begin


_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
_AGO = re.compile(r"- ?(?:(\d{1,9})d)? ?(?:(\d{1,9})h)? ?(?:(\d{1,9})m)? ?(?:(\d{1,9})s?)?")
"""Of text with single spaces: of any number of them, each part of the pattern might take some."""


def read_target(text: str, near: float, known: Known) -> float | str:
    """The typed moment in Unix seconds, or a message that says what can be typed.

    `14:03` or `14:03:05` is a time of day, of the day that is shown or else of the one at which the run was at that
    time; `120` a step; `-5m` or `-1h30m` so long before the end.
    """
    typed = text.strip()
    if ago := _AGO.fullmatch(" ".join(typed.split())):
        days, hours, minutes, seconds = (int(part or 0) for part in ago.groups())
        if typed.strip("- "):
            return (known.ended_at or known.now) - (days * 86400 + hours * 3600 + minutes * 60 + seconds)
    if day_time := _CLOCK.fullmatch(typed):
        hours, minutes, seconds = (int(part or 0) for part in day_time.groups())
        day = clock.localtime(near)
        wanted = clock.mktime((day.tm_year, day.tm_mon, day.tm_mday, hours, minutes, seconds, 0, 0, -1))
        choices = [wanted, wanted - 86400, wanted + 86400]
        begin, end = known.started_at or -math.inf, known.ended_at or known.now
        return next((each for each in choices if begin <= each <= end), wanted)
    number = typed.removeprefix("step").strip()
    if number.isdecimal():
        if not known.steps:
            return "no step is done yet"
        step = int(number)
        place = bisect_left(known.steps, step, key=lambda line: line.step)
        if place == len(known.steps):
            return f"step {step:,} is not done yet; the newest is {known.steps[-1].step:,}"
        return known.steps[place].time
    return f"{typed!r} is not a time: type a time (14:03 or 14:03:05), a step (120), or how long ago (-5m)"
