"""Start a run, or join the one that lives; start the daemon of a run, or a new one for a run that lost its own.

A lock on the folder of runs makes one run out of two starts at the same moment. The daemon's own lock on its run folder
makes sure that there is one of it, whoever starts it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.errors import GrpoError, PeerUnavailable
from grpo_engine.wire.codec import write_atomically, write_json_atomically
from grpo_engine.wire.supervisor import Hello
from grpo_tui.client.local import NoSuchRun, is_over, look_at, runs
from grpo_tui.client.new_daemon import NewDaemon
from grpo_tui.client.socket import Daemon, answers
from grpo_tui.paths import LOGS, PLAN_FILE, RESOLVED_FILE, new_run_id
from grpo_tui.supervisor.lock import has_daemon
from grpo_tui.supervisor.proc import identify
from grpo_tui.supervisor.processes import end_of

if TYPE_CHECKING:
    from grpo_tui.profile.loading import LoadedProfile

START_LOCK = ".start.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run that is there now."""

    folder: Path
    is_new: bool
    note: str | None = None
    """What a person should know about a run that was joined."""


def open_run(
    profile: str, overrides: Sequence[str] = (), *, daemon: NewDaemon, take_ports: bool = False, logs: Path = LOGS
) -> OpenedRun:
    """Start a run of a profile, or join the one that lives.

    Args:
        daemon: the one that is told a new run; told nothing when a run was joined.
        take_ports: the word to end strangers of our own user that hold a declared port when a service starts first.

    Raises:
        ConfigError: the profile is wrong; nothing was started.
        StartFailed: the daemon did not come up.
    """
    from grpo_tui.profile.loading import load

    loaded = load(profile, overrides)
    logs.mkdir(parents=True, exist_ok=True)
    with _starting(logs):
        joined = _live_run(loaded, logs)
        if joined is not None:
            return joined
        folder = _make_folder(loaded, logs, take_ports)
        daemon.supervise(folder)
    return OpenedRun(folder=folder, is_new=True)


@contextmanager
def _starting(logs: Path) -> Iterator[None]:
    """One start at a time below this folder."""
    descriptor = os.open(logs / START_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _live_run(loaded: LoadedProfile, logs: Path) -> OpenedRun | None:
    from grpo_tui.profile.loading import resolved
    from grpo_tui.profile.plan_file import Plan

    for run in runs(logs):
        if not run.is_live or Plan.from_json((run.folder / PLAN_FILE).read_text()).profile_name != loaded.name:
            continue
        if not ensure_daemon(run.folder):
            continue
        changed = _read_json_text(run.folder / RESOLVED_FILE) != _as_written(resolved(loaded))
        note = f"the profile has changed since {run.id} was started; it goes on as it is" if changed else None
        return OpenedRun(folder=run.folder, is_new=False, note=note)
    return None


def _make_folder(loaded: LoadedProfile, logs: Path, take_ports: bool) -> Path:
    """Make the run's folder with its plan: readable by its owner alone, since the environment may hold secrets."""
    from grpo_tui.profile.loading import resolved
    from grpo_tui.profile.plan import make_plan

    base = new_run_id(loaded.name)
    folder, number = logs.resolve() / base, 1
    while True:
        try:
            folder.mkdir()
            break
        except FileExistsError:
            number += 1
            folder = logs.resolve() / f"{base}.{number}"  # not "-": shared memory is swept by the prefix "grpo-<run>-"
    try:
        plan = make_plan(loaded, run_folder=folder, python=sys.executable, take_ports=take_ports)
    except GrpoError:
        folder.rmdir()  # nothing will run in it
        raise
    write_json_atomically(folder / RESOLVED_FILE, resolved(loaded), mode=0o600)
    write_atomically(folder / PLAN_FILE, plan.to_json().encode(), mode=0o600)
    return folder


def ensure_daemon(folder: Path) -> bool:
    """See to it that a run that lives has a daemon that answers; whether the run goes on.

    Raises:
        StartFailed: it has none, and a new one did not come up.
    """
    if is_over(folder) and not has_daemon(folder):
        return look_at(folder).has_services and start_daemon(folder)
    return start_daemon(folder) if not answers(folder) else True


def start_daemon(folder: Path) -> bool:
    """Start a daemon on a run folder and wait until it says hello; False when the run was over before it could.

    Raises:
        StartFailed: it did not come up; with the last lines of its log.
    """
    with NewDaemon() as daemon:
        return daemon.supervise(folder)


async def replace_daemon(folder: Path) -> tuple[Hello | None, Hello]:
    """Hand a run over to a new daemon, of the program as it is installed now; who had it, if any, and who has it.

    The new one has loaded itself and this program has read the run's plan before the old one is asked to leave.

    Raises:
        PeerError: this program does not read the run's plan; the old daemon goes on.
        StartFailed: the new daemon does not come up; if the old one has left by then, services go on without one.
        NoSuchRun: the run was over before it could be handed over.
    """
    from grpo_tui.profile.plan_file import Plan

    Plan.from_json((folder / PLAN_FILE).read_text(), where=str(folder / PLAN_FILE))
    with NewDaemon() as successor:
        successor.wait_until_loaded()
        old = await _dismiss(folder)
        if not await asyncio.to_thread(successor.supervise, folder):
            raise NoSuchRun(f"run {folder.name} is over")
    return old, await Daemon(folder).hello()


async def _dismiss(folder: Path) -> Hello | None:
    """Have the daemon of a run leave its services and end; who it was, or None when there was none."""
    try:
        hello = await Daemon(folder).hello(any_version=True)
    except PeerUnavailable:
        return None
    process = identify(hello.pid)
    if process is not None and has_daemon(folder):
        os.kill(process.pid, signal.SIGTERM)
        await end_of(process)
    return hello


def _read_json_text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _as_written(document: dict[str, object]) -> str:
    import json

    return json.dumps(document, indent=1) + "\n"
