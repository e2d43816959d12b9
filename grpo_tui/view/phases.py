"""The recent states of each service, and the phases of its latest start. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from grpo_engine.wire.supervisor import ServiceState, ServiceStatus

MAX_TRANSITIONS = 12
MAX_PHASES = 24
"""vLLM logs about fifteen; of more, the latest are kept."""
AT_REST = frozenset({ServiceState.STOPPED, ServiceState.FINISHED, ServiceState.FAILED})
SETTLED = AT_REST | {ServiceState.READY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A service entered a state."""

    state: ServiceState
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPhase:
    """A phase of a start."""

    words: str
    """From its log: `loading weights, 2 of 4 shards`."""
    since: float | None
    """When it began; None if that was before the screen opened."""

    @property
    def name(self) -> str:
        """What stays the same while it counts: `loading weights`."""
        return self.words.partition(",")[0]


Transitions = Mapping[str, tuple[Transition, ...]]
"""The latest states of each service, the newest last."""
StartPhases = Mapping[str, tuple[StartPhase, ...]]
"""The phases of each service's latest start, the newest last."""


def with_service(
    transitions: Transitions, phases: StartPhases, service: ServiceStatus, time: float, *, phase_since: float | None
) -> tuple[Transitions, StartPhases]:
    """Both, after an update of one service.

    Args:
        time: when it came to its state, should that be a new one.
        phase_since: when its phase began; None if that may have been before the screen opened.
    """
    name, past = service.name, transitions.get(service.name, ())
    if not past or past[-1].state is not service.state:
        entered = Transition(state=service.state, time=time)
        transitions = MappingProxyType({**transitions, name: (*past, entered)[-MAX_TRANSITIONS:]})
        if service.state is ServiceState.STARTING:
            phases = MappingProxyType({**phases, name: ()})
    if service.state is ServiceState.STARTING and service.phase is not None:
        told = StartPhase(words=service.phase, since=phase_since)
        phases = MappingProxyType({**phases, name: _with_phase(phases.get(name, ()), told)})
    return transitions, phases


def with_services(
    transitions: Transitions, phases: StartPhases, services: Sequence[ServiceStatus], now: float
) -> tuple[Transitions, StartPhases]:
    """Both, after an update of all services; the status of a new one has the time of its state."""
    for service in services:
        since = None
        if not transitions.get(service.name):
            since = service.ready_at if service.state is ServiceState.READY else service.started_at
        transitions, phases = with_service(transitions, phases, service, since or now, phase_since=None)
    return transitions, phases


def _with_phase(past: tuple[StartPhase, ...], told: StartPhase) -> tuple[StartPhase, ...]:
    """The phases with another one; a counter that advances keeps its start time."""
    if past and past[-1].name == told.name:
        return (*past[:-1], replace(past[-1], words=told.words))
    return (*past, told)[-MAX_PHASES:]


def last_restart(transitions: tuple[Transition, ...]) -> tuple[Transition, ...]:
    """The states from the last stop, failure or restart of a service up to where that led.

    For example stopping (0.4 s) → waiting (2 s) → starting (36.6 s) → ready; a first start is none.
    """
    begin = next((place for place in reversed(range(len(transitions))) if _is_begin(transitions, place)), None)
    if begin is None:
        return ()
    restart = transitions[begin:]
    end = next((place for place, each in enumerate(restart) if each.state in SETTLED), len(restart) - 1)
    return restart[: end + 1]


def _is_begin(transitions: tuple[Transition, ...], place: int) -> bool:
    match transitions[place].state:
        case ServiceState.STOPPING | ServiceState.BACKOFF:
            return True
        case ServiceState.WAITING | ServiceState.STARTING:
            return place > 0 and transitions[place - 1].state in SETTLED  # from ready: restarted in place
        case _:
            return False
