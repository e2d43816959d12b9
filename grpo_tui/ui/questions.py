"""The confirmations before something is ended: question, and the processes that will end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_engine.wire.supervisor import ServiceState, ServiceStatus
from grpo_tui.ui.glyphs import PROBE_SIGNS
from grpo_tui.view.board.state import BoardRun, BoardSweep
from grpo_tui.view.format import count_text
from grpo_tui.view.service_rules import TRAINER_KIND
from grpo_tui.view.state import ViewState

KILLABLE_STATES = frozenset({ServiceState.STARTING, ServiceState.READY, ServiceState.UNHEALTHY, ServiceState.STOPPING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, and lines that name what it is about."""

    text: str
    named: tuple[str, ...]


def about_stopping(services: Sequence[ServiceStatus], state: ViewState) -> Question | None:
    """The confirmation for stopping services; None without a trainer, since the others can start again without loss."""
    if not any(service.kind == TRAINER_KIND for service in services):
        return None
    named = []
    for service in services:
        is_trainer = service.kind == TRAINER_KIND
        named.append(f"{_described(service)}, after step {_step(state)}" if is_trainer else _described(service))
    return Question(text=f"Stop {_several(services)}?", named=(*named, "training stops until it is started again"))


def about_restarting(name: str, state: ViewState) -> Question:
    """The confirmation for restarting the inference server from a screen that does not show the services."""
    service = state.service(name)
    named = (_described(service),) if service is not None else (name,)
    return Question(text=f"Restart {name}?", named=(*named, "on screen 1 v restarts it without asking"))


def about_killing(services: Sequence[ServiceStatus], state: ViewState) -> Question:
    """The confirmation for killing services."""
    is_one = len(services) == 1
    named = [
        *(_described(service) for service in services),
        f"and every process {'it' if is_one else 'they'} started, by SIGKILL: nothing is saved",
        "it stays stopped until s starts it" if is_one else "they stay stopped until s starts them",
    ]
    trainer = next((service for service in services if service.kind == TRAINER_KIND), None)
    if trainer is not None:
        subject = "it" if is_one else trainer.name
        named.insert(-1, f"{subject} is at step {_step(state)}; steps since its last checkpoint are lost")
    return Question(text=f"Kill {_several(services)} now?", named=tuple(named))


def about_ending_the_run(state: ViewState) -> Question:
    """The confirmation for ending the run."""
    live = tuple(_described(service) for service in state.services if service.pid is not None)
    return Question(text=f"End the run {state.run}?", named=live or ("no service is running",))


def about_ending_runs(runs: Sequence[BoardRun], sweep: BoardSweep | None) -> Question:
    """The confirmation for ending live runs, or a sweep that starts runs."""
    named = [f"{run.name}, {run.state_word}, {_at_step(run)}" for run in runs]
    if sweep is not None:
        again = f"grpo-tui sweep resume {sweep.name} goes on with it"
        return Question(text=f"End the sweep {sweep.name} and its live runs?", named=(*named, again))
    text = f"End the run {runs[0].name}?" if len(runs) == 1 else f"End these {len(runs)} runs?"
    subject = "it" if len(runs) == 1 else "they"
    return Question(text=text, named=(*named, f"and every process that {subject} started"))


def _at_step(run: BoardRun) -> str:
    return "before its first step" if run.progress.step is None else f"step {run.progress.step:,}"


def about_a_taken_port(service: ServiceStatus, user: str) -> Question | None:
    """The question whether to end the process on a port of this service; None if there is none that we may end.

    Args:
        user: the user that runs this screen.
    """
    holders = [(refusal, refusal.foreign_holder()) for refusal in service.refusals]
    ended = [refusal.text for refusal, holder in holders if holder is not None and holder.user == user]
    if not ended:
        return None
    spared = [f"also in the way, not ended: {each.text}" for each in service.refusals if each.text not in ended]
    text = f"{service.name} was not started: its port is taken. End this process?"
    return Question(text=text, named=(*ended, *spared))


def _several(services: Sequence[ServiceStatus]) -> str:
    return services[0].name if len(services) == 1 else f"these {count_text(len(services), 'service')}"


def _described(service: ServiceStatus) -> str:
    state = PROBE_SIGNS[service.probe][1] if service.probe in PROBE_SIGNS else service.state
    return f"{service.name}, {state}, {'no process yet' if service.pid is None else f'pid {service.pid}'}"


def _step(state: ViewState) -> int:
    return state.history.last.step if state.history.last else 0
