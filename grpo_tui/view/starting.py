"""What a starting run waits for: which services are starting, since when, with which limit, and for whom. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_engine.wire.supervisor import RunState, ServiceState, ServiceStatus
from grpo_tui.services.base import NeedCondition, Probe
from grpo_tui.view.phases import StartPhase
from grpo_tui.view.state import ViewState

UP_STATES = frozenset({ServiceState.READY, ServiceState.FINISHED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """A service that is starting while the run is."""

    service: ServiceStatus
    waited_s: float
    """Since its start."""
    phase: StartPhase | None
    """What its log says it does."""
    probe: Probe | None
    """Its readiness probe, with the limit; None without one, or before the plan was read."""
    waiting: tuple[ServiceStatus, ...]
    """Services that cannot begin before it."""


def awaited_services(state: ViewState) -> tuple[Awaited, ...]:
    """The services that a starting run waits for; the one that most others wait for is the first."""
    if state.status is None or state.status.state is not RunState.STARTING:
        return ()
    missing = {service.name: missing_needs(service, state) for service in state.services}
    found = []
    for service in state.services:
        if service.state is not ServiceState.STARTING:
            continue
        seen, launch = state.transitions.get(service.name, ()), state.launches.get(service.name)
        since = seen[-1].time if seen else service.started_at
        phases = state.start_phases.get(service.name, ())
        one = Awaited(
            service=service,
            waited_s=max(0.0, state.now - since) if since is not None else 0.0,
            phase=phases[-1] if phases and service.phase else None,
            probe=None if launch is None else launch.ready,
            waiting=tuple(each for each in state.services if service.name in missing[each.name]),
        )
        found.append(one)
    return tuple(sorted(found, key=lambda each: -len(each.waiting)))


def preparation(service: ServiceStatus) -> str | None:
    """What a waiting service that was started before its turn has done; None where it has no process."""
    if service.state is not ServiceState.WAITING or service.pid is None:
        return None
    return "preparing" if service.prepared_at is None else "prepared"


def missing_needs(service: ServiceStatus, state: ViewState) -> tuple[str, ...]:
    """The services that a waiting one still needs; none before the plan was read."""
    launch = state.launches.get(service.name)
    if service.state is not ServiceState.WAITING or launch is None:
        return ()
    return tuple(name for name, condition in launch.needs.items() if not _is_met(condition, state.service(name)))


def _is_met(condition: NeedCondition, needed: ServiceStatus | None) -> bool:
    if needed is None:
        return False
    match condition:
        case NeedCondition.STARTED:
            runs = needed.pid is not None and needed.state is not ServiceState.WAITING
            return runs or needed.state is ServiceState.FINISHED
        case NeedCondition.READY:
            return needed.state in UP_STATES
        case NeedCondition.FINISHED:
            return needed.state is ServiceState.FINISHED
        case NeedCondition.SETTLED:
            at_rest = {ServiceState.FINISHED, ServiceState.FAILED, ServiceState.STOPPED}
            return needed.state in UP_STATES or needed.state in at_rest
