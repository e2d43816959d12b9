"""Runs from the files in their folders, without a supervisor: the list, which are live, and their status.

Reads only. The state that a dead supervisor left in `state.json` is checked against the keepers, and marked as such.
"""

from __future__ import annotations

import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.errors import GrpoError, PeerError
from grpo_engine.wire.run_folder import KEEPERS, PLAN_FILE, STATE_FILE, SUPERVISOR_LOG
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, RunState, RunStatus, ServiceState, ServiceStatus, Warning
from grpo_tui.paths import LOGS, registration_path
from grpo_tui.run_files.metrics import latest_metrics as latest_metrics
from grpo_tui.supervisor.keeper.client import KeeperState, keeper_states, living_keepers
from grpo_tui.supervisor.lock import has_daemon

if TYPE_CHECKING:
    from grpo_tui.supervisor.state_file import StateDocument

READ_SUFFIXES = {".json", ".jsonl", ".log", ".txt"}
"""Of the files that commands and the screen read; services may put others, such as sockets, into the run folder."""
MOVING = {ServiceState.STARTING, ServiceState.READY, ServiceState.UNHEALTHY, ServiceState.STOPPING}


class NoSuchRun(GrpoError):
    """No run has this name, or several do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's folder, and whether any of its processes is alive."""

    folder: Path
    has_daemon: bool
    has_services: bool
    """Whether any process of its services is alive, with or without a supervisor."""

    @property
    def id(self) -> str:
        """The name of the run."""
        return self.folder.name

    @property
    def is_live(self) -> bool:
        """Whether any process of it is alive."""
        return self.has_daemon or self.has_services


def runs(logs: Path = LOGS) -> list[Run]:
    """All runs below a folder, the newest first."""
    folders = [folder for folder in _run_folders(logs) if unreadable_file(folder) is None]
    return [look_at(folder) for folder in sorted(folders, key=_started_at, reverse=True)]


def unreadable_file(folder: Path) -> Path | None:
    """A file of a run folder that would hang or flood its reader: a pipe, a device, a socket; None in a proper one."""
    for path in (*folder.iterdir(), *folder.glob(f"{KEEPERS}/*")):
        if path.suffix in READ_SUFFIXES:
            with suppress(OSError):  # a link to nothing, a file that was removed meanwhile
                if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
                    return path
    return None


def left_out_runs(logs: Path = LOGS) -> list[Path]:
    """The first such file of each folder that `runs` leaves out."""
    return [path for path in map(unreadable_file, _run_folders(logs)) if path is not None]


def _run_folders(logs: Path) -> list[Path]:
    return [path.parent for path in logs.glob(f"*/{PLAN_FILE}")] if logs.is_dir() else []


def look_at(folder: Path) -> Run:
    """Find out which processes of a run are alive."""
    supervised = has_daemon(folder)
    has_services = supervised or any(living_keepers(folder)) or (not is_over(folder) and has_orphans(folder))
    return Run(folder=folder.resolve(), has_daemon=supervised, has_services=has_services)


def has_orphans(folder: Path) -> bool:
    """Whether processes are alive of a run that lost its supervisor and its keepers, by marker and ledger.

    The ledger counts only for a run that is registered: in a folder from elsewhere it may name any process.
    """
    from grpo_tui.supervisor.keeper import proc
    from grpo_tui.supervisor.state_file import boot_id, read_state

    marks = (proc.marker(process.pid) for process in proc.processes_of_run(folder.name))
    if any(mark is not None and mark.run_folder == str(folder.resolve()) for mark in marks):
        return True
    try:
        if registration_path(folder).read_text() != boot_id():
            return False
        document = read_state(folder)
    except (GrpoError, OSError):
        return False
    if document is None or document.ledger is None or document.ledger.boot_id != boot_id():
        return False
    seen = (proc.ProcessId(*each) for service in document.ledger.services.values() for each in service.processes)
    return any(process.is_alive() for process in seen)


def lost_runs(logs: Path = LOGS) -> set[str]:
    """Live runs of this folder whose own folder was deleted, from the markers of their processes."""
    from grpo_tui.supervisor.keeper import proc

    marks = filter(None, (proc.marker(process.pid) for process in proc.living()))
    folders = {Path(mark.run_folder) for mark in marks if mark.run_folder is not None}
    return {each.name for each in folders if each.parent == logs.resolve() and not (each / PLAN_FILE).exists()}


def is_over(folder: Path) -> bool:
    """Whether a run has ended, according to its state file."""
    from grpo_tui.supervisor.state_file import read_state

    try:
        document = read_state(folder)
    except PeerError:
        return False
    return document is not None and document.state in ENDED_RUN_STATES


def find_run(prefix: str | None, logs: Path = LOGS, *, also_ended: bool) -> Run:
    """The run with this id or unique prefix; without one, the newest live run.

    Args:
        also_ended: whether the newest ended run is returned when there is no prefix and no live run.

    Raises:
        NoSuchRun: no run, or more than one, matches.
    """
    known = runs(logs)
    if prefix is not None:
        found = [run for run in known if run.id == prefix] or [run for run in known if run.id.startswith(prefix)]
        if len(found) == 1:
            return found[0]
        names = ", ".join(run.id for run in (found or known)[:8]) or f"none in {logs.resolve()}"
        raise NoSuchRun(f"run {prefix!r}: {'several runs match' if found else 'no such run'}; runs: {names}")
    live = [run for run in known if run.is_live]
    if live or (also_ended and known):
        return (live or known)[0]
    hint = f"the newest, {known[0].id}, has ended" if known else "no run was started here"
    raise NoSuchRun(f"no live run in {logs.resolve()}: {hint}")


def _started_at(folder: Path) -> float:
    return (folder / PLAN_FILE).stat().st_mtime


# --- the status document without a daemon --------------------------------------------------------------------------


def stored_status(run: Run) -> RunStatus:
    """The status of a run from its files.

    Raises:
        PeerError: `state.json` is missing or damaged.
    """
    from grpo_tui.supervisor.state_file import read_state  # here: not needed where a supervisor answers

    document = read_state(run.folder)
    if document is None:
        raise PeerError(f"{run.folder / STATE_FILE}: missing: the run has not started yet, or its folder was emptied")
    status = RunStatus(**{name: getattr(document, name) for name in RunStatus.model_fields})
    return status if status.state in ENDED_RUN_STATES else _unsupervised(run, document, status)


def _unsupervised(run: Run, document: StateDocument, status: RunStatus) -> RunStatus:
    """The status of a run whose supervisor died, with the services as their keepers report them."""
    keepers = {(state.service, state.attempt): state for state in keeper_states(run.folder)}
    services = [_seen(service, keepers.get((service.name, service.attempt))) for service in status.services]
    num_living = sum(service.state in MOVING for service in services)
    if num_living:
        services_run = "1 service keeps" if num_living == 1 else f"{num_living} services keep"
        text = f"the supervisor of this run has exited; {services_run} running without it"
        hint = f"`grpo-tui attach {run.id}` (or start, stop, down) starts a supervisor that takes them over"
    elif run.has_services:
        text = "the supervisor of this run and its keepers have exited; processes of its services are still alive"
        hint = f"`grpo-tui down {run.id}` ends them; `grpo-tui attach {run.id}` ends them and starts the services again"
    else:
        text = "the supervisor of this run and all its services have exited"
        hint = f"see {run.folder / SUPERVISOR_LOG}"
    warning = Warning(id="no-supervisor", severity="error", text=text, hint=hint)
    return status.model_copy(
        update={
            "state": status.state if num_living else RunState.DEGRADED if run.has_services else RunState.FAILED,
            "supervisor": None,
            "services": services,
            "warnings": [warning, *status.warnings],
        }
    )


def _seen(service: ServiceStatus, keeper: KeeperState | None) -> ServiceStatus:
    """A service that ran when its supervisor died, as its keeper reports it now."""
    if service.state not in MOVING:
        return service
    if keeper is not None and keeper.state != "gone" and keeper.keeper.identity().is_alive():
        return service.model_copy(update={"pid": keeper.main.pid if keeper.main else None})
    code = keeper.exit_code if keeper is not None else None
    seen = {
        "state": ServiceState.FINISHED if code == 0 else ServiceState.FAILED,
        "pid": None,
        "pgid": None,
        "exit_code": code,
        "cpu_percent": None,
        "rss_bytes": None,
        "gpu_memory_bytes": None,
        "why": f"ended while no supervisor was running, exit code {'unknown' if code is None else code}",
    }
    return service.model_copy(update=seen)


def age_words(started_at: float | None, ended_at: float | None) -> str:
    """The duration of a run so far: `42 s`, `5 min`, `3.2 h`."""
    if started_at is None:
        return "-"
    seconds = max(0.0, (ended_at or time.time()) - started_at)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
