"""What a supervisor finds of an earlier one: services that still run, and attempts that ended without a supervisor.

Reads the ledger of `state.json` and the files of the keepers; `core.py` acts on it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_engine.wire.run_folder import last_attempt, last_begun_attempt
from grpo_engine.wire.supervisor import ServiceState as S
from grpo_tui.services.base import Launch
from grpo_tui.supervisor.keeper.client import ExitReport, Keeper, adopt_keeper
from grpo_tui.supervisor.machine import Effect, RestartRequired, Service, adopted, step
from grpo_tui.supervisor.state_file import (
    Ledger,
    StateDocument,
    boot_id,
    from_ledger,
)

_INTERRUPTED = RestartRequired("its start was interrupted")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One service as its new supervisor takes it over."""

    service: Service
    process: Keeper | ExitReport | None = None
    """The keeper of a running attempt, or how the attempt ended; None when there is neither."""
    effects: tuple[Effect, ...] = ()
    """Signals that are sent again, since the last supervisor may not have come to it."""


def valid_ledger(predecessor: StateDocument | None) -> Ledger | None:
    """The ledger of the last supervisor; without its services if the machine was restarted since."""
    ledger = None if predecessor is None else predecessor.ledger
    if ledger is not None and ledger.boot_id != boot_id():
        log.warning("the machine was restarted: no process of the run is left, and every service starts again")
        return ledger.model_copy(update={"services": {}})
    return ledger


def find(launch: Launch, ledger: Ledger | None, run_folder: Path, now_s: float) -> Found:
    """Look for a service's process, and say in which state it is taken over; no service starts twice."""
    name = launch.name
    entry = ledger.services.get(name) if ledger is not None else None
    service = Service(name=name, since_s=now_s) if entry is None else from_ledger(name, entry)
    if entry is not None and ledger is not None and name in ledger.restarting:
        service = replace(service, is_restart_pending=True)
    attempt = max(service.attempt, last_attempt(run_folder, name))
    process = adopt_keeper(run_folder, name, attempt) if attempt else None
    if service.attempt == attempt and not service.has_process and not isinstance(process, Keeper):
        return Found(service=service)
    if service.attempt != attempt:  # started after the last write of the ledger
        in_place = service.num_in_place_restarts
        service = Service(name=name, attempt=attempt, num_in_place_restarts=in_place)
    was_held = service.is_held
    is_held = process.is_held if isinstance(process, Keeper) else was_held
    service = adopted(service, now_s, launch, is_held=is_held)
    if isinstance(process, Keeper):
        log.info("%s: taken over in attempt %d: %s", name, attempt, service.state)
        return Found(service=service, process=process, effects=_effects_to_repeat(service))
    report = process or ExitReport(code=None, ended_at=time.time(), error="its keeper left no trace", keeper_lost=True)
    # `Exited` follows once its remains were cleaned up; until then it must not satisfy the needs of other services.
    service = replace(service, is_running=False)
    if (service.state is S.STARTING or was_held) and attempt > last_begun_attempt(run_folder, name):
        # The supervisor exited while it checked ports and GPU memory: no process was started that could have failed.
        service, _ = step(service, _INTERRUPTED, now_s, launch)
    log.info("%s: attempt %d ended without a supervisor", name, attempt)
    return Found(service=service, process=report)


def _effects_to_repeat(service: Service) -> tuple[Effect, ...]:
    if service.state is S.STOPPING:
        return (Effect.STOP,)
    return (Effect.RESTART_IN_PLACE,) if service.is_restarting_in_place else ()
