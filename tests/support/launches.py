"""Services for tests without processes: launches, events of the life cycle, and state files of keepers."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_engine.wire.supervisor import ProbeOutcome
from grpo_tui.services.base import Launch, Probe, RestartInPlace, RestartPolicy
from grpo_tui.supervisor.keeper.client import KeeperState, ProcessEntry
from grpo_tui.supervisor.machine import (
    Admitted,
    Effect,
    Event,
    ProbeAnswered,
    RestartAsked,
    Service,
    Spawned,
    step,
)

READY_WITHIN_60_S = Probe(http="http://127.0.0.1:1/health", within_s=60)
IN_PLACE = RestartInPlace(signal="SIGHUP", log="restarted")
Timed = tuple[float, Event]


def launch(name: str = "vllm", **changes: Any) -> Launch:
    """A service that restarts on failure and has a readiness probe, unless a test says otherwise."""
    values: dict[str, Any] = {
        "name": name,
        "kind": "command",
        "argv": ("true",),
        "cwd": Path("/"),
        "needs": {},
        "ready": READY_WITHIN_60_S,
        "live": None,
        "restart": RestartPolicy.ON_FAILURE,
        "restart_unhealthy": False,
        "max_restarts": 2,
        "restart_window_s": 600.0,
        "backoff_s": 1.0,
        "stop_grace_s": 10.0,
        "stop_signal": signal.SIGTERM,
        "ports": (),
        "gpus": (),
        "ends_run": None,
    }
    return Launch(**{**values, **changes})


def launches(*made: Launch) -> Mapping[str, Launch]:
    """By their names."""
    return {each.name: each for each in made}


def play(how: Launch, *timed: Timed, service: Service | None = None) -> tuple[Service, list[Effect]]:
    """The service after these events, and all effects."""
    service = service or Service(name=how.name)
    effects: list[Effect] = []
    for now_s, event in timed:
        service, new = step(service, event, now_s, how)
        effects += new
    return service, effects


def passed(attempt: int = 1, in_place: int = 0) -> ProbeAnswered:
    """A good answer of the readiness probe."""
    words = "/health answers 200"
    return ProbeAnswered(attempt=attempt, num_in_place_restarts=in_place, outcome=ProbeOutcome.PASSED, words=words)


def refused(attempt: int = 1) -> ProbeAnswered:
    """A bad answer of the readiness probe."""
    return ProbeAnswered(attempt=attempt, outcome=ProbeOutcome.BAD_STATUS, words="/health answers 503")


def restart(at_s: float) -> tuple[Timed, ...]:
    """A request for a restart that no follower delays."""
    return (at_s, RestartAsked()), (at_s, Admitted())


UP: tuple[Timed, ...] = ((0.0, Admitted()), (0.1, Spawned()), (5.0, passed()))
"""The service is ready since 5 s."""


def keeper_state(service: str, attempt: int = 1, **known: Any) -> KeeperState:
    """What the keeper of an ended attempt wrote."""
    values: dict[str, Any] = {
        "service": service,
        "attempt": attempt,
        "state": "gone",
        "keeper": ProcessEntry(pid=7, start_ticks=7),
        "main": None,
        "started_at": 1.0,
        "ended_at": None,
        "exit_code": None,
        "error": None,
        "log_offset": 0,
        "ended": (),
        "unkillable": (),
    }
    return KeeperState(**{**values, **known})
