"""The life of one service as a pure function: (service, event, now) -> (service, effects).

    WAITING -> STARTING -> READY <-> UNHEALTHY -> STOPPING -> STOPPED
       ^          |          |           |           |
       |          +----------+-----------+-----------+--> FINISHED | FAILED
       +-- BACKOFF <---------+ (the restart policy says so)

A service that can restart in place is renewed: it goes back to STARTING with its process kept, and is stopped and
started as any other when it does not begin anew within its stop grace.

Nothing here starts a process, reads a clock or sleeps. `core.py` carries the effects out and reports what happened back
as events; `order.py` says who may start or stop now; `words.py` explains. Seconds are monotonic.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from grpo_engine.wire.supervisor import ProbeOutcome
from grpo_engine.wire.supervisor import ServiceState as S

if TYPE_CHECKING:
    from grpo_tui.services.base import Launch

MAX_BACKOFF_S = 60.0
KILL_MARGIN_S = 2.0
"""The keeper itself kills after the grace; so much later it is told to, in case it is the keeper that hangs."""
MAX_SAID_CHARS = 200
"""Of the last line of a log, where a reason repeats it."""
UNKILLABLE_AFTER_S = 15.0
"""A process that outlives SIGKILL for so long is stuck in the kernel, usually in a driver: it is named, not awaited."""


class Effect(StrEnum):
    """What is to be done to the real process; carried out in order, one at a time per service."""

    SPAWN = "spawn"
    RENEW = "renew"
    STOP = "stop"
    KILL = "kill"


class AfterStop(StrEnum):
    """What follows when a service that is being stopped has ended."""

    REST = "rest"
    RESTART = "restart"
    FAILURE = "failure"
    """It is stopped because it failed us (never ready, unhealthy): the restart policy decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Where one service stands."""

    name: str
    state: S = S.WAITING
    attempt: int = 0
    num_renewals: int = 0
    """How often it was restarted in place, in all attempts."""
    is_renewing: bool = False
    """Whether it was told to begin anew and may still be ending what it did before."""
    has_process: bool = False
    """Whether an attempt was let go of and has not been seen to end; at most one ever is."""
    is_running: bool = False
    """Whether the attempt's process is known to run (it takes a moment after the decision)."""
    was_ready: bool = False
    """Whether this attempt has been ready."""
    since_s: float = 0.0
    """When it entered its state."""
    deadline_s: float | None = None
    """When a `Tick` acts; None while no timer is armed."""
    restarted_at_s: tuple[float, ...] = ()
    """Restarts by policy that still count."""
    after_stop: AfterStop = AfterStop.REST
    exit_code: int | None = None
    reason: str | None = None
    """What brought it into a state that it was not meant for."""
    answer: str | None = None
    """The last answer of its probe, in words."""
    outcome: ProbeOutcome | None = None
    """The same for programs."""
    phase: str | None = None
    """What its start-up is at, in words, where its log tells."""
    moved_at_s: float = 0.0
    """When its start-up was last seen to get on."""
    last_lines: tuple[str, ...] = ()
    """The end of its log when it failed."""
    is_killed: bool = False
    """Whether SIGKILL was asked for in this attempt."""
    is_refused: bool = False
    """Whether it was not started because a stranger holds what it needs."""

    @property
    def num_starts(self) -> int:
        """Attempts and restarts in place: grows with every start."""
        return self.attempt + self.num_renewals


# --- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartAsked:
    """Somebody wants it up."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants it down."""

    reason: str = "stopped by request"


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """Somebody wants it down and up again; no failure."""

    reason: str = "restarted by request"
    makes_way: bool = False
    """Whether its process must end, since another service waits for what it holds."""


@dataclass(frozen=True, slots=True)
class KillAsked:
    """Somebody wants it down without grace."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """All that it needs is there."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """Its process runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """Nothing is left of what it did before this restart in place."""

    num_renewals: int


@dataclass(frozen=True, slots=True)
class Refused:
    """It cannot be started here: a stranger holds what it needs."""

    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Its probe was asked."""

    attempt: int
    num_renewals: int = 0
    outcome: ProbeOutcome
    words: str

    @property
    def passed(self) -> bool:
        """Whether the answer is yes."""
        return self.outcome is ProbeOutcome.PASSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Its start-up gets on: its log or its GPU memory has grown."""

    attempt: int
    num_renewals: int = 0
    phase: str | None
    """What it is at, in words; None when its log does not tell."""


@dataclass(frozen=True, slots=True)
class Overran:
    """It takes more than it may, e.g. of memory."""

    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """Nothing of this attempt is left (or it could not be started, with the reason in `error`)."""

    code: int | None
    """Negative for a signal; None when it cannot be known."""
    error: str | None = None
    last_lines: tuple[str, ...] = ()
    jitter: float = 0.0
    """Fraction, 0 to 1, of the spread added to a back-off, so that services do not restart in step."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Asked = StartAsked | StopAsked | RestartAsked | KillAsked
Seen = Spawned | Renewed | Refused | Answered | Moved | Overran | Exited
Event = Asked | Seen | Admitted | Tick
Step = tuple[Service, tuple[Effect, ...]]

RUNNING = frozenset({S.STARTING, S.READY, S.UNHEALTHY})
BACKOFF_SPREAD = 0.25


def step(service: Service, event: Event, now_s: float, launch: Launch) -> Step:
    """Advance one service by one event; an event that does not apply changes nothing."""
    is_due = service.deadline_s is not None and now_s >= service.deadline_s
    match event, service.state:
        case StartAsked() | RestartAsked(), S.STOPPED | S.FINISHED | S.FAILED | S.BACKOFF if not service.has_process:
            return _wait(replace(service, restarted_at_s=(), is_refused=False), now_s), ()
        case StartAsked() | RestartAsked(), S.STOPPING:
            return replace(service, after_stop=AfterStop.RESTART), ()
        case RestartAsked(makes_way=False), S.STARTING | S.READY | S.UNHEALTHY if _can_be_renewed(service, launch):
            return _renew(service, now_s, launch)
        case RestartAsked(reason), S.STARTING | S.READY | S.UNHEALTHY:
            return _stop(service, now_s, launch, AfterStop.RESTART, reason)
        case StopAsked(reason), S.WAITING | S.BACKOFF:
            return _settle(service, S.STOPPED, now_s, f"{reason}, before it was started"), ()
        case KillAsked(), S.WAITING | S.BACKOFF:
            return _settle(service, S.STOPPED, now_s, "killed by request, before it was started"), ()
        case StopAsked(reason), S.STARTING | S.READY | S.UNHEALTHY:
            return _stop(service, now_s, launch, AfterStop.REST, reason)
        case StopAsked(), S.STOPPING:
            return replace(service, after_stop=AfterStop.REST), ()
        case KillAsked(), S.STARTING | S.READY | S.UNHEALTHY:
            killed = replace(_enter(service, S.STOPPING, now_s, reason="killed by request"), is_renewing=False)
            return _kill(killed, now_s, AfterStop.REST)
        case KillAsked(), S.STOPPING if not service.is_killed:
            return _kill(service, now_s, AfterStop.REST)
        case Admitted(), S.WAITING:
            return _start(service, now_s, launch)
        case Spawned(), _ if service.has_process and not service.is_renewing:
            return _spawned(replace(service, is_running=True), now_s, launch), ()
        case Renewed(num_renewals=number), S.STARTING if service.is_renewing and number == service.num_renewals:
            return _spawned(replace(service, is_running=True, is_renewing=False, phase=None), now_s, launch), ()
        case Refused(words), _ if service.has_process:
            return _refused(service, words, now_s), ()
        case Answered(), S.STARTING | S.READY | S.UNHEALTHY if _is_about_now(event, service):
            heard = replace(service, answer=event.words, outcome=event.outcome)
            return _answered(heard, event.passed, now_s, launch), ()
        case Moved(phase=phase), S.STARTING if _is_about_now(event, service):
            return replace(service, moved_at_s=now_s, phase=phase or service.phase), ()
        case Overran(words), S.STARTING | S.READY | S.UNHEALTHY:
            return _stop(service, now_s, launch, AfterStop.FAILURE, words)
        case Exited(), _ if service.has_process:
            return _exited(service, event, now_s, launch), ()
        case Tick(), S.STARTING if is_due and service.is_renewing:
            words = f"did not begin anew within {launch.stop_grace_s:g} s: stopped and started instead"
            return _stop(service, now_s, launch, AfterStop.RESTART, words)
        case Tick(), S.STARTING if is_due:
            return _time_is_up(service, now_s, launch)
        case Tick(), S.READY if is_due:
            return _turn_unhealthy(service, now_s, launch)
        case Tick(), S.BACKOFF if is_due:
            return _wait(service, now_s), ()
        case Tick(), S.STOPPING if is_due:
            return _press_on(service, now_s)
        case _:
            return service, ()


def adopted(service: Service, now_s: float, launch: Launch) -> Service:
    """A service whose process a new supervisor found alive: it goes on where its predecessor saw it last.

    Nobody asked its probes meanwhile, so it gets time for an answer before anything follows from there being none.
    """
    taken = replace(service, has_process=True, is_running=not service.is_renewing)
    match service.state:
        case S.READY:
            return replace(taken, deadline_s=_live_deadline_s(launch, now_s))
        case S.STARTING if taken.is_renewing:  # it is told again: whether it was, nobody knows
            return replace(taken, deadline_s=now_s + launch.stop_grace_s)
        case S.STARTING if launch.ready is not None and taken.deadline_s is not None:
            soonest_s = now_s + 2 * launch.ready.timeout_s + launch.ready.interval_s
            return replace(taken, deadline_s=max(taken.deadline_s, soonest_s))
        case S.STARTING | S.UNHEALTHY | S.STOPPING:
            return taken
    found = _enter(replace(service, has_process=True), S.STARTING, now_s, reason=None)
    return _spawned(replace(found, is_running=True, deadline_s=_ready_deadline_s(launch, now_s)), now_s, launch)


# --- moves ---------------------------------------------------------------------------------------------------------


def _enter(service: Service, state: S, now_s: float, *, reason: str | None) -> Service:
    return replace(service, state=state, since_s=now_s, deadline_s=None, reason=reason)


def _settle(service: Service, state: S, now_s: float, reason: str | None) -> Service:
    return replace(_enter(service, state, now_s, reason=reason), after_stop=AfterStop.REST, answer=None, outcome=None)


def _wait(service: Service, now_s: float) -> Service:
    return replace(_enter(service, S.WAITING, now_s, reason=None), after_stop=AfterStop.REST, answer=None, outcome=None)


def _start(service: Service, now_s: float, launch: Launch) -> Step:
    started = replace(
        _enter(service, S.STARTING, now_s, reason=None),
        attempt=service.attempt + 1,
        has_process=True,
        is_running=False,
        is_renewing=False,
        was_ready=False,
        is_killed=False,
        exit_code=None,
        answer=None,
        outcome=None,
        phase=None,
        moved_at_s=now_s,
        last_lines=(),
        deadline_s=_ready_deadline_s(launch, now_s),
    )
    return started, (Effect.SPAWN,)


def _can_be_renewed(service: Service, launch: Launch) -> bool:
    return launch.restart_in_place is not None and (service.is_running or service.is_renewing)


def _renew(service: Service, now_s: float, launch: Launch) -> Step:
    """Have it begin anew in the process that it has. Asked for again meanwhile, it gets no more time for it."""
    renewing = replace(
        _enter(service, S.STARTING, now_s, reason=None),
        num_renewals=service.num_renewals + 1,
        is_renewing=True,
        is_running=False,
        was_ready=False,
        answer=None,
        outcome=None,
        phase="ending what ran",
        moved_at_s=now_s,
        deadline_s=service.deadline_s if service.is_renewing else now_s + launch.stop_grace_s,
    )
    return renewing, (Effect.RENEW,)


def _is_about_now(event: Answered | Moved, service: Service) -> bool:
    """Whether this start is meant, and not the one before it, which may still answer."""
    is_this_start = (event.attempt, event.num_renewals) == (service.attempt, service.num_renewals)
    return is_this_start and not service.is_renewing


def _ready_deadline_s(launch: Launch, now_s: float) -> float | None:
    return None if launch.ready is None else now_s + launch.ready.within_s


def _spawned(service: Service, now_s: float, launch: Launch) -> Service:
    if service.state is not S.STARTING:
        return service
    if launch.ready is None:
        return _turn_ready(service, now_s, launch)
    # The look for ports and GPU memory before the start does not count against the start's own limit.
    return replace(service, deadline_s=_ready_deadline_s(launch, now_s), moved_at_s=now_s)


def _answered(service: Service, passed: bool, now_s: float, launch: Launch) -> Service:
    if not passed:
        return service
    if service.state is S.READY:
        return replace(service, deadline_s=_live_deadline_s(launch, now_s))
    return _turn_ready(service, now_s, launch)


def _turn_ready(service: Service, now_s: float, launch: Launch) -> Service:
    ready = replace(_enter(service, S.READY, now_s, reason=None), was_ready=True, phase=None)
    return replace(ready, deadline_s=_live_deadline_s(launch, now_s))


def _live_deadline_s(launch: Launch, now_s: float) -> float | None:
    return None if launch.live is None else now_s + launch.live.within_s


def _turn_unhealthy(service: Service, now_s: float, launch: Launch) -> Step:
    assert launch.live is not None
    reason = f"no good answer for {launch.live.within_s:g} s: {service.answer or 'never asked'}"
    if launch.restart_unhealthy:
        return _stop(service, now_s, launch, AfterStop.FAILURE, reason)
    return _enter(service, S.UNHEALTHY, now_s, reason=reason), ()


def _time_is_up(service: Service, now_s: float, launch: Launch) -> Step:
    """It is not ready in time: more time while its start-up gets on, else the end of the attempt."""
    assert launch.ready is not None
    stalls_at_s = service.moved_at_s + (launch.ready.stalled_s or 0.0)
    if now_s < stalls_at_s:
        return replace(service, deadline_s=stalls_at_s), ()
    waited = f"not ready within {launch.ready.within_s:g} s"
    if launch.ready.stalled_s is not None:
        waited = f"not ready after {now_s - service.since_s:.0f} s and not moving for {launch.ready.stalled_s:g} s"
    at = f" ({service.phase})" if service.phase else ""
    words = f"{waited}{at}: {service.answer or 'its probe never answered'}"
    return _stop(service, now_s, launch, AfterStop.FAILURE, words)


def _stop(service: Service, now_s: float, launch: Launch, after: AfterStop, reason: str) -> Step:
    stopping = replace(_enter(service, S.STOPPING, now_s, reason=reason), after_stop=after, is_renewing=False)
    return replace(stopping, deadline_s=now_s + launch.stop_grace_s + KILL_MARGIN_S), (Effect.STOP,)


def _kill(service: Service, now_s: float, after: AfterStop) -> Step:
    killed = replace(service, after_stop=after, is_killed=True, deadline_s=now_s + UNKILLABLE_AFTER_S)
    return killed, (Effect.KILL,)


def _press_on(service: Service, now_s: float) -> Step:
    """The grace is over and it is still there: kill it; it was killed and is still there: say so and go on."""
    if service.is_killed:
        return _settle(service, S.FAILED, now_s, "its processes did not end after SIGKILL: stuck in the kernel"), ()
    return _kill(service, now_s, service.after_stop)


def _refused(service: Service, words: str, now_s: float) -> Service:
    gone = replace(service, has_process=False, is_running=False)
    if service.state is not S.STOPPING:
        return replace(_settle(gone, S.FAILED, now_s, words), is_refused=True)
    if service.after_stop is AfterStop.FAILURE:
        return _settle(gone, S.FAILED, now_s, service.reason)
    return _after_stop(gone, now_s)


def _exited(service: Service, exit_: Exited, now_s: float, launch: Launch) -> Service:
    from grpo_tui.services.base import RestartPolicy  # here, since `state.json` is read without any setting

    gone = replace(service, has_process=False, is_running=False, is_renewing=False, exit_code=exit_.code)
    if service.is_renewing:
        return _wait(gone, now_s)  # it was to end what it did, and ended altogether
    if service.state is S.FAILED:
        return gone  # the kernel let go of it after all
    if service.state is S.STOPPING and service.after_stop is not AfterStop.FAILURE:
        return _after_stop(gone, now_s)
    gone = replace(gone, last_lines=exit_.last_lines)
    if service.state is S.STOPPING:
        return _failed(gone, service.reason or "stopped", exit_, now_s, launch)
    words = exit_.error or exit_words(exit_.code)
    if exit_.code == 0 and service.state is S.STARTING and launch.ready is not None:
        words = f"{words} before it was ready ({service.answer or 'its probe never answered'})"
    if exit_.code == 0 and launch.restart is not RestartPolicy.ALWAYS:
        return _settle(gone, S.FINISHED, now_s, words)
    if exit_.code in launch.final_exit_codes:
        said = f": {last_words(exit_.last_lines[-1])}" if exit_.last_lines else ""
        return _settle(gone, S.FAILED, now_s, f"{words}{said}")
    return _failed(gone, words, exit_, now_s, launch)


def _after_stop(gone: Service, now_s: float) -> Service:
    if gone.after_stop is AfterStop.RESTART:
        return _wait(gone, now_s)
    return _settle(gone, S.STOPPED, now_s, gone.reason)


def _failed(gone: Service, words: str, exit_: Exited, now_s: float, launch: Launch) -> Service:
    """Start again after a while if the policy wants it and the limit allows it; else it has failed."""
    from grpo_tui.services.base import RestartPolicy

    recent = tuple(at for at in gone.restarted_at_s if now_s - at < launch.restart_window_s)
    if launch.restart is RestartPolicy.NEVER:
        return _settle(gone, S.FAILED, now_s, words)
    if len(recent) >= launch.max_restarts:
        times = "1 restart" if len(recent) == 1 else f"{len(recent)} restarts"
        return replace(_settle(gone, S.FAILED, now_s, f"{words}; given up after {times}"), restarted_at_s=recent)
    delay_s = backoff_s(launch, len(recent), exit_.jitter)
    reason = f"{words}; restart {len(recent) + 1} of {launch.max_restarts} after {delay_s:.1f} s"
    resting = replace(_enter(gone, S.BACKOFF, now_s, reason=reason), restarted_at_s=(*recent, now_s))
    return replace(resting, deadline_s=now_s + delay_s, after_stop=AfterStop.REST)


def backoff_s(launch: Launch, num_restarts: int, jitter: float) -> float:
    """Seconds before the next restart: doubled each time, up to a minute, and spread by `jitter`."""
    plain_s = min(MAX_BACKOFF_S, launch.backoff_s * 2.0 ** min(num_restarts, 30))
    return plain_s * (1.0 + BACKOFF_SPREAD * jitter)


def last_words(line: str) -> str:
    """The last line of a log, as a reason repeats it: one that is cut says so."""
    return line if len(line) <= MAX_SAID_CHARS else f"{line[: MAX_SAID_CHARS - 1]}…"


def exit_words(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "ended, and its exit code is not known"
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"ended by {known.get(-code, f'signal {-code}')}"
    return f"exit code {code}"
