"""Start a run, or join the live one; start the supervisor of a run, or a new one for a run that lost its own.

A lock on the folder of runs makes one run out of two simultaneous starts. The supervisor's own lock on its run folder
makes sure that there is only one of it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.errors import GrpoError, PeerUnavailable
from grpo_engine.wire.access_token import write_token
from grpo_engine.wire.codec import write_atomically, write_json_atomically
from grpo_engine.wire.run_folder import PLAN_FILE, RESOLVED_FILE, START_LOCK_FILE
from grpo_engine.wire.supervisor import Hello
from grpo_tui.client.local import NoSuchRun, Run, is_over, look_at, lost_runs, runs
from grpo_tui.client.new_daemon import HELLO_POLL_S, NewDaemon, StartFailed
from grpo_tui.client.socket import HELLO_LIMIT_S, Daemon, answers
from grpo_tui.paths import LOGS, new_run_id, require_own, runtime_folder
from grpo_tui.supervisor.keeper.client import end_of
from grpo_tui.supervisor.keeper.owners import owner_of
from grpo_tui.supervisor.keeper.proc import ProcessId, lock_holder, read_stat, send_signal
from grpo_tui.supervisor.lock import has_daemon, listening_daemon

if TYPE_CHECKING:
    from grpo_tui.profile.loading import LoadedProfile

END_WITHIN_S, END_POLL_S = 60.0, 0.02
"""For a run that is being taken down, before another of its profile may start."""
EXIT_WITHIN_S = 30.0
START_WITHIN_S, START_POLL_S = 90.0, 0.02
"""For another start in the same folder: it may wait for the end of a run, and then for its supervisor."""
SUSPENDED = "tT"
"""States in /proc of a process that a signal or a debugger has stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run that was started or joined."""

    folder: Path
    is_new: bool
    note: str | None = None
    """For people, about a run that was joined."""


def open_run(
    profile: str, overrides: Sequence[str] = (), *, daemon: NewDaemon, take_ports: bool = False, logs: Path = LOGS
) -> OpenedRun:
    """Start a run of a profile, or join the live one.

    Args:
        daemon: the supervisor process for a new run; unused when a run was joined.
        take_ports: whether the first start of a service ends foreign processes of our own user on its ports.

    Raises:
        ConfigError: the profile is wrong; nothing was started.
        GrpoError: the folder of runs or that of sockets cannot be used; nothing was started.
        StartFailed: the supervisor did not start.
    """
    from grpo_tui.profile.loading import load

    loaded = load(profile, overrides)
    runtime_folder()  # before the run, whose supervisor could not listen without it
    with _starting(logs):
        joined = _live_run(loaded, logs)
        if joined is not None:
            return joined
        folder = _make_folder(loaded, logs, take_ports)
        daemon.supervise(folder)
    return OpenedRun(folder=folder, is_new=True)


@contextmanager
def _starting(logs: Path) -> Iterator[None]:
    """Allow one start at a time in this folder, which is made if missing.

    Raises:
        GrpoError: the folder cannot be used, or another start does not end.
    """
    try:
        logs.mkdir(parents=True, exist_ok=True)
        lock = os.open(logs / START_LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise GrpoError(
            f"{logs.resolve()}, the folder of runs, cannot be used: {error.strerror}; "
            "move the file away, or start in a folder that you can write to"
        ) from None
    try:
        with suppress(PermissionError):  # another user's, in a folder of several users
            os.fchmod(lock, 0o600)  # earlier versions let everybody open it, and so hold it
        _take(lock, logs / START_LOCK_FILE)
        yield
    finally:
        os.close(lock)


def _take(lock: int, path: Path) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                pid = lock_holder(os.fstat(lock).st_ino)
                who = "a process that is not visible here" if pid is None else owner_of(pid).who()
                raise GrpoError(
                    f"{path} is locked since {START_WITHIN_S:g} s by {who}: wait for its start of a run, or end it"
                ) from None
            time.sleep(START_POLL_S)
        else:
            return


def _live_run(loaded: LoadedProfile, logs: Path) -> OpenedRun | None:
    from grpo_tui.profile.loading import resolved
    from grpo_tui.profile.plan_file import Plan

    for name in lost_runs(logs):
        if name.startswith(f"{loaded.name}-"):
            raise GrpoError(f"run {name} is live and its folder was deleted: end it with `grpo-tui down {name}` first")
    for run in runs(logs):
        if not run.is_live or Plan.from_json((run.folder / PLAN_FILE).read_text()).profile_name != loaded.name:
            continue
        if not ensure_daemon(run.folder) or _wait_if_ending(run):
            continue
        changed = _read_json_text(run.folder / RESOLVED_FILE) != _as_written(resolved(loaded))
        note = f"the profile has changed since {run.id} was started; the run keeps its settings" if changed else None
        return OpenedRun(folder=run.folder, is_new=False, note=note)
    return None


def _wait_if_ending(run: Run) -> bool:
    """Wait for the end of a run that is being taken down; returns whether it was."""
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
    """Make the run's folder with its plan: readable by its owner only, since the environment may hold secrets."""
    from grpo_tui.profile.loading import resolved
    from grpo_tui.profile.plan import make_plan

    base = new_run_id(loaded.name)
    folder, number = logs.resolve() / base, 1
    while True:
        try:
            folder.mkdir(mode=0o700)
            break
        except FileExistsError:
            number += 1
            folder = logs.resolve() / f"{base}.{number}"  # not "-": shared memory is swept by the prefix "grpo-<run>-"
    try:
        plan = make_plan(loaded, run_folder=folder, python=sys.executable, take_ports=take_ports)
        token = _own_token(loaded)
    except GrpoError:
        folder.rmdir()  # nothing will run in it
        raise
    write_token(folder, token)
    write_json_atomically(folder / RESOLVED_FILE, resolved(loaded), mode=0o600)
    write_atomically(folder / PLAN_FILE, plan.to_json().encode(), mode=0o600)
    return folder


def _own_token(loaded: LoadedProfile) -> str | None:
    """The token that the profile sets, which all services then use."""
    own = (service.own_token(loaded.path.parent) for service in loaded.profile.services.values())
    return next((token for token in own if token), None)


def ensure_daemon(folder: Path, *, was_live: bool = False) -> bool:
    """Make sure that a live run has a supervisor that answers; returns whether the run is live.

    A supervisor runs the commands of the folder's plan, so none is started on a folder that was only copied here: a
    process of the run must be alive, or the caller must have seen the run alive.

    Raises:
        ForeignFolder: another user owns the folder or may write to it.
        PeerUnavailable: its supervisor is suspended or hangs.
        StartFailed: it has none, and a new one did not start.
    """
    require_own(folder)
    if has_daemon(folder) or (was_live and not is_over(folder)):
        return _answers(folder) or start_daemon(folder)
    return look_at(folder).has_services and start_daemon(folder)


def _answers(folder: Path, *, any_version: bool = False) -> bool:
    """Whether the supervisor of a run answers; False when there is none or it is starting.

    Raises:
        PeerUnavailable: it holds the run and does not answer, so that no other can take its place.
        PeerError: it uses another protocol, and `any_version` is not set.
    """
    deadline = time.monotonic() + HELLO_LIMIT_S  # long enough for a supervisor to restore a socket that was removed
    while not answers(folder, any_version=any_version):
        pid = listening_daemon(folder)
        if pid is None:
            return False
        if time.monotonic() > deadline:
            raise PeerUnavailable(_no_answer_text(folder, pid))
        time.sleep(HELLO_POLL_S)
    return True


def _no_answer_text(folder: Path, pid: int) -> str:
    stat = read_stat(pid)
    if stat is not None and stat.state in SUSPENDED:
        return (
            f"the supervisor of {folder.name} (pid {pid}) is suspended; its services keep running: "
            f"`kill -CONT {pid}` resumes it"
        )
    return (
        f"the supervisor of {folder.name} (pid {pid}) has not answered in {HELLO_LIMIT_S:g} s: `kill -9 {pid}` ends "
        "it, services keep running and the next command takes them over"
    )


def start_daemon(folder: Path) -> bool:
    """Start a supervisor on a run folder and wait until it answers; False when the run was over before.

    Raises:
        StartFailed: it did not start; with the last lines of its log.
    """
    with NewDaemon() as daemon:
        return daemon.supervise(folder)


async def replace_daemon(folder: Path) -> tuple[Hello | None, Hello]:
    """Replace the supervisor of a run by one of the installed version; returns the old one, if any, and the new one.

    The new one has loaded and this program has read the run's plan before the old one gets SIGTERM.

    Raises:
        PeerError: this program cannot read the run's plan; the old supervisor keeps running.
        PeerUnavailable: the old supervisor is suspended or hangs; it is left alone.
        StartFailed: the new supervisor does not start; if the old one has exited, services run without one.
        NoSuchRun: the run was over before it could be handed over.
        ForeignFolder: another user owns the folder or may write to it.
    """
    from grpo_tui.profile.plan_file import Plan

    require_own(folder)
    Plan.from_json((folder / PLAN_FILE).read_text(), where=str(folder / PLAN_FILE))
    with NewDaemon() as successor:
        await asyncio.to_thread(_answers, folder, any_version=True)
        successor.wait_until_loaded()
        old = await _stop_supervisor(folder)
        if not await asyncio.to_thread(successor.supervise, folder):
            raise NoSuchRun(f"run {folder.name} is over")
    return old, await Daemon(folder).hello()


async def _stop_supervisor(folder: Path) -> Hello | None:
    """Stop the supervisor of a run and leave its services running; returns it, or None when there was none."""
    try:
        hello = await Daemon(folder).hello(any_version=True)
    except PeerUnavailable:
        return None
    process = read_stat(hello.pid)
    if process is not None and not process.is_dead and has_daemon(folder):
        send_signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(EXIT_WITHIN_S):
                await end_of(ProcessId(process.pid, process.start_ticks))
        except TimeoutError:
            text = f"the supervisor of {folder.name} (pid {hello.pid}) has not exited"
            hint = f"`kill -9 {hello.pid}` ends it; services keep running, and the next command takes them over"
            raise StartFailed(f"{text} {EXIT_WITHIN_S:g} s after SIGTERM: {hint}") from None
    return hello


def _read_json_text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _as_written(document: dict[str, object]) -> str:
    import json

    return json.dumps(document, indent=1) + "\n"
