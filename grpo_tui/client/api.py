"""What the command line and the screen call: open a run, find one, send commands, watch it. Prints nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from grpo_engine.errors import PeerError, PeerUnavailable
from grpo_engine.wire.run_folder import PLAN_FILE, SUPERVISOR_LOG
from grpo_engine.wire.supervisor import RunStatus, Warning, how_to_go_on
from grpo_tui.client.launch import OpenedRun, ensure_daemon, open_run, replace_daemon
from grpo_tui.client.local import (
    NoSuchRun,
    Run,
    find_run,
    is_over,
    latest_metrics,
    look_at,
    recorded_processes,
    runs,
    stored_status,
)
from grpo_tui.client.new_daemon import NewDaemon, StartFailed
from grpo_tui.client.socket import Daemon
from grpo_tui.paths import broker_socket, registration_path, require_own, socket_path
from grpo_tui.supervisor.lock import has_daemon, take_lock

__all__ = [
    "Daemon",
    "NewDaemon",
    "NoSuchRun",
    "OpenedRun",
    "Run",
    "StartFailed",
    "daemon_of",
    "end_orphans",
    "ensure_daemon",
    "find_run",
    "latest_metrics",
    "look_at",
    "open_run",
    "replace_daemon",
    "run_status",
    "runs",
    "stored_status",
    "sweep_killed",
    "until_gone",
]

STATUS_LIMIT_S = 3.0
GONE_POLL_S = 0.005


def daemon_of(run_folder: Path) -> Daemon:
    """The supervisor of a live run; one is started if the run has none.

    Raises:
        NoSuchRun: the run is over.
        StartFailed: a new supervisor was needed and did not start.
    """
    if not ensure_daemon(run_folder):
        raise NoSuchRun(f"run {run_folder.name} is over; {how_to_go_on(run_folder)}")
    return Daemon(run_folder)


async def end_orphans(run_id: str, report: Callable[[str], None]) -> bool:
    """End the processes of a run that has neither folder nor supervisor any more; returns whether there was one."""
    from grpo_tui.supervisor import teardown  # here, since few commands need it
    from grpo_tui.supervisor.keeper.owners import is_supervised

    if any(run.id == run_id for run in runs()):
        return False
    folders = await asyncio.to_thread(_folders_of, run_id)
    if not folders or any((folder / PLAN_FILE).exists() or is_supervised(folder) for folder in folders):
        return False
    await teardown.sweep(run_id, None, ports=(), report=report)
    for folder in folders:
        _forget(folder)
    return True


async def sweep_killed(run: Run, report: Callable[[str], None]) -> bool:
    """Remove what a run left in shared memory, its temporary folder and the folders of this host; returns whether there
    was anything in the first two.

    Only of a run that was killed with its supervisor (a job that ended, a limit of memory), which removes it otherwise.

    Raises:
        ForeignFolder: another user owns the folder.
        StartRefused: a run of this id is live in another folder.
    """
    from grpo_tui.client.second_run import require_own_id  # here, since few commands need them
    from grpo_tui.supervisor import teardown

    if is_over(run.folder):
        return False
    require_own(run.folder)
    require_own_id(run)
    lock = take_lock(run.folder)
    if lock is None:  # a supervisor starts
        return False
    try:
        ledger = recorded_processes(run.folder)
        swept = await teardown.sweep(run.id, None, ports=(), report=report, ledger=ledger, run_folder=run.folder)
        _forget(run.folder)
    finally:
        os.close(lock)
    return bool(swept.removed)


def _forget(run_folder: Path) -> None:
    """Remove the sockets and the registration of a run without a supervisor."""
    for path in (socket_path(run_folder), broker_socket(run_folder), registration_path(run_folder)):
        path.unlink(missing_ok=True)


def _folders_of(run_id: str) -> set[Path]:
    """The folder in which a run was started, existing or not, from the markers of its processes."""
    from grpo_tui.supervisor.keeper import proc

    marks = [proc.marker(process.pid) for process in proc.processes_of_run(run_id)]
    return {Path(mark.run_folder) for mark in marks if mark is not None and mark.run_folder is not None}


async def until_gone(run_folder: Path) -> None:
    """Return once the supervisor's process has exited, which is shortly after its last message."""
    while True:
        if not has_daemon(run_folder):
            return
        await asyncio.sleep(GONE_POLL_S)


def run_status(run: Run) -> RunStatus:
    """The status of a run: from its supervisor if it answers, else from its files; with its latest metrics.

    Without metrics where their file cannot be read.

    Raises:
        PeerError: neither is available.
    """
    status = asyncio.run(_ask(run)) if run.has_daemon else stored_status(run)
    metrics: dict[str, float] = {}
    with suppress(OSError):
        metrics = latest_metrics(run.folder)
    return status.model_copy(update={"metrics": metrics})


async def _ask(run: Run) -> RunStatus:
    try:
        async with asyncio.timeout(STATUS_LIMIT_S):
            reply = await Daemon(run.folder).command("status")
    except (PeerUnavailable, TimeoutError) as error:
        if not has_daemon(run.folder):  # it has ended since the run was looked at
            return stored_status(look_at(run.folder))
        why = str(error) or f"no answer in {STATUS_LIMIT_S:g} s"
        text = f"the supervisor does not answer ({why}); this status is from its files"
        stored = stored_status(run)
        warning = Warning(
            id="supervisor-silent", severity="error", text=text, hint=f"see {run.folder / SUPERVISOR_LOG}"
        )
        return stored.model_copy(
            update={"warnings": [warning, *(each for each in stored.warnings if each.id != "no-supervisor")]}
        )
    if reply.status is None:
        raise PeerError(f"the supervisor of {run.id} answered without a status")
    return reply.status
