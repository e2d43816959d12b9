"""What the run folder holds about one service beyond its status: its launch, attempts, and answers of its probe.

Blocks while it reads: call it in a thread. Secrets are masked where the launch is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

from grpo_engine.errors import PeerError
from grpo_engine.wire.run_folder import TIMELINE_FILE
from grpo_engine.wire.supervisor import ServiceChanged, ServiceState, ServiceStatus, Snapshot, read_from_daemon
from grpo_tui.profile.plan_file import Plan
from grpo_tui.run_files.opening import open_file
from grpo_tui.run_files.timeline import USAGE_START
from grpo_tui.services.base import Launch
from grpo_tui.view.service_rules import reason

MAX_BYTES = 64 << 20
"""Twice what the supervisor keeps of a timeline."""
MAX_ANSWERS = 8
MAX_ATTEMPTS = 20
"""The newest are kept."""
ENDED_STATES = frozenset(
    {ServiceState.WAITING, ServiceState.BACKOFF, ServiceState.STOPPED, ServiceState.FINISHED, ServiceState.FAILED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """An answer of the probe that differs from the one before."""

    time: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the service's process."""

    number: int
    started_at: float
    ended_at: float | None = None
    """None while it runs."""
    exit_code: int | None = None
    """Negative for a signal."""
    why: str | None = None
    """Why it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHistory:
    """The newest attempts and answers, each in the order in which they happened."""

    attempts: tuple[Attempt, ...] = ()
    answers: tuple[ProbeAnswer, ...] = ()


def read_launches(run_folder: Path) -> Mapping[str, Launch]:
    """The launches of the run's plan by name.

    Raises:
        PeerError: the plan is missing or damaged.
    """
    return {launch.name: launch for launch in Plan.of(run_folder).launches}


def read_history(run_folder: Path, service: str, until: float | None = None) -> ServiceHistory:
    """Attempts and probe answers from the timeline, up to a moment; nothing where there is no timeline."""
    earlier: list[Attempt] = []
    attempts: dict[int, Attempt] = {}
    answers: list[ProbeAnswer] = []
    for time, status in _statuses(run_folder, service):
        if until is not None and time > until:
            break
        if not status.attempt and attempts:  # the run was resumed, and counts again
            earlier += attempts.values()
            attempts = {}
        known = attempts.get(status.attempt)
        is_waiting = status.state is ServiceState.WAITING
        if status.attempt and known is None and (status.pid is not None or not is_waiting):
            known = attempts[status.attempt] = Attempt(number=status.attempt, started_at=status.started_at or time)
        is_held = is_waiting and status.pid is not None
        if known is not None and known.ended_at is None and status.state in ENDED_STATES and not is_held:
            ended = replace(known, ended_at=time, exit_code=status.exit_code, why=reason(status))
            attempts[status.attempt] = ended
        if status.health and (not answers or answers[-1].words != status.health):
            answers.append(ProbeAnswer(time=time, words=status.health))
    return ServiceHistory(
        attempts=(*earlier, *attempts.values())[-MAX_ATTEMPTS:], answers=tuple(answers[-MAX_ANSWERS:])
    )


def _statuses(run_folder: Path, service: str) -> Iterator[tuple[float, ServiceStatus]]:
    """Every recorded status of a service with its time; damaged lines are passed over."""
    try:
        with open_file(run_folder / TIMELINE_FILE) as file:
            lines = [line for line in BytesIO(file.read(MAX_BYTES)) if not line.startswith(USAGE_START)]
    except OSError:
        return
    for line in lines:
        try:
            event = read_from_daemon(line)
        except PeerError:
            continue
        match event:
            case ServiceChanged(service=status) if status.name == service:
                yield event.time, status
            case Snapshot() if event.time is not None:
                yield from ((event.time, each) for each in event.status.services if each.name == service)
            case _:
                pass
