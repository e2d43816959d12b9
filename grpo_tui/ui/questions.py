"""What the screen asks before it destroys something: the question, and who or what will end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_engine.wire.supervisor import ServiceState, ServiceStatus
from grpo_tui.ui.glyphs import PROBE_SIGNS
from grpo_tui.view.format import count_text
from grpo_tui.view.refusals import obstacles
from grpo_tui.view.service_rules import TRAINER_KIND
from grpo_tui.view.state import ViewState

KILLABLE_STATES = frozenset({ServiceState.STARTING, ServiceState.READY, ServiceState.UNHEALTHY, ServiceState.STOPPING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, and lines that name what it is about."""

    text: str
    named: tuple[str, ...]


def about_stopping(services: Sequence[ServiceStatus], state: ViewState) -> Question | None:
    """Whether training is to go no further; None where no trainer is among them, since all others start again."""
    if not any(service.kind == TRAINER_KIND for service in services):
        return None
    named = []
    for service in services:
        is_trainer = service.kind == TRAINER_KIND
        named.append(f"{_told(service)}, after step {_step(state)}" if is_trainer else _told(service))
    return Question(text=f"Stop {_several(services)}?", named=(*named, "training goes no further until it is started"))


def about_killing(services: Sequence[ServiceStatus], state: ViewState) -> Question:
    """Whether services are to end without time to save anything."""
    is_one = len(services) == 1
    named = [
        *(_told(service) for service in services),
        f"and all that {'it' if is_one else 'they'} started: by SIGKILL, so nothing is saved",
        "it stays down until s starts it" if is_one else "they stay down until s starts them",
    ]
    trainer = next((service for service in services if service.kind == TRAINER_KIND), None)
    if trainer is not None:
        subject = "it" if is_one else trainer.name
        named.insert(-1, f"{subject} is at step {_step(state)}; what is in no checkpoint is lost")
    return Question(text=f"Kill {_several(services)} now?", named=tuple(named))


def about_ending_the_run(state: ViewState) -> Question:
    """Whether everything is to end."""
    live = tuple(_told(service) for service in state.services if service.pid is not None)
    return Question(text=f"End the run {state.run}?", named=live or ("no service runs",))


def about_a_taken_port(service: ServiceStatus, user: str) -> Question | None:
    """Whether to end who holds a port of this service; None where nobody is there whom we may end.

    Args:
        user: whose screen and supervisor this is.
    """
    in_the_way = obstacles(service)
    ended = [each.words for each in in_the_way if each.may_be_ended_by(user)]
    if not ended:
        return None
    spared = [f"left alone, and in the way too: {each.words}" for each in in_the_way if each.words not in ended]
    text = f"{service.name} was not started: its port is taken. End this process?"
    return Question(text=text, named=(*ended, *spared))


def _several(services: Sequence[ServiceStatus]) -> str:
    return services[0].name if len(services) == 1 else f"these {count_text(len(services), 'service')}"


def _told(service: ServiceStatus) -> str:
    state = PROBE_SIGNS[service.probe][1] if service.probe in PROBE_SIGNS else service.state
    return f"{service.name}, {state}, {'no process yet' if service.pid is None else f'pid {service.pid}'}"


def _step(state: ViewState) -> int:
    return state.history.last.step if state.history.last else 0
