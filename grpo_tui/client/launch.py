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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.errors import GrpoError, PeerUnavailable
from grpo_engine.wire.codec import write_atomically, write_json_atomically
from grpo_engine.wire.supervisor import Hello
from grpo_tui.client.local import NoSuchRun, Run, is_over, look_at, lost_runs, runs
from grpo_tui.client.new_daemon import HELLO_POLL_S, NewDaemon, StartFailed
from grpo_tui.client.socket import HELLO_LIMIT_S, Daemon, answers
from grpo_tui.paths import LOGS, PLAN_FILE, RESOLVED_FILE, new_run_id, runtime_folder
from grpo_tui.supervisor.lock import has_daemon, listening_daemon
from grpo_tui.supervisor.proc import ProcessId, read_stat, send_signal
from grpo_tui.supervisor.processes import end_of

if TYPE_CHECKING:
    from grpo_tui.profile.loading import LoadedProfile

END_WITHIN_S, END_POLL_S = 60.0, 0.02
"""For a run that is being taken down, before another of its profile may start."""
LEAVE_WITHIN_S = 30.0
START_LOCK = ".start.lock"
SUSPENDED = "tT"
"""States in /proc of a process that a signal or a debugger has stopped."""


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
        GrpoError: the folder of runs or that of sockets cannot be used; nothing was started.
        StartFailed: the daemon did not come up.
    """
    from grpo_tui.profile.loading import load

    loaded = load(profile, overrides)
    runtime_folder()  # so that no run is begun whose daemon could not listen
    with _starting(logs):
        joined = _live_run(loaded, logs)
        if joined is not None:
            return joined
        folder = _make_folder(loaded, logs, take_ports)
        daemon.supervise(folder)
    return OpenedRun(folder=folder, is_new=True)


@contextmanager
def _starting(logs: Path) -> Iterator[None]:
    """One start at a time below this folder, which is made if need be."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(logs / START_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise GrpoError(
            f"{logs.resolve()}, the folder of runs, cannot be used: {error.strerror}; "
            "move away what is there, or start in a folder of yours"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _live_run(loaded: LoadedProfile, logs: Path) -> OpenedRun | None:
    from grpo_tui.profile.loading import resolved
    from grpo_tui.profile.plan_file import Plan

    for name in lost_runs(logs):
        if name.startswith(f"{loaded.name}-"):
            raise GrpoError(f"run {name} lives and its folder was deleted: `grpo-tui down {name}` ends it first")
    for run in runs(logs):
        if not run.is_live or Plan.from_json((run.folder / PLAN_FILE).read_text()).profile_name != loaded.name:
            continue
        if not ensure_daemon(run.folder) or _has_ended_meanwhile(run):
            continue
        changed = _read_json_text(run.folder / RESOLVED_FILE) != _as_written(resolved(loaded))
        note = f"the profile has changed since {run.id} was started; it goes on as it is" if changed else None
        return OpenedRun(folder=run.folder, is_new=False, note=note)
    return None


def _has_ended_meanwhile(run: Run) -> bool:
    """Wait for the end of a run that is being taken down; whether it was."""
    try:
        reply = asyncio.run(Daemon(run.folder).command("status"))
    except PeerUnavailable:
        return is_over(run.folder)
    if reply.status is None or not reply.status.is_ending:
        return False
    deadline = time.monotonic() + END_WITHIN_S
    while has_daemon(run.folder):
        if time.monotonic() > deadline:
            raise GrpoError(f"run {run.id} is being taken down: wait for it, or `grpo-tui down {run.id} --timeout 0`")
        time.sleep(END_POLL_S)
    return True


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
        PeerUnavailable: it has one that is suspended or hangs.
        StartFailed: it has none, and a new one did not come up.
    """
    if is_over(folder) and not has_daemon(folder):
        return look_at(folder).has_services and start_daemon(folder)
    return _is_heard(folder) or start_daemon(folder)


def _is_heard(folder: Path, *, any_version: bool = False) -> bool:
    """Whether the daemon of a run answers; not, when there is none or it only starts.

    Raises:
        PeerUnavailable: it holds the run and says nothing, so that no other can take its place.
        PeerError: it speaks another protocol, and `any_version` will not do.
    """
    deadline = time.monotonic() + HELLO_LIMIT_S  # long enough for a daemon to put back a socket that was removed
    while not answers(folder, any_version=any_version):
        pid = listening_daemon(folder)
        if pid is None:
            return False
        if time.monotonic() > deadline:
            raise PeerUnavailable(_silence_words(folder, pid))
        time.sleep(HELLO_POLL_S)
    return True


def _silence_words(folder: Path, pid: int) -> str:
    stat = read_stat(pid)
    if stat is not None and stat.state in SUSPENDED:
        return (
            f"the supervisor of {folder.name} (pid {pid}) is suspended; its services go on: `kill -CONT {pid}` wakes it"
        )
    return (
        f"the supervisor of {folder.name} (pid {pid}) does not answer, nothing in {HELLO_LIMIT_S:g} s: `kill -9 {pid}` "
        "ends it, services go on and the next command takes them over"
    )


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
        PeerUnavailable: the old daemon is suspended or hangs; it is left alone.
        StartFailed: the new daemon does not come up; if the old one has left by then, services go on without one.
        NoSuchRun: the run was over before it could be handed over.
    """
    from grpo_tui.profile.plan_file import Plan

    Plan.from_json((folder / PLAN_FILE).read_text(), where=str(folder / PLAN_FILE))
    with NewDaemon() as successor:
        await asyncio.to_thread(_is_heard, folder, any_version=True)
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
    process = read_stat(hello.pid)
    if process is not None and not process.is_dead and has_daemon(folder):
        send_signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(LEAVE_WITHIN_S):
                await end_of(ProcessId(process.pid, process.start_ticks))
        except TimeoutError:
            text = f"the supervisor of {folder.name} (pid {hello.pid}) was asked to leave and has not in"
            hint = f"`kill -9 {hello.pid}` ends it; services go on, and the next command takes them over"
            raise StartFailed(f"{text} {LEAVE_WITHIN_S:g} s: {hint}") from None
    return hello


def _read_json_text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _as_written(document: dict[str, object]) -> str:
    import json

    return json.dumps(document, indent=1) + "\n"
