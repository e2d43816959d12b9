"""Who may start and stop now, when a run is over, and where it stands: pure functions over all services of a run.

Assumes that `needs` has no cycle, which a profile is checked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
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
    RestartAsked,
    Service,
    StopAsked,
)

Services = Mapping[str, Service]
Launches = Mapping[str, Launch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The decision to end a run: what it ends as, and the time that its services get all together.

    Worked example: four services in a chain with a budget of 8 s. The last of the chain is asked at once, and each one
    below as soon as those that need it are gone, but after 2, 4, 6 s at the latest; at 8 s whoever is left is killed.
    So four deaf services take one budget, not four, and polite ones go in order as fast as they can.
    """

    state: RunState
    since_s: float
    budget_s: float

    @property
    def kill_at_s(self) -> float:
        """When whoever is left is killed."""
        return self.since_s + self.budget_s


def decisions(
    services: Services,
    launches: Launches,
    ending: Ending | None,
    now_s: float,
    restarting: Set[str] = frozenset(),
) -> list[tuple[str, Event]]:
    """What follows from where all services stand now: who starts, or, when the run is ending, who stops.

    Args:
        restarting: services that somebody wants restarted, whose followers may still be in the way; each stays named
            here until its `RestartAsked` has come.
    """
    if ending is not None:
        return list(_winding_down(services, launches, ending, now_s))
    held_back = {follower for name in restarting for follower in restart_group(name, launches)}
    starts = [name for name in admissible(services, launches) if name not in held_back]
    return [
        *(decision for name in restarting for decision in _restart(name, services, launches)),
        *(decision for name in starts for decision in _admission(name, services, launches)),
    ]


# --- starting ------------------------------------------------------------------------------------------------------


def is_met(condition: NeedCondition, needed: Service) -> bool:
    """Whether a needed service is as far as the condition asks."""
    match condition:
        case NeedCondition.STARTED:
            return (needed.is_running and needed.state is not S.STOPPING) or needed.state is S.FINISHED
        case NeedCondition.READY:
            is_up = needed.state is S.READY and needed.is_running
            return is_up or (needed.state is S.FINISHED and needed.was_ready)
        case NeedCondition.FINISHED:
            return needed.state is S.FINISHED


def unmet_needs(name: str, services: Services, launches: Launches) -> list[tuple[str, NeedCondition]]:
    """What a service still waits for."""
    needs = launches[name].needs.items()
    return [(needed, condition) for needed, condition in needs if not is_met(condition, services[needed])]


def admissible(services: Services, launches: Launches) -> list[str]:
    """Services that wait and have all that they need, in start order."""
    return [n for n, s in services.items() if s.state is S.WAITING and not unmet_needs(n, services, launches)]


def is_hopeless(name: str, services: Services, launches: Launches) -> bool:
    """Whether a service has failed, or waits for something that will not come without a person's help."""
    service = services[name]
    if service.state is S.FAILED:
        return True
    if service.state is not S.WAITING:
        return False
    return any(
        services[needed].state is S.FINISHED or is_hopeless(needed, services, launches)
        for needed, _ in unmet_needs(name, services, launches)
    )


def _admission(name: str, services: Services, launches: Launches) -> list[tuple[str, Event]]:
    """Start a service; if it is not the first time, once everybody that follows its restart has made way."""
    if services[name].attempt == 0 or not _in_the_way(name, services, launches):
        return [(name, Admitted())]
    return _make_way(name, services, launches)


def _restart(name: str, services: Services, launches: Launches) -> list[tuple[str, Event]]:
    """Restart a service once everybody that follows has ended: who maps its memory lets go of it first."""
    if not _in_the_way(name, services, launches):
        return [(name, RestartAsked())]
    return _make_way(name, services, launches)


def _in_the_way(name: str, services: Services, launches: Launches) -> list[str]:
    group = restart_group(name, launches)  # but for who is stuck in the kernel, which may be for ever
    return [each for each in group if services[each].has_process and services[each].state is not S.FAILED]


def _make_way(name: str, services: Services, launches: Launches) -> list[tuple[str, Event]]:
    running = [each for each in reversed(_in_the_way(name, services, launches)) if services[each].state in RUNNING]
    return [(follower, RestartAsked(f"restarted because {name} is", makes_way=True)) for follower in running]


def restart_group(name: str, launches: Launches) -> list[str]:
    """Services that must be restarted after `name` was, and those after them, in order."""
    group: list[str] = []
    for follower in launches[name].followers:
        for each in (follower, *restart_group(follower, launches)):
            if each not in group and each != name:
                group.append(each)
    return group


# --- ending --------------------------------------------------------------------------------------------------------


def run_enders(launches: Launches) -> list[str]:
    """Services whose end is the end of the run: those that say so, else those that nobody needs."""
    named = [name for name, launch in launches.items() if launch.ends_run]
    needed = {need for launch in launches.values() for need in launch.needs}
    return named or [name for name, launch in launches.items() if launch.ends_run is None and name not in needed]


def verdict(services: Services, launches: Launches) -> RunState | None:
    """How the run ended, or None while it goes on: finished when all that end it have, failed when none of them can."""
    enders = run_enders(launches)
    open_ = [name for name in enders if services[name].state is not S.FINISHED]
    if not enders:
        return None
    if not open_:
        return RunState.FINISHED
    return RunState.FAILED if all(is_hopeless(name, services, launches) for name in open_) else None


def _winding_down(services: Services, launches: Launches, ending: Ending, now_s: float) -> Iterator[tuple[str, Event]]:
    """Ask whose turn has come to stop; kill whoever is left when the time is up."""
    turns = stop_times_s(ending, services, launches)
    for name, service in services.items():
        is_due = service.state in RUNNING and now_s >= turns.get(name, 0.0)
        is_restarting = service.state is S.STOPPING and service.after_stop is not AfterStop.REST
        if is_due or is_restarting or service.state in {S.WAITING, S.BACKOFF}:
            yield name, StopAsked("ended with the run")
        if now_s >= ending.kill_at_s and service.has_process and not service.is_killed:
            yield name, KillAsked()


def ending_budget_s(services: Services, launches: Launches) -> float:
    """The longest grace of the services that have to be stopped."""
    return max((launches[name].stop_grace_s for name, service in services.items() if service.has_process), default=0.0)


def stop_times_s(ending: Ending, services: Services, launches: Launches) -> dict[str, float]:
    """When each running service is asked to stop at the latest; at once (0.0) when nobody who needs it is left."""
    running = [name for name, service in services.items() if service.has_process]
    levels: dict[str, int] = {}
    for name in reversed(list(launches)):  # start order reversed: whoever needs it was looked at before it
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
    """Services that need `name` themselves."""
    return [other for other, launch in launches.items() if name in launch.needs]


# --- standing ------------------------------------------------------------------------------------------------------


def run_state(services: Services, launches: Launches, *, has_been_up: bool) -> RunState:
    """Where a run that goes on stands; `has_been_up` tells a start from a loss."""
    states = {service.state for service in services.values()}
    if states & {S.FAILED, S.UNHEALTHY, S.BACKOFF, S.STOPPED}:
        return RunState.DEGRADED
    is_lost = any(service.state is S.READY and not service.is_running for service in services.values())
    if is_lost or states & {S.WAITING, S.STARTING, S.STOPPING}:
        return RunState.DEGRADED if has_been_up else RunState.STARTING
    return RunState.RUNNING


def failed_first(services: Services) -> Service | None:
    """The failed service that a person should hear of: the one that failed first."""
    failed: Sequence[Service] = [service for service in services.values() if service.state is S.FAILED]
    return min(failed, key=lambda service: service.since_s, default=None)
