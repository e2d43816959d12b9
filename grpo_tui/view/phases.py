"""How a service came to where it stands: the states of its last restart, and the phases of its start. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_engine.wire.supervisor import ServiceState

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


def after_entering(past: tuple[Transition, ...], state: ServiceState, time: float) -> tuple[Transition, ...]:
    """The states with another one, unless it is the same as the last."""
    if past and past[-1].state is state:
        return past
    return (*past, Transition(state=state, time=time))[-MAX_TRANSITIONS:]


def after_telling(past: tuple[StartPhase, ...], words: str, since: float | None) -> tuple[StartPhase, ...]:
    """The phases with another one; one that only counts on keeps its time."""
    told = StartPhase(words=words, since=since)
    if past and past[-1].name == told.name:
        return (*past[:-1], replace(past[-1], words=words))
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
