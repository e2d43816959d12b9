"""Which services may start, restart and stop now, and the state of the run: pure functions over all services of a run.

Assumes that `needs` has no cycle, which a profile is checked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grpo_engine.wire.supervisor import RunState
from grpo_engine.wire.supervisor import ServiceState as S
from grpo_tui.services.base import Launch, NeedCondition
from grpo_tui.supervisor.machine import (
    RUNNING,
    Admitted,
    AfterStop,
    Event,
    KillAsked,
    MayPrepare,
    RestartRequired,
    Service,
    StopAsked,
)

Services = Mapping[str, Service]
Launches = Mapping[str, Launch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The decision to end a run: the state it ends in, and the time that all its services get together.

    Worked example: four services in a chain with a budget of 8 s. The last of the chain is stopped at once, each one
    below as soon as those that need it have ended, but after 2, 4, 6 s at the latest; at 8 s what is left is killed. So
    four services that ignore SIGTERM take one budget, not four.
    """

    state: RunState
    since_s: float
    budget_s: float

    @property
    def kill_at_s(self) -> float:
        """When the processes that are left are killed."""
        return self.since_s + self.budget_s


def decisions(
    services: Services, launches: Launches, ending: Ending | None, now_s: float, *, num_cores: int = 1
) -> list[tuple[str, Event]]:
    """The events that follow from the state of all services: starts and restarts, or stops once the run is ending.

    Args:
        num_cores: on which services run.
    """
    if ending is not None:
        return list(_stops(services, launches, ending, now_s))
    restarts = [name for name, service in services.items() if service.is_restart_pending]
    held_back = {follower for name in restarts for follower in transitive_followers(name, launches)}
    starts = [name for name in admissible(services, launches) if name not in held_back]
    return [
        *(event for name in restarts for event in _admit_after_followers(name, services, launches)),
        *(event for name in starts for event in _admit(name, services, launches)),
        *((name, MayPrepare()) for name in preparable(services, launches, num_cores)),
    ]


# --- starts and restarts -------------------------------------------------------------------------------------------


def is_met(condition: NeedCondition, needed: Service) -> bool:
    """Whether a needed service satisfies the condition."""
    match condition:
        case NeedCondition.STARTED:
            return (needed.is_running and needed.state is not S.STOPPING) or needed.state is S.FINISHED
        case NeedCondition.READY:
            is_up = needed.state is S.READY and needed.is_running
            return is_up or (needed.state is S.FINISHED and needed.was_ready)
        case NeedCondition.FINISHED:
            return needed.state is S.FINISHED
        case NeedCondition.SETTLED:
            return is_at_rest(needed) or is_met(NeedCondition.READY, needed)


def is_at_rest(service: Service) -> bool:
    """Whether it has ended and is not about to start again."""
    return service.state in {S.FINISHED, S.FAILED, S.STOPPED} and not service.has_process


def unmet_needs(name: str, services: Services, launches: Launches) -> list[tuple[str, NeedCondition]]:
    """The needs that a service still waits for."""
    needs = launches[name].needs.items()
    unmet = [(needed, condition) for needed, condition in needs if not is_met(condition, services[needed])]
    if not launches[name].needs_one_replica or services[name].is_before_first_turn:
        return unmet
    up = {launches[needed].settings for needed, condition in needs if is_met(condition, services[needed])}
    return [
        (needed, condition)
        for needed, condition in unmet
        if services[needed].state not in {S.FAILED, S.STOPPED} or launches[needed].settings not in up
    ]


def admissible(services: Services, launches: Launches) -> list[str]:
    """Services that wait and have all that they need, in start order."""
    return [n for n, s in services.items() if s.state is S.WAITING and not unmet_needs(n, services, launches)]


def preparable(services: Services, launches: Launches, num_cores: int) -> list[str]:
    """Services that may be started held: those that wait for others which may still come up.

    Half of the cores are left to the service that they wait for, so that it does not start more slowly: on two cores
    one service prepares at a time, in start order.
    """
    num_preparing = sum(service.is_held and not service.is_prepared for service in services.values())
    waiting = [
        name
        for name, service in services.items()
        if service.state is S.WAITING
        and not service.has_process
        and launches[name].prepares
        and unmet_needs(name, services, launches)
        and not is_permanently_blocked(name, services, launches)
    ]
    return waiting[: max(0, max(1, num_cores // 2) - num_preparing)]


def is_permanently_blocked(name: str, services: Services, launches: Launches) -> bool:
    """Whether a service has failed, or waits for one that will not come up unless a person starts it."""
    service = services[name]
    if service.state is S.FAILED:
        return True
    if service.state is not S.WAITING:
        return False
    return any(
        services[needed].state is S.FINISHED or is_permanently_blocked(needed, services, launches)
        for needed, _ in unmet_needs(name, services, launches)
    )


def _admit(name: str, services: Services, launches: Launches) -> list[tuple[str, Event]]:
    """Start a service; any but the first start waits for its followers to end."""
    if services[name].is_before_first_turn:
        return [(name, Admitted())]
    return _admit_after_followers(name, services, launches)


def _admit_after_followers(name: str, services: Services, launches: Launches) -> list[tuple[str, Event]]:
    """Start or restart a service once its followers have ended, since they may map its memory; else stop them."""
    followers = [
        each
        for each in transitive_followers(name, launches)
        if services[each].has_process
        and not services[each].is_held  # it maps nothing yet
        and services[each].state is not S.FAILED  # it hangs in the kernel
    ]
    if not followers:
        return [(name, Admitted())]
    running = [each for each in reversed(followers) if services[each].state in RUNNING]
    return [(follower, RestartRequired(f"restarted because {name} restarts")) for follower in running]


def transitive_followers(name: str, launches: Launches) -> list[str]:
    """Services that must be restarted with `name` (`restart_with`), and those that follow them, in order."""
    followers: list[str] = []
    for follower in launches[name].followers:
        for each in (follower, *transitive_followers(follower, launches)):
            if each not in followers and each != name:
                followers.append(each)
    return followers


# --- the end of the run --------------------------------------------------------------------------------------------


def run_enders(launches: Launches) -> list[str]:
    """Services whose end is the end of the run: those with `ends_run`, else those that no other service needs."""
    named = [name for name, launch in launches.items() if launch.ends_run]
    needed = {need for launch in launches.values() for need in launch.needs}
    return named or [name for name, launch in launches.items() if launch.ends_run is None and name not in needed]


def run_outcome(services: Services, launches: Launches) -> RunState | None:
    """How the run ended, or None while it goes on: finished when all that end it have, failed when none of them can."""
    enders = run_enders(launches)
    unfinished = [name for name in enders if services[name].state is not S.FINISHED]
    if not enders:
        return None
    if not unfinished:
        return RunState.FINISHED
    are_blocked = all(is_permanently_blocked(name, services, launches) for name in unfinished)
    return RunState.FAILED if are_blocked else None


def _stops(services: Services, launches: Launches, ending: Ending, now_s: float) -> Iterator[tuple[str, Event]]:
    """Stop the services whose time to stop has come; kill what is left when the budget is spent."""
    stop_times = stop_times_s(ending, services, launches)
    for name, service in services.items():
        is_due = service.state in RUNNING and now_s >= stop_times.get(name, 0.0)
        is_restarting = service.state is S.STOPPING and service.after_stop is not AfterStop.REST
        if is_due or is_restarting or service.state in {S.WAITING, S.BACKOFF}:
            yield name, StopAsked("stopped with the run")
        if now_s >= ending.kill_at_s and service.has_process and not service.is_killed:
            yield name, KillAsked()


def ending_budget_s(services: Services, launches: Launches) -> float:
    """The longest grace period of the services that have to be stopped."""
    return max((launches[name].stop_grace_s for name, service in services.items() if service.has_process), default=0.0)


def stop_times_s(ending: Ending, services: Services, launches: Launches) -> dict[str, float]:
    """When each running service is stopped at the latest; 0.0 (at once) when no running service needs it."""
    running = [name for name, service in services.items() if service.has_process]
    levels: dict[str, int] = {}
    for name in reversed(list(launches)):  # reverse start order: its dependants come first
        above = [levels[each] for each in dependants(name, launches)]
        levels[name] = 1 + max(above, default=-1)
    share_s = ending.budget_s / (1 + max(levels.values(), default=0))
    return {
        name: ending.since_s + share_s * levels[name]
        if any(services[each].has_process for each in dependants(name, launches))
        else 0.0
        for name in running
    }


def dependants(name: str, launches: Launches) -> list[str]:
    """Services that need `name` directly."""
    return [other for other, launch in launches.items() if name in launch.needs]


# --- the state of the run ------------------------------------------------------------------------------------------


def run_state(services: Services, launches: Launches, *, has_been_up: bool) -> RunState:
    """The state of a run that has not ended; `has_been_up` tells `starting` from `restarting` and `degraded`."""
    if any(service.state in {S.FAILED, S.UNHEALTHY, S.BACKOFF, S.STOPPED} for service in services.values()):
        return RunState.DEGRADED
    moving = [service for service in services.values() if service.state in {S.WAITING, S.STARTING, S.STOPPING}]
    lost = [service for service in services.values() if service.state is S.READY and not service.is_running]
    if not moving and not lost:
        return RunState.RUNNING
    if not has_been_up:
        return RunState.STARTING
    is_asked = not lost and all(service.is_restarting_by_request for service in moving)
    return RunState.RESTARTING if is_asked else RunState.DEGRADED
