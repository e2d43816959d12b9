"""Start a run, or join the one that lives; start the daemon of a run, or a new one for a run that lost its own.

A lock on the folder of runs makes one run out of two starts at the same moment. The daemon's own lock on its run folder
makes sure that there is one of it, whoever starts it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.errors import GrpoError, PeerError, PeerUnavailable
from grpo_engine.wire.codec import write_atomically, write_json_atomically
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, Hello
from grpo_tui.client.local import NoSuchRun, look_at, runs
from grpo_tui.client.socket import Daemon
from grpo_tui.paths import LOGS, PLAN_FILE, RESOLVED_FILE, STATE_FILE, SUPERVISOR_LOG, new_run_id
from grpo_tui.profile.plan_file import Plan
from grpo_tui.supervisor.lock import LOADED, has_daemon
from grpo_tui.supervisor.proc import identify
from grpo_tui.supervisor.processes import end_of
from grpo_tui.supervisor.state_file import read_state

if TYPE_CHECKING:
    from grpo_tui.profile.loading import LoadedProfile

HELLO_WITHIN_S = 20.0
"""A daemon says hello within 0.3 s; a machine that is starting eight engines may take its time."""
HELLO_POLL_S = 0.01
START_LOCK = ".start.lock"


class StartFailed(GrpoError):
    """The daemon of a run did not come up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run that is there now."""

    folder: Path
    is_new: bool
    note: str | None = None
    """What a person should know about a run that was joined."""


def open_run(profile: str, overrides: Sequence[str] = (), *, take_ports: bool = False, logs: Path = LOGS) -> OpenedRun:
    """Start a run of a profile, or join the one that lives.

    Args:
        take_ports: the word to end strangers of our own user that hold a declared port when a service starts first.

    Raises:
        ConfigError: the profile is wrong; nothing was started.
        StartFailed: the daemon did not come up.
    """
    with NewDaemon() as daemon:  # it loads its modules while we load the profile
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
    if _is_over(folder) and not has_daemon(folder):
        return look_at(folder).has_services and start_daemon(folder)
    return start_daemon(folder) if not _answers(folder) else True


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


class NewDaemon:
    """A daemon that was started and waits to be told its run; told nothing, it ends with this context."""

    def __init__(self) -> None:
        self._talk = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object, which closes it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_tui.supervisor.daemon", "-"],
            stdin=subprocess.PIPE,
            stdout=self._talk,
            stderr=self._talk,
            start_new_session=True,
        )

    def __enter__(self) -> NewDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # what was told its run has left this process behind by then
        self._process.communicate()
        self._talk.close()

    def wait_until_loaded(self) -> None:
        """Return once it can be told its run at any moment.

        Raises:
            StartFailed: it ends instead, e.g. because its program is broken; with its last words.
        """
        deadline = time.monotonic() + HELLO_WITHIN_S
        while os.fstat(self._talk.fileno()).st_size < len(LOADED):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise StartFailed(f"a new supervisor cannot be started: {self._own_words()}")
            time.sleep(HELLO_POLL_S)

    def supervise(self, folder: Path) -> bool:
        """Tell it its run and wait until it says hello; False when the run was over before it could.

        Raises:
            StartFailed: it did not come up; with its last words.
        """
        with suppress(BrokenPipeError):
            self._process.communicate(os.fsencode(folder) + b"\n")
        deadline = time.monotonic() + HELLO_WITHIN_S
        while self._process.returncode == 0 and time.monotonic() < deadline:
            if _answers(folder):
                return True
            if _is_over(folder):
                return False
            time.sleep(HELLO_POLL_S)
        raise StartFailed(f"the supervisor of {folder.name} did not come up: {self._last_words(folder)}")

    def _last_words(self, folder: Path) -> str:
        log = folder / SUPERVISOR_LOG
        logged = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join([f"{log} ends with:", *logged[-8:], self._own_words()])

    def _own_words(self) -> str:
        self._talk.seek(0)
        words = self._talk.read().decode(errors="replace").removeprefix(LOADED)
        return "\n".join(words.splitlines()[-8:])


def _answers(folder: Path) -> bool:
    try:
        asyncio.run(Daemon(folder).hello())
    except PeerUnavailable:
        return False
    return True


def _is_over(folder: Path) -> bool:
    if not (folder / STATE_FILE).exists():
        return False
    try:
        document = read_state(folder)
    except PeerError:
        return False
    return document is not None and document.state in ENDED_RUN_STATES


def _read_json_text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _as_written(document: dict[str, object]) -> str:
    import json

    return json.dumps(document, indent=1) + "\n"
