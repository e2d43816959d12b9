"""The life cycle of one service as a pure function: (service, event, now) -> (service, effects).

    WAITING -> STARTING -> READY <-> UNHEALTHY -> STOPPING -> STOPPED
       ^          |          |           |           |
       |          +----------+-----------+-----------+--> FINISHED | FAILED
       +-- BACKOFF <---------+ (the restart policy says so)

A service may be started held (`Launch.prepares`): it is WAITING and has a process, which imports what it needs and then
waits for a gate. `Admitted` opens the gate after the check of ports and GPU memory; its limits count from there.

A requested restart is pending (`is_restart_pending`) until `order.py` admits it: every service that follows it has to
end first. A service that can restart in place goes back to STARTING and keeps its process; if it does not log the line
that says so within its stop grace, it is stopped and started.

Nothing here starts a process, reads a clock or sleeps. `core.py` carries the effects out and posts what happened as
events; `order.py` decides which service may start, restart or stop now; `explanations.py` words the state for people.
Seconds are monotonic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from grpo_engine.wire.supervisor import ProbeOutcome, Refusal
from grpo_engine.wire.supervisor import ServiceState as S
from grpo_tui.supervisor.report.exits import exit_text

if TYPE_CHECKING:
    from grpo_tui.services.base import Launch

MAX_BACKOFF_S = 60.0
MAX_INNOCENT_RESTARTS = 3
"""Within `restart_window_s`, of a service that another one ended: which of the two is at fault is not certain."""
KILL_MARGIN_S = 2.0
"""The keeper sends SIGKILL after the grace; this much later the supervisor does, in case the keeper hangs."""
MAX_QUOTED_CHARS = 200
"""Of a log line that a reason quotes."""
UNKILLABLE_AFTER_S = 15.0
"""A process that outlives SIGKILL for so long hangs in the kernel, usually in a driver: it is reported as failed."""


class Effect(StrEnum):
    """What `service_runner.py` does to the real process, in order, one at a time per service."""

    SPAWN = "spawn"
    SPAWN_HELD = "spawn held"
    OPEN_GATE = "open gate"
    RESTART_IN_PLACE = "restart in place"
    STOP = "stop"
    KILL = "kill"


class AfterStop(StrEnum):
    """What follows when a service that is being stopped has exited."""

    REST = "rest"
    RESTART = "restart"
    FAILURE = "failure"
    """It is stopped since it was never ready, unhealthy or over a limit: the restart policy decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The state of one service."""

    name: str
    state: S = S.WAITING
    attempt: int = 0
    num_in_place_restarts: int = 0
    """How often it was restarted in place, in all attempts."""
    is_restarting_in_place: bool = False
    """Whether the signal for a restart in place was sent and its log has not confirmed it yet."""
    is_restart_pending: bool = False
    """Whether a restart was requested and waits until the services that follow it have ended."""
    was_asked_to_restart: bool = False
    """Whether it has left ready since its restart, or that of a service that it follows, was requested."""
    has_process: bool = False
    """Whether an attempt was started and has not been seen to exit; at most one at any time."""
    is_held: bool = False
    """Whether that attempt was started held, and its turn has not come."""
    is_prepared: bool = False
    """Whether an attempt that was started held has reported that it has done what it can before its turn."""
    is_running: bool = False
    """Whether the attempt's process is known to run, which takes a moment after the decision."""
    was_ready: bool = False
    """Whether this attempt has been ready."""
    since_s: float = 0.0
    """When it entered its state."""
    deadline_s: float | None = None
    """When a `Tick` acts; None while no timer is armed."""
    restarted_at_s: tuple[float, ...] = ()
    """Restarts by policy within `restart_window_s`."""
    after_stop: AfterStop = AfterStop.REST
    exit_code: int | None = None
    oom_kills: int | None = None
    """As in `Exited`, of the last attempt."""
    reason: str | None = None
    """Why it left the state that was asked for, for people."""
    answer: str | None = None
    """The last answer of its probe, for people."""
    outcome: ProbeOutcome | None = None
    """The same for programs."""
    phase: str | None = None
    """The phase of its start-up, where its log shows one."""
    progressed_at_s: float = 0.0
    """When its start-up last made progress."""
    last_lines: tuple[str, ...] = ()
    """The end of its log when it failed."""
    is_killed: bool = False
    """Whether SIGKILL was sent in this attempt."""
    is_refused: bool = False
    """Whether it was not started because another process holds what it needs."""
    refusals: tuple[Refusal, ...] = ()
    """What it needs and who holds it, while it is refused."""

    @property
    def is_restarting_by_request(self) -> bool:
        """Whether it restarts since that was requested; a stop or a failure meanwhile ends it."""
        is_under_way = self.state in {S.WAITING, S.STARTING} or self.after_stop is AfterStop.RESTART
        return self.was_asked_to_restart and is_under_way

    @property
    def is_before_first_turn(self) -> bool:
        """Whether it has never been admitted."""
        return self.attempt == (1 if self.is_held else 0)

    @property
    def num_starts(self) -> int:
        """Attempts and restarts in place; grows with every start."""
        return self.attempt + self.num_in_place_restarts


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartAsked:
    """A client or a policy requests a start."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A client or the end of the run requests a stop."""

    reason: str = "stopped by request"


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """A client requests a restart; it does not count as a failure."""


@dataclass(frozen=True, slots=True)
class RestartRequired:
    """Its process must end now and be started again: a service that it follows restarts."""

    reason: str
    grace_s: float = math.inf
    """Until SIGKILL, where that is sooner than its own grace: it cannot do without what has failed."""


@dataclass(frozen=True, slots=True)
class KillAsked:
    """A client or the end of the run requests SIGKILL."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """`order.py` lets it start, or lets its pending restart begin."""


@dataclass(frozen=True, slots=True)
class MayPrepare:
    """`order.py` lets it start held."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An attempt that was started held has done what it can before its turn."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Spawned:
    """Its process runs; of one that was started held, its gate is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartedInPlace:
    """Its log confirmed this restart in place: nothing of the previous start runs any more."""

    num_in_place_restarts: int


@dataclass(frozen=True, slots=True)
class Refused:
    """It was not started: another process holds what it needs, or it was stopped first."""

    words: str
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswered:
    """Its probe was sent and answered, or not."""

    attempt: int
    num_in_place_restarts: int = 0
    outcome: ProbeOutcome
    words: str

    @property
    def passed(self) -> bool:
        """Whether the probe succeeded."""
        return self.outcome is ProbeOutcome.PASSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """Its start-up makes progress: its log or its GPU memory has grown."""

    attempt: int
    num_in_place_restarts: int = 0
    phase: str | None
    """The phase that its log shows, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKilled:
    """What serves was killed; the main process of the attempt waits to be asked for the next one in place."""

    attempt: int
    num_in_place_restarts: int = 0
    words: str


@dataclass(frozen=True, slots=True)
class LimitExceeded:
    """It uses more than its limit, e.g. of memory."""

    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """Every process of this attempt has ended, or it could not be started (see `error`)."""

    code: int | None
    """Negative for a signal; None when unknown."""
    error: str | None = None
    failed_by: str | None = None
    """The service whose failure ended it, as its log shows."""
    cause: str | None = None
    """Which of its ranks ended first, and how, as it reported."""
    is_unfinished: bool = False
    """Whether its work is not done, although its code is 0."""
    oom_kills: int | None = None
    """Processes that the kernel's out-of-memory killer killed on its machine meanwhile; None where unknown."""
    last_lines: tuple[str, ...] = ()
    jitter: float = 0.0
    """Fraction, 0 to 1, of the spread added to a backoff, so that services do not restart at the same moment."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Request = StartAsked | StopAsked | RestartAsked | KillAsked
Decision = Admitted | MayPrepare | RestartRequired
Observation = (
    Prepared | Spawned | RestartedInPlace | Refused | ProbeAnswered | Progressed | ServerKilled | LimitExceeded | Exited
)
Event = Request | Decision | Observation | Tick
Step = tuple[Service, tuple[Effect, ...]]

RUNNING = frozenset({S.STARTING, S.READY, S.UNHEALTHY})
BACKOFF_SPREAD = 0.25


def step(service: Service, event: Event, now_s: float, launch: Launch) -> Step:
    """Advance one service by one event; an event that does not apply changes nothing."""
    is_due = service.deadline_s is not None and now_s >= service.deadline_s
    if isinstance(event, StopAsked | KillAsked):
        service = replace(service, is_restart_pending=False)
    match event, service.state:
        case StartAsked(), S.STOPPED | S.FINISHED | S.FAILED | S.BACKOFF if not service.has_process:
            return _wait_by_request(service, now_s), ()
        case StartAsked(), S.STOPPING:
            return replace(service, after_stop=AfterStop.RESTART), ()
        case RestartAsked(), state if state is not S.WAITING:  # what waits starts without it
            return replace(service, is_restart_pending=True), ()
        case Admitted(), _ if service.is_restart_pending:
            return _restart(replace(service, is_restart_pending=False), now_s, launch)
        case MayPrepare(), S.WAITING if launch.prepares and not service.has_process:
            return _start_held(service), (Effect.SPAWN_HELD,)
        case Prepared(attempt), S.WAITING | S.STARTING if service.has_process and attempt == service.attempt:
            return replace(service, is_prepared=True), ()
        case StopAsked() | KillAsked() | RestartRequired() | LimitExceeded(), S.WAITING if service.is_held:
            return _stop_held(service, event, now_s, launch)
        case RestartRequired(reason, grace_s), S.STARTING | S.READY | S.UNHEALTHY:
            return _stop(_asked_to_restart(service), now_s, launch, AfterStop.RESTART, reason, most_s=grace_s)
        case StopAsked(reason), S.WAITING | S.BACKOFF:
            return _settle(service, S.STOPPED, now_s, f"{reason}, before it was started"), ()
        case KillAsked(), S.WAITING | S.BACKOFF:
            return _settle(service, S.STOPPED, now_s, "killed by request, before it was started"), ()
        case StopAsked(reason), S.STARTING | S.READY | S.UNHEALTHY:
            return _stop(service, now_s, launch, AfterStop.REST, reason)
        case StopAsked(), S.STOPPING:
            return replace(service, after_stop=AfterStop.REST), ()
        case KillAsked(), S.STARTING | S.READY | S.UNHEALTHY:
            stopping = _enter(service, S.STOPPING, now_s, reason="killed by request")
            return _kill(replace(stopping, is_restarting_in_place=False), now_s, AfterStop.REST)
        case KillAsked(), S.STOPPING if not service.is_killed:
            return _kill(service, now_s, AfterStop.REST)
        case Admitted(), S.WAITING if service.is_held:
            return _open_gate(service, now_s, launch)
        case Admitted(), S.WAITING:
            return _start(service, now_s, launch)
        case Spawned(), _ if service.has_process and not (service.is_restarting_in_place or service.is_held):
            return _spawned(replace(service, is_running=True), now_s, launch), ()
        case RestartedInPlace(num_in_place_restarts=number), S.STARTING if _is_awaited(number, service):
            confirmed = replace(service, is_running=True, is_restarting_in_place=False, phase=None)
            return _spawned(confirmed, now_s, launch), ()
        case Refused(), _ if service.has_process:
            return _refused(service, event, now_s, launch), ()
        case ProbeAnswered(), S.STARTING | S.READY | S.UNHEALTHY if _is_of_this_start(event, service):
            answered = replace(service, answer=event.words, outcome=event.outcome)
            return _answered(answered, event.passed, now_s, launch), ()
        case Progressed(phase=phase), S.STARTING if _is_of_this_start(event, service):
            return replace(service, progressed_at_s=now_s, phase=phase or service.phase), ()
        case ServerKilled(words=words), S.STARTING | S.READY | S.UNHEALTHY if _is_of_this_start(event, service):
            return (service, ()) if service.is_restart_pending else _server_killed(service, words, now_s, launch)
        case LimitExceeded(words), S.STARTING | S.READY | S.UNHEALTHY:
            return _stop(service, now_s, launch, AfterStop.FAILURE, words)
        case Exited(), _ if service.has_process:
            return _exited(service, event, now_s, launch), ()
        case Tick(), S.STARTING if is_due and service.is_restarting_in_place:
            reason = f"did not restart in place within {launch.stop_grace_s:g} s: stopped and started instead"
            return _stop(service, now_s, launch, AfterStop.RESTART, reason)
        case Tick(), S.STARTING if is_due:
            return _handle_ready_timeout(service, now_s, launch)
        case Tick(), S.READY if is_due:
            return _become_unhealthy(service, now_s, launch)
        case Tick(), S.BACKOFF if is_due:
            return _wait(service, now_s), ()
        case Tick(), S.STOPPING if is_due:
            return _escalate_stop(service, now_s)
        case _:
            return service, ()


def adopted(service: Service, now_s: float, launch: Launch, *, is_held: bool = False) -> Service:
    """A service whose process a new supervisor found alive, in the state that the previous supervisor saw last.

    No probe ran in between, so there is time for an answer before a missing one has consequences.

    Args:
        is_held: whether its gate is closed, which its keeper knows better than the previous supervisor wrote.
    """
    if is_held and service.state is not S.STOPPING:
        waiting = service if service.state is S.WAITING else _wait(service, now_s)
        return replace(waiting, has_process=True, is_running=False, is_held=True)
    service = replace(service, is_held=False, is_prepared=False)
    taken = replace(service, has_process=True, is_running=not service.is_restarting_in_place)
    match service.state:
        case S.READY:
            return replace(taken, deadline_s=_live_deadline_s(launch, now_s))
        case S.STARTING if taken.is_restarting_in_place:  # the signal is sent again: it may never have been
            return replace(taken, deadline_s=now_s + launch.stop_grace_s)
        case S.STARTING if launch.ready is not None and taken.deadline_s is not None:
            soonest_s = now_s + 2 * launch.ready.timeout_s + launch.ready.interval_s
            return replace(taken, deadline_s=max(taken.deadline_s, soonest_s))
        case S.STARTING | S.UNHEALTHY | S.STOPPING:
            return taken
    found = _enter(replace(service, has_process=True), S.STARTING, now_s, reason=None)
    return _spawned(replace(found, is_running=True, deadline_s=_ready_deadline_s(launch, now_s)), now_s, launch)


# --- transitions -----------------------------------------------------------------------------------------------------


def _enter(service: Service, state: S, now_s: float, *, reason: str | None) -> Service:
    was_asked = service.was_asked_to_restart and state in {S.STOPPING, S.WAITING, S.STARTING}
    return replace(service, state=state, since_s=now_s, deadline_s=None, reason=reason, was_asked_to_restart=was_asked)


def _settle(service: Service, state: S, now_s: float, reason: str | None) -> Service:
    return replace(_enter(service, state, now_s, reason=reason), after_stop=AfterStop.REST, answer=None, outcome=None)


def _wait(service: Service, now_s: float) -> Service:
    waiting = _enter(service, S.WAITING, now_s, reason=None)
    return replace(waiting, is_restart_pending=False, after_stop=AfterStop.REST, answer=None, outcome=None)


def _wait_by_request(service: Service, now_s: float) -> Service:
    """Wait for a start that a person asked for: earlier restarts by policy no longer count."""
    return _wait(replace(service, restarted_at_s=(), is_refused=False, refusals=()), now_s)


def _asked_to_restart(service: Service) -> Service:
    return replace(service, was_asked_to_restart=service.was_asked_to_restart or service.state is S.READY)


def _restart(service: Service, now_s: float, launch: Launch) -> Step:
    service = _asked_to_restart(service)
    match service.state:
        case S.STOPPED | S.FINISHED | S.FAILED | S.BACKOFF if not service.has_process:
            return _wait_by_request(service, now_s), ()
        case S.STOPPING:
            return replace(service, after_stop=AfterStop.RESTART), ()
        case S.STARTING | S.READY | S.UNHEALTHY if _can_restart_in_place(service, launch):
            return _restart_in_place(service, now_s, launch)
        case S.STARTING | S.READY | S.UNHEALTHY:
            return _stop(service, now_s, launch, AfterStop.RESTART, "restarted by request")
        case _:  # its process hangs in the kernel
            return service, ()


def _start(service: Service, now_s: float, launch: Launch) -> Step:
    return _begin(_new_attempt(service), now_s, launch), (Effect.SPAWN,)


def _start_held(service: Service) -> Service:
    return replace(_new_attempt(service), is_held=True)


def _open_gate(service: Service, now_s: float, launch: Launch) -> Step:
    return _begin(replace(service, is_held=False), now_s, launch), (Effect.OPEN_GATE,)


def _begin(service: Service, now_s: float, launch: Launch) -> Service:
    """Its turn has come."""
    started = _enter(service, S.STARTING, now_s, reason=None)
    return replace(started, progressed_at_s=now_s, deadline_s=_ready_deadline_s(launch, now_s))


def _stop_held(
    service: Service, event: StopAsked | KillAsked | RestartRequired | LimitExceeded, now_s: float, launch: Launch
) -> Step:
    """End the process of a service that was started held; it has no work to finish."""
    match event:
        case StopAsked(reason):
            return _stop(service, now_s, launch, AfterStop.REST, f"{reason}, before it began")
        case KillAsked():
            stopping = _enter(service, S.STOPPING, now_s, reason="killed by request, before it began")
            return _kill(replace(stopping, is_held=False), now_s, AfterStop.REST)
        case RestartRequired(reason):
            return _stop(service, now_s, launch, AfterStop.RESTART, reason)
        case LimitExceeded(words):
            return _stop(service, now_s, launch, AfterStop.FAILURE, words)


def _new_attempt(service: Service) -> Service:
    return replace(
        service,
        is_held=False,
        is_prepared=False,
        attempt=service.attempt + 1,
        has_process=True,
        is_running=False,
        is_restarting_in_place=False,
        was_ready=False,
        is_killed=False,
        exit_code=None,
        oom_kills=None,
        answer=None,
        outcome=None,
        phase=None,
        last_lines=(),
    )


def _can_restart_in_place(service: Service, launch: Launch) -> bool:
    return launch.restart_in_place is not None and (service.is_running or service.is_restarting_in_place)


def _restart_in_place(service: Service, now_s: float, launch: Launch) -> Step:
    """Restart it in the process that it has. A second request meanwhile does not extend the deadline."""
    restarting = replace(
        _enter(service, S.STARTING, now_s, reason=None),
        num_in_place_restarts=service.num_in_place_restarts + 1,
        is_restarting_in_place=True,
        is_running=False,
        was_ready=False,
        answer=None,
        outcome=None,
        phase="ending the previous start",
        progressed_at_s=now_s,
        deadline_s=service.deadline_s if service.is_restarting_in_place else now_s + launch.stop_grace_s,
    )
    return restarting, (Effect.RESTART_IN_PLACE,)


def _server_killed(service: Service, words: str, now_s: float, launch: Launch) -> Step:
    """Restart it in place if it was ready, once within `restart_window_s`; else it is stopped, as after a failure."""
    from grpo_tui.services.base import RestartPolicy

    is_first = not any(now_s - at < launch.restart_window_s for at in service.restarted_at_s)
    may_restart = launch.restart is not RestartPolicy.NEVER and launch.max_restarts > 0 and service.was_ready
    if not (is_first and may_restart and _can_restart_in_place(service, launch)):
        return _stop(service, now_s, launch, AfterStop.FAILURE, words)
    return replace(service, is_restart_pending=True, reason=words, restarted_at_s=(now_s,)), ()


def _is_awaited(num_in_place_restarts: int, service: Service) -> bool:
    return service.is_restarting_in_place and num_in_place_restarts == service.num_in_place_restarts


def _is_of_this_start(event: ProbeAnswered | Progressed | ServerKilled, service: Service) -> bool:
    """Whether the event is about this start, and not about the one before it, which may still answer probes."""
    is_this_start = (event.attempt, event.num_in_place_restarts) == (service.attempt, service.num_in_place_restarts)
    return is_this_start and not service.is_restarting_in_place


def _ready_deadline_s(launch: Launch, now_s: float) -> float | None:
    return None if launch.ready is None else now_s + launch.ready.within_s


def _spawned(service: Service, now_s: float, launch: Launch) -> Service:
    if service.state is not S.STARTING:
        return service
    if launch.ready is None:
        return _become_ready(service, now_s, launch)
    # The check of ports and GPU memory before the start does not count against the start's own limit.
    return replace(service, deadline_s=_ready_deadline_s(launch, now_s), progressed_at_s=now_s)


def _answered(service: Service, passed: bool, now_s: float, launch: Launch) -> Service:
    if not passed:
        return service
    if service.state is S.READY:
        return replace(service, deadline_s=_live_deadline_s(launch, now_s))
    return _become_ready(service, now_s, launch)


def _become_ready(service: Service, now_s: float, launch: Launch) -> Service:
    ready = replace(_enter(service, S.READY, now_s, reason=None), was_ready=True, phase=None, refusals=())
    return replace(ready, deadline_s=_live_deadline_s(launch, now_s))


def _live_deadline_s(launch: Launch, now_s: float) -> float | None:
    return None if launch.live is None else now_s + launch.live.within_s


def _become_unhealthy(service: Service, now_s: float, launch: Launch) -> Step:
    """It has not passed in time. Without an answer since then the supervisor was late: it waits for the next one."""
    assert launch.live is not None
    if service.outcome in {None, ProbeOutcome.PASSED}:
        return replace(service, deadline_s=now_s + launch.live.interval_s + launch.live.timeout_s), ()
    reason = f"no liveness for {launch.live.within_s:g} s: {service.answer}"
    if launch.restart_unhealthy:
        return _stop(service, now_s, launch, AfterStop.FAILURE, reason)
    return _enter(service, S.UNHEALTHY, now_s, reason=reason), ()


def _handle_ready_timeout(service: Service, now_s: float, launch: Launch) -> Step:
    """It is not ready in time: extend the deadline while its start-up makes progress, else stop the attempt."""
    assert launch.ready is not None
    stalls_at_s = service.progressed_at_s + (launch.ready.stalled_s or 0.0)
    if now_s < stalls_at_s:
        return replace(service, deadline_s=stalls_at_s), ()
    waited = f"not ready within {launch.ready.within_s:g} s"
    if launch.ready.stalled_s is not None:
        waited = f"not ready after {now_s - service.since_s:.0f} s and no progress for {launch.ready.stalled_s:g} s"
    at = f" ({service.phase})" if service.phase else ""
    words = f"{waited}{at}: {service.answer or 'its probe never answered'}"
    return _stop(service, now_s, launch, AfterStop.FAILURE, words)


def _stop(
    service: Service, now_s: float, launch: Launch, after: AfterStop, reason: str, most_s: float = math.inf
) -> Step:
    stopping = replace(
        _enter(service, S.STOPPING, now_s, reason=reason),
        after_stop=after,
        is_restarting_in_place=False,
        is_held=False,
        deadline_s=now_s + min(most_s, launch.stop_grace_s + KILL_MARGIN_S),
    )
    return stopping, (Effect.STOP,)


def _kill(service: Service, now_s: float, after: AfterStop) -> Step:
    killed = replace(service, after_stop=after, is_killed=True, deadline_s=now_s + UNKILLABLE_AFTER_S)
    return killed, (Effect.KILL,)


def _escalate_stop(service: Service, now_s: float) -> Step:
    """Its processes outlived the grace period: send SIGKILL. They outlived SIGKILL too: it has failed."""
    if service.is_killed:
        return _settle(service, S.FAILED, now_s, "its processes outlived SIGKILL: they hang in the kernel"), ()
    return _kill(service, now_s, service.after_stop)


def _refused(service: Service, refused: Refused, now_s: float, launch: Launch) -> Service:
    """It has failed; but where only a port was taken, a restart is tried again: by policy, or if it was requested."""
    gone = replace(service, has_process=False, is_running=False, is_held=False)
    if service.state is not S.STOPPING:
        settled = _settle(gone, S.FAILED, now_s, refused.words)
        was_asked = gone.was_asked_to_restart
        if (gone.restarted_at_s or was_asked) and {each.resource for each in refused.refusals} == {"port"}:
            settled = _failed(gone, refused.words, 0.0, now_s, launch, is_innocent=was_asked)
        is_refused = settled.state is S.FAILED
        return replace(settled, is_refused=is_refused, refusals=refused.refusals if is_refused else ())
    if service.after_stop is AfterStop.FAILURE:
        return _settle(gone, S.FAILED, now_s, service.reason)
    return _after_stop(gone, now_s)


def _exited(service: Service, exit_: Exited, now_s: float, launch: Launch) -> Service:
    from grpo_tui.services.base import RestartPolicy  # here, since `state.json` is read without any setting

    gone = replace(service, has_process=False, is_running=False, is_restarting_in_place=False, exit_code=exit_.code)
    gone = replace(gone, is_held=False, oom_kills=exit_.oom_kills)
    if service.is_restarting_in_place:
        return _wait(gone, now_s)  # it exited instead of restarting in place
    if service.state is S.FAILED:
        return gone  # it hung in the kernel and has ended after all
    if service.state is S.STOPPING and service.after_stop is not AfterStop.FAILURE:
        return _after_stop(gone, now_s)
    gone = replace(gone, last_lines=exit_.last_lines)
    if service.state is S.STOPPING:
        return _failed(gone, service.reason or "stopped", exit_.jitter, now_s, launch)
    reason = exit_.error or exit_text(exit_.code) + (f": {exit_.cause}" if exit_.cause else "")
    if service.is_held:
        reason = f"{reason} before its turn to begin"
        if exit_.code == 0:
            return _failed(gone, reason, exit_.jitter, now_s, launch)
    if exit_.code == 0 and service.state is S.STARTING and launch.ready is not None:
        reason = f"{reason} before it was ready ({service.answer or 'its probe never answered'})"
        if launch.is_optional and exit_.last_lines:
            reason = shortened(exit_.last_lines[-1])
    if exit_.is_unfinished:
        reason = f"{reason}, but nothing here stopped it: a signal from outside"
        return _failed(gone, reason, exit_.jitter, now_s, launch)
    if exit_.code == 0 and launch.restart is not RestartPolicy.ALWAYS:
        return _settle(gone, S.FINISHED, now_s, reason)
    if exit_.code != 0 and exit_.failed_by is not None:
        return _failed(
            gone, f"ended by a failure of {exit_.failed_by}: {reason}", exit_.jitter, now_s, launch, is_innocent=True
        )
    if exit_.code in launch.final_exit_codes:
        last_line = f": {shortened(exit_.last_lines[-1])}" if exit_.last_lines else ""
        return _settle(gone, S.FAILED, now_s, f"{reason}{last_line}")
    return _failed(gone, reason, exit_.jitter, now_s, launch)


def _after_stop(gone: Service, now_s: float) -> Service:
    if gone.after_stop is AfterStop.RESTART:
        return _wait(gone, now_s)
    return _settle(gone, S.STOPPED, now_s, gone.reason)


def _failed(
    gone: Service, cause: str, jitter: float, now_s: float, launch: Launch, *, is_innocent: bool = False
) -> Service:
    """Restart after a backoff if the policy and the limit of restarts allow it; else it has failed.

    Args:
        is_innocent: another service ended it, which is restarted too: its own policy does not count.
    """
    from grpo_tui.services.base import RestartPolicy

    recent = tuple(at for at in gone.restarted_at_s if now_s - at < launch.restart_window_s)
    most = min(launch.max_restarts, MAX_INNOCENT_RESTARTS) if is_innocent else launch.max_restarts
    if launch.restart is RestartPolicy.NEVER and not is_innocent:
        return _settle(gone, S.FAILED, now_s, cause)
    if len(recent) >= most:
        times = "1 restart" if len(recent) == 1 else f"{len(recent)} restarts"
        return replace(_settle(gone, S.FAILED, now_s, f"{cause}; given up after {times}"), restarted_at_s=recent)
    delay_s = backoff_s(launch, len(recent), jitter)
    reason = f"{cause}; restart {len(recent) + 1} of {most} after {delay_s:.1f} s"
    resting = replace(_enter(gone, S.BACKOFF, now_s, reason=reason), restarted_at_s=(*recent, now_s))
    return replace(resting, deadline_s=now_s + delay_s, after_stop=AfterStop.REST)


def backoff_s(launch: Launch, num_restarts: int, jitter: float) -> float:
    """Seconds before the next restart: doubled each time, up to a minute, and spread by `jitter`."""
    plain_s = min(MAX_BACKOFF_S, launch.backoff_s * 2.0 ** min(num_restarts, 30))
    return plain_s * (1.0 + BACKOFF_SPREAD * jitter)


def shortened(line: str) -> str:
    """A log line as a reason quotes it; an ellipsis marks the cut."""
    return line if len(line) <= MAX_QUOTED_CHARS else f"{line[: MAX_QUOTED_CHARS - 1]}…"
