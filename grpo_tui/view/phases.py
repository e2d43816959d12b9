"""How a service came to where it stands: the states of its last restart, and the phases of its start. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from grpo_engine.wire.supervisor import ServiceState, ServiceStatus

MAX_TRANSITIONS = 12
MAX_PHASES = 24
"""vLLM tells some fifteen; a program that tells more is told from its end."""
AT_REST = frozenset({ServiceState.STOPPED, ServiceState.FINISHED, ServiceState.FAILED})
SETTLED = AT_REST | {ServiceState.READY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A service entered a state."""

    state: ServiceState
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPhase:
    """Something that a start-up was at."""

    words: str
    """As its log tells it: `loading weights, 2 of 4 shards`."""
    since: float | None
    """When it began; None where that was before anybody looked."""

    @property
    def name(self) -> str:
        """What stays the same while it counts: `loading weights`."""
        return self.words.partition(",")[0]


Transitions = Mapping[str, tuple[Transition, ...]]
"""The latest states of each service, the newest last."""
StartPhases = Mapping[str, tuple[StartPhase, ...]]
"""What the latest start of each service was at, the newest last."""


def after_hearing(
    transitions: Transitions, phases: StartPhases, service: ServiceStatus, time: float, *, told_at: float | None
) -> tuple[Transitions, StartPhases]:
    """Both, after it was heard how a service stands.

    Args:
        time: when it came to its state, should that be a new one.
        told_at: when it began with its phase; None where that may have been before anybody looked.
    """
    name, past = service.name, transitions.get(service.name, ())
    if not past or past[-1].state is not service.state:
        entered = Transition(state=service.state, time=time)
        transitions = MappingProxyType({**transitions, name: (*past, entered)[-MAX_TRANSITIONS:]})
        if service.state is ServiceState.STARTING:
            phases = MappingProxyType({**phases, name: ()})
    if service.state is ServiceState.STARTING and service.phase is not None:
        told = StartPhase(words=service.phase, since=told_at)
        phases = MappingProxyType({**phases, name: _after_telling(phases.get(name, ()), told)})
    return transitions, phases


def after_looking(
    transitions: Transitions, phases: StartPhases, services: Sequence[ServiceStatus], now: float
) -> tuple[Transitions, StartPhases]:
    """Both, after a look at all services; one that was not known tells itself since when it stands so."""
    for service in services:
        since = None
        if not transitions.get(service.name):
            since = service.ready_at if service.state is ServiceState.READY else service.started_at
        transitions, phases = after_hearing(transitions, phases, service, since or now, told_at=None)
    return transitions, phases


def _after_telling(past: tuple[StartPhase, ...], told: StartPhase) -> tuple[StartPhase, ...]:
    """The phases with another one; one that only counts on keeps its time."""
    if past and past[-1].name == told.name:
        return (*past[:-1], replace(past[-1], words=told.words))
    return (*past, told)[-MAX_PHASES:]


def last_restart(transitions: tuple[Transition, ...]) -> tuple[Transition, ...]:
    """The states from where a service was last stopped, fell over or was started again, up to where that led.

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
            return place > 0 and transitions[place - 1].state in AT_REST
        case _:
            return False
