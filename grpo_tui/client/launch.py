"""Start a run, or join the live one; start the supervisor of a run, or a new one for a run that lost its own.

A lock on the folder of runs makes one run out of two simultaneous starts. The supervisor's own lock on its run folder
makes sure that there is only one of it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from grpo_engine.errors import GrpoError, PeerUnavailable
from grpo_engine.wire.access_token import write_token
from grpo_engine.wire.codec import write_atomically
from grpo_engine.wire.file_locks import lock_holder
from grpo_engine.wire.run_folder import PLAN_FILE, RESOLVED_FILE, SETTINGS_FILE, START_LOCK_FILE
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, Hello
from grpo_tui.client.local import NoSuchRun, Run, StartRefused, is_over, look_at, lost_runs, text_of_lost
from grpo_tui.client.new_daemon import HELLO_POLL_S, NewDaemon, StartFailed
from grpo_tui.client.socket import HELLO_LIMIT_S, Daemon, answers
from grpo_tui.paths import (
    HOST_LOCK_FILE,
    LOGS,
    host_folder,
    is_run_id_of,
    name_of_run,
    new_run_id,
    require_own,
    runtime_folder,
)
from grpo_tui.supervisor.keeper.client import end_of
from grpo_tui.supervisor.keeper.owners import owner_of
from grpo_tui.supervisor.keeper.proc import ProcessId, read_stat, send_signal, user_name
from grpo_tui.supervisor.lock import has_daemon, listening_daemon

if TYPE_CHECKING:
    from grpo_tui.client.start_queue import StartQueue
    from grpo_tui.profile.loaded import LoadedProfile

END_WITHIN_S, END_POLL_S = 60.0, 0.02
"""For a run that is being taken down, before another of its profile may start."""
EXIT_WITHIN_S = 30.0
START_WITHIN_S, START_POLL_S = 90.0, 0.02
"""For another start in the same folder: it may wait for the end of a run, and then for its supervisor."""
Second = Literal["new", "join"]
"""What a start does where a run of its profile is live; without either it joins one that has the same settings."""
SUSPENDED = "tT"
"""States in /proc of a process that a signal or a debugger has stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run that was started or joined."""

    folder: Path
    is_new: bool
    is_resumed: bool = False
    note: str | None = None
    """For people: settings that a joined run keeps, ports that were chosen, runs on the same GPUs, or where a resumed
    run goes on."""


def open_run(
    profile: str,
    overrides: Sequence[str] = (),
    *,
    daemon: NewDaemon,
    take_ports: bool = False,
    second: Second | None = None,
    shares_gpus: bool | None = None,
    labels: Labels | None = None,
    queue: StartQueue | None = None,
    logs: Path = LOGS,
) -> OpenedRun:
    """Start a run of a profile, or join a live one that has the same settings.

    As `open_loaded`, of a profile that is read now.
    """
    from grpo_engine.config import read_table
    from grpo_tui.profile.loading import find, load_table

    path = find(profile)
    return open_loaded(
        partial(load_table, read_table(path), path, overrides),  # of now, however long it waits in the queue
        daemon=daemon,
        take_ports=take_ports,
        second=second,
        shares_gpus=shares_gpus,
        labels=labels,
        queue=queue,
        logs=logs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What a person calls a run."""

    name: str | None = None
    """The beginning of its id; None: the name of its profile."""
    tags: tuple[str, ...] = ()


class ReadProfile(Protocol):
    """Loads a profile, with other ports in the place of those that it states, and ports where it has 0."""

    def __call__(
        self, *, moved_ports: Mapping[int, int] | None = None, chosen_ports: Mapping[str, int] | None = None
    ) -> LoadedProfile:
        """The checked profile; raises ConfigError."""


def open_loaded(
    read: ReadProfile,
    *,
    daemon: NewDaemon,
    take_ports: bool = False,
    second: Second | None = None,
    shares_gpus: bool | None = None,
    labels: Labels | None = None,
    queue: StartQueue | None = None,
    fill: Callable[[Path], None] | None = None,
    logs: Path = LOGS,
) -> OpenedRun:
    """Start a run, or join a live one that has the same settings.

    Args:
        daemon: the supervisor process for a new run; unused when a run was joined.
        take_ports: whether the first start of a service ends foreign processes of our own user on its ports.
        second: what to do where a run of the profile is live: `new` starts another, on free ports; `join` joins it
            whatever its settings are.
        shares_gpus: whether it starts on GPUs of live runs, where the memory that all of them plan fits; unset: as the
            profile says, and with `new`.
        labels: of a new run; one that has a name joins no run of another name.
        queue: where the start waits instead of being refused; it joins no run.
        fill: puts into the folder of a new run what it begins with.

    Raises:
        ConfigError: the profile is wrong, or lacks something on this machine; nothing was started.
        StartRefused: a run of the profile is live with other settings, or any run uses the ports or GPUs of a new one,
            and `second` does not say what to do; a live run writes the same checkpoints or store; or another process
            listens on a port.
        NoSuchRun: `second` is `join`, and no run of the profile is live.
        GrpoError: the folder of runs or that of sockets cannot be used; nothing was started.
        StartFailed: the supervisor did not start.
        NotInTime: it has waited in the queue as long as it was to.
    """
    labels = labels or Labels()
    runtime_folder()  # before the run, whose supervisor could not listen without it
    if queue is not None:
        from grpo_tui.profile.loading import require_needs

        require_needs(read())  # now, and not when it has waited
    while True:
        loaded = read()
        shares = (
            shares_gpus if shares_gpus is not None else loaded.profile.share_gpus or (second == "new" and not queue)
        )
        try:
            with starting(logs):
                is_alone = second == "new" or queue is not None
                if not is_alone and (joined := _live_run(loaded, second, logs, labels.name)) is not None:
                    return joined
                with alone_on_host(daemon):
                    loaded, notes = _granted(
                        read, loaded, logs, take_ports=take_ports, moves=second == "new", shares=shares, queue=queue,
                        labels=labels,
                    )  # fmt: skip
                    folder = make_folder(loaded, logs, take_ports=take_ports, labels=labels, fill=fill)
                    daemon.supervise(folder)
            return OpenedRun(folder=folder, is_new=True, note="\n".join(notes) or None)
        except StartRefused as refused:
            if queue is None:
                raise
            queue.wait(refused)


def _granted(
    read: ReadProfile,
    loaded: LoadedProfile,
    logs: Path,
    *,
    take_ports: bool,
    moves: bool,
    shares: bool,
    queue: StartQueue | None,
    labels: Labels,
) -> tuple[LoadedProfile, list[str]]:
    """A profile with ports that are free, once nothing that it needs is another run's; and notes for people.

    Raises:
        StartRefused: something is; the start then has its place in the queue.
    """
    from grpo_tui.client.gpu_leases import crowded_gpus, require_gpus
    from grpo_tui.client.second_run import (
        chosen_ports,
        free_ports,
        live_runs_anywhere,
        note_on_ports,
        require_free_ports,
        require_own_files,
        require_own_ports,
    )
    from grpo_tui.client.start_queue import refuse_before, start_of, waiting_starts

    start = start_of(loaded, moves=moves, shares=shares, name=labels.name)
    try:
        earlier = waiting_starts() if queue is None else queue.earlier()
        refuse_before(start, earlier, hint="--queue waits behind it")
        moved = free_ports(loaded, logs) if moves else {}
        if moved or loaded.chosen_ports:
            loaded = read(moved_ports=moved, chosen_ports=chosen_ports(loaded, moved, logs))
        require_own_ports(loaded, logs)
        crowds = crowded_gpus(loaded, live_runs_anywhere(logs), logs)
        require_gpus(crowds, shares=shares)
        require_own_files(loaded, logs)
        require_free_ports(loaded, take_ports=take_ports)
    except StartRefused:
        if queue is not None:
            queue.join(start)
        raise
    return loaded, [*(crowd.words for crowd in crowds), *note_on_ports(loaded.moved_ports)]


@contextmanager
def starting(logs: Path) -> Iterator[None]:
    """Allow one start at a time in this folder, which is made if missing.

    Raises:
        GrpoError: the folder cannot be used, or another start does not end.
    """
    try:
        logs.mkdir(mode=0o755, parents=True, exist_ok=True)  # others would replace run folders, whatever the umask
        lock = _open_own(logs / START_LOCK_FILE)
    except OSError as error:
        raise GrpoError(
            f"{os.path.realpath(logs)}, the folder of runs, cannot be used: {error.strerror}; "
            "move the file away, or start in a folder that you can write to"
        ) from None
    try:
        os.fchmod(lock, 0o600)  # earlier versions let everybody open it, and so hold it
        _take(lock, logs / START_LOCK_FILE)
        yield
    finally:
        os.close(lock)


@contextmanager
def alone_on_host(daemon: NewDaemon) -> Iterator[None]:
    """Allow one start at a time on this host, in whatever folder, so that no two are given the same port or GPU.

    Args:
        daemon: inherits the lock, and keeps it until it has the run, also where this process is killed.

    Raises:
        GrpoError: another start does not end.
    """
    from grpo_tui.client.start_queue import remove_left
    from grpo_tui.supervisor.registered import forget_ended

    _take(daemon.host_lock, host_folder() / HOST_LOCK_FILE)
    try:
        forget_ended(lambda folder: look_at(folder).is_live)
        remove_left()
        yield
    finally:
        daemon.release_host_lock()


def _open_own(path: Path) -> int:
    """Open the lock file of this user; another user's, who could hold it for ever, is replaced where that is allowed.

    Raises:
        GrpoError: it belongs to another user.
    """
    owner = os.geteuid()
    with suppress(FileNotFoundError):
        if (owner := path.lstat().st_uid) != os.geteuid():
            with suppress(PermissionError):  # the folder is not ours either, or its files are their owners' (sticky)
                path.unlink()
                owner = os.geteuid()
    if owner == os.geteuid():
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if (owner := os.fstat(lock).st_uid) == os.geteuid():
            return lock
        os.close(lock)
    raise GrpoError(
        f"{path.absolute()} belongs to user {user_name(owner)}, who could hold up every start here: remove it, or "
        "start in a folder of your own"
    )


def _take(lock: int, path: Path) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                pid = lock_holder(os.fstat(lock))
                who = "a process that is not visible here" if pid is None else owner_of(pid).who()
                raise GrpoError(
                    f"{path} is locked since {START_WITHIN_S:g} s by {who}: wait for its start of a run, or end it"
                ) from None
            time.sleep(START_POLL_S)
        else:
            return


def _live_run(loaded: LoadedProfile, second: Second | None, logs: Path, name: str | None) -> OpenedRun | None:
    """The live run of a profile to join: the newest with these settings, else the newest if it is to be joined.

    Args:
        name: only of runs with this name.
    """
    from grpo_tui.client.second_run import differences, live_runs_of, note_on, refusal

    for name in lost_runs(logs):
        if is_run_id_of(loaded.name, name):
            raise GrpoError(text_of_lost(name))
    others: list[tuple[Run, list[str]]] = []
    for live in live_runs_of(loaded, logs):
        if name is not None and name_of_run(live.run.id) != name:
            continue
        if not ensure_daemon(live.run.folder) or wait_if_ending(live.run):
            continue
        changes = differences(live, loaded)
        if not changes:
            return OpenedRun(folder=live.run.folder, is_new=False)
        others.append((live.run, changes))
    if others and second == "join":
        run, changes = others[0]
        return OpenedRun(folder=run.folder, is_new=False, note=note_on(run, changes))
    if others:
        raise refusal(*others[0])
    if second == "join":
        raise NoSuchRun(f"--join: no run of {loaded.path} is live here; without it the command starts one")
    return None


def wait_if_ending(run: Run) -> bool:
    """Wait for the supervisor of a run that is being taken down, or is over, to exit; returns whether it was."""
    try:
        status = asyncio.run(Daemon(run.folder).command("status")).status
    except PeerUnavailable:
        ends = is_over(run.folder)
    else:
        ends = status is not None and (status.is_ending or status.state in ENDED_RUN_STATES)
    deadline = time.monotonic() + END_WITHIN_S
    while ends and has_daemon(run.folder):  # its last files may take long to write
        if time.monotonic() > deadline:
            raise GrpoError(f"run {run.id} is being taken down: wait for it, or `grpo-tui down {run.id} --timeout 0`")
        time.sleep(END_POLL_S)
    return ends


def make_folder(
    loaded: LoadedProfile,
    logs: Path,
    *,
    take_ports: bool,
    labels: Labels | None = None,
    fill: Callable[[Path], None] | None = None,
) -> Path:
    """Make the run's folder with its plan: readable by its owner only, since the environment may hold secrets.

    Args:
        fill: puts into it what the run begins with, before the plan makes it the folder of a run.
    """
    labels = labels or Labels()
    base = new_run_id(labels.name or loaded.name)
    folder, number = logs.resolve() / base, 1
    while True:
        try:
            folder.mkdir(mode=0o700)
            break
        except FileExistsError:
            number += 1
            folder = logs.resolve() / f"{base}.{number}"  # not "-": shared memory is swept by the prefix "grpo-<run>-"
    try:
        files = run_files(loaded, folder, take_ports=take_ports, tags=labels.tags)
        token = own_token(loaded)
        if fill is not None:
            fill(folder)
        write_token(folder, token)
        write_files(folder, files)
    except BaseException:  # a full disk, or Ctrl-C: copying a checkpoint takes a while
        shutil.rmtree(folder)  # nothing will run in it
        raise
    return folder


def run_files(loaded: LoadedProfile, folder: Path, *, take_ports: bool, tags: tuple[str, ...] = ()) -> dict[str, str]:
    """What a run is started and resumed from, by the name of the file, in the order in which they are written.

    Raises:
        ConfigError: this machine lacks something that the profile needs, or a file that it names cannot be read.
    """
    from grpo_tui.profile.loaded import resolved
    from grpo_tui.profile.loading import require_needs
    from grpo_tui.profile.plan import make_plan

    require_needs(loaded)
    plan = make_plan(loaded, run_folder=folder, python=sys.executable, take_ports=take_ports, tags=tags)
    return {
        SETTINGS_FILE: _to_json(loaded.written),
        RESOLVED_FILE: _to_json(resolved(loaded)),
        PLAN_FILE: plan.to_json(),
    }


def _to_json(document: Mapping[str, object]) -> str:
    import json

    return json.dumps(document, indent=1) + "\n"


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files that only we can read: the plan's environment may hold secrets."""
    for name, text in files.items():
        write_atomically(folder / name, text.encode(), mode=0o600)


def own_token(loaded: LoadedProfile) -> str | None:
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
        f"it, and `grpo-tui upgrade {folder.name}` starts another, which takes over the services"
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
    Plan.of(folder)
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
            hint = f"`kill -9 {hello.pid}` ends it, and the same command then takes over the services"
            raise StartFailed(f"{text} {EXIT_WITHIN_S:g} s after SIGTERM: {hint}") from None
    return hello
