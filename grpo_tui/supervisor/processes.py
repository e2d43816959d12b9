"""The daemon's hold on keepers: start one, stop it, learn what became of its service, find it again after a crash.

A keeper is told by its identity (pid and start time) and by the state file it writes; see `keeper.py`. Decides nothing:
when to start and whether to restart is up to `core.py`. The environment goes to the keeper in memory, never to disk.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from grpo_engine.errors import GrpoError
from grpo_engine.wire.codec import Message, write_json_atomically
from grpo_tui.paths import KEEPERS
from grpo_tui.supervisor import keeper as keeper_script
from grpo_tui.supervisor.orphans import own_children
from grpo_tui.supervisor.proc import ATTEMPT, RUN, RUN_FOLDER, SERVICE, ProcessId, read_stat, send_signal

if TYPE_CHECKING:
    from grpo_tui.services.base import Launch

KEPT_ATTEMPTS = 20
"""Of a service, besides the first: more than a crash report tells."""
POLL_S = 0.05
"""Between two looks at a keeper where the kernel has no pidfd."""


class ProcessEntry(Message):
    """A process in a state file."""

    pid: int
    start_ticks: int

    def identity(self) -> ProcessId:
        """The same, for comparing with what runs now."""
        return ProcessId(self.pid, self.start_ticks)


class EndedEntry(Message):
    """A process that a keeper had to end, in a state file."""

    pid: int
    comm: str
    how: str

    def words(self) -> str:
        """For a person."""
        return f"pid {self.pid} ({self.comm}) by {self.how}"


class KeeperState(Message):
    """A keeper's state file; written by `keeper.py`, read here."""

    service: str
    attempt: int
    state: str
    """`running`, `exited` (its main process has ended, the rest is being ended) or `gone` (nothing is left)."""
    keeper: ProcessEntry
    main: ProcessEntry | None
    started_at: float
    ended_at: float | None
    exit_code: int | None
    error: str | None
    log_offset: int
    ended: tuple[EndedEntry, ...]
    unkillable: tuple[EndedEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReport:
    """How an attempt ended."""

    code: int | None
    """Exit code of its main process, negative for a signal; None when nobody saw it."""
    ended_at: float
    ended: tuple[str, ...] = ()
    """Processes that had to be ended, in words."""
    error: str | None = None
    """Why it could not be started or followed, in words."""
    unkillable: tuple[str, ...] = ()
    """Processes that SIGKILL did not end within seconds, in words."""
    log_offset: int | None = None
    """Where in the log the attempt begins; None when nobody knows."""
    keeper_lost: bool = False
    """Whether the keeper did not live to the end: processes may be left, and `teardown.sweep` must look for them."""


class Keeper:
    """A keeper that runs, started by this process or by an earlier daemon."""

    def __init__(self, state: KeeperState, state_file: Path, reaping: asyncio.Task[None] | None = None) -> None:
        self.identity = state.keeper.identity()
        self.service = state.service
        self.attempt = state.attempt
        self.main_pid = state.main.pid if state.main else None
        self.started_at = state.started_at
        self.log_offset = state.log_offset
        """Bytes of the log that earlier attempts and the opening line take up."""
        self._state = state
        self._state_file = state_file
        self._reaping = reaping
        """Buries the keeper if it is a child of this process, also when nobody asks for its end."""
        self._end: asyncio.Task[ExitReport] | None = None

    async def exited(self) -> ExitReport:
        """Wait until the keeper has ended, and with it everything of its service; any number may wait."""
        if self._end is None:
            self._end = asyncio.create_task(self._follow(), name=f"keeper of {self.service}")
        return await asyncio.shield(self._end)

    def stop(self) -> None:
        """Ask for a polite stop: stop signal, grace, SIGKILL. Returns at once; nothing happens when it is gone."""
        _send(self.identity, keeper_script.STOP)

    def kill(self) -> None:
        """Ask for SIGKILL to all of the service now. Returns at once; nothing happens when it is gone."""
        _send(self.identity, keeper_script.KILL_NOW[-1])

    def tell_service(self, number: signal.Signals) -> None:
        """Send a signal to the service's main process alone. Returns at once; nothing happens when it is gone."""
        if self._state.main is not None:
            _send(self._state.main.identity(), number)

    def write_state(self) -> None:
        """Write its state file again, as it was when the service started: somebody deleted it."""
        write_json_atomically(self._state_file, self._state)

    async def _follow(self) -> ExitReport:
        await (_reap(self.identity) if self._reaping is None else asyncio.shield(self._reaping))
        try:
            state = _read_state(self._state_file)
        except OSError:
            state = None
        return _report(state, self._state_file)


async def start_keeper(launch: Launch, *, run: str, attempt: int, run_folder: Path) -> Keeper:
    """Start a keeper for one attempt of a service; return once it has started the service, or failed to.

    A program that cannot be executed is not an error here: `exited` tells it, with the exit code a shell would give.

    Raises:
        GrpoError: no keeper could be started: disk full, folder gone, too many processes.
    """
    spec = _spec(launch, attempt, run_folder)
    report, report_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        pid = _spawn(spec, _environment(launch, run, attempt, run_folder), report_write)
    except (OSError, ValueError) as error:
        os.close(report)
        raise GrpoError(f"no keeper could be started in {run_folder}: {error}; check disk and process limits") from None
    finally:
        os.close(report_write)
    try:
        content = await _read_to_end(report)
    except asyncio.CancelledError:
        os.kill(pid, keeper_script.KILL_NOW[-1])  # our child and not reaped: the pid is still its own
        raise
    finally:
        os.close(report)
        stat = read_stat(pid)
        assert stat is not None, "a child that is not reaped is in /proc"
        reaping = asyncio.create_task(
            _reap(ProcessId(pid, stat.start_ticks)), name=f"reaping the keeper of {launch.name}"
        )
    if not content:
        await reaping
        raise GrpoError(f"{launch.name}: its keeper ended before it started anything; it says why in {spec.log}")
    return Keeper(KeeperState.model_validate_json(content), Path(spec.state), reaping)


def adopt_keeper(run_folder: Path, service: str, attempt: int) -> Keeper | ExitReport | None:
    """Find an attempt that an earlier daemon started: still kept, ended meanwhile, or None when there was none."""
    state_file = run_folder.resolve() / KEEPERS / f"{service}.{attempt}.json"
    if not state_file.exists():
        return None
    state = _read_state(state_file)
    if state is not None and state.state != "gone" and state.keeper.identity().is_alive():
        return Keeper(state, state_file)
    return _report(state, state_file)


def living_keepers(folder: Path) -> Iterator[KeeperState]:
    """Keepers of a run that live."""
    for state in keeper_states(folder):
        if state.state != "gone" and state.keeper.identity().is_alive():
            yield state


def keeper_states(folder: Path) -> Iterator[KeeperState]:
    """What the keepers of a run wrote, living or not."""
    for path in (folder / KEEPERS).glob("*.json"):
        if path.name.endswith(".spec.json"):
            continue
        try:
            yield KeeperState.model_validate_json(path.read_bytes())
        except (ValidationError, OSError):
            continue  # being written, or damaged: the daemon that takes over says so


def _spec(launch: Launch, attempt: int, run_folder: Path) -> keeper_script.Spec:
    """What the keeper is told; every path absolute, since it has a working directory of its own."""
    folder = run_folder.resolve()
    return keeper_script.Spec(
        service=launch.name,
        attempt=attempt,
        argv=list(launch.argv),
        cwd=str(launch.cwd),
        log=str(folder / f"{launch.name}.log"),
        state=str(folder / KEEPERS / f"{launch.name}.{attempt}.json"),
        stop_signal=launch.stop_signal,
        grace_s=launch.stop_grace_s,
        cpus=None if launch.cpus is None else list(launch.cpus),
        nice=launch.nice,
    )


def _environment(launch: Launch, run: str, attempt: int, run_folder: Path) -> dict[str, str]:
    """Ours, then the service's, then the marks by which its processes are found again."""
    marks = {RUN: run, SERVICE: launch.name, ATTEMPT: str(attempt), RUN_FOLDER: str(run_folder.resolve())}
    # setproctitle, by which vLLM names its engine, would write over the environment, and with it over the marks.
    return {**os.environ, "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1", **launch.env, **marks}


def _spawn(spec: keeper_script.Spec, environment: dict[str, str], report: int) -> int:
    """Write the spec and start the keeper with its report on stdout and its own troubles in the service's log."""
    spec_file = Path(spec.state).with_suffix(".spec.json")
    spec_file.parent.mkdir(exist_ok=True)
    Path(spec.state).unlink(missing_ok=True)
    spec_file.write_text(json.dumps(spec._asdict()))
    if spec.attempt - KEPT_ATTEMPTS > 1:  # the first one tells how it began
        forget_attempt(spec_file.parent, spec.service, spec.attempt - KEPT_ATTEMPTS)
    log = os.open(spec.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with own_children() as children:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", keeper_script.__file__, str(spec_file)],
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, report, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
                setsid=True,
                setsigmask=[],
                setsigdef=[keeper_script.STOP, *keeper_script.KILL_NOW],
            )
            children.add(pid)
        return pid
    finally:
        os.close(log)


def forget_attempt(folder: Path, service: str, attempt: int) -> None:
    """Remove what is kept of an attempt that has ended, so that the folder does not fill up."""
    for ending in ("json", "spec.json", "metrics"):
        with suppress(OSError):
            (folder / f"{service}.{attempt}.{ending}").unlink()


def _read_state(state_file: Path) -> KeeperState | None:
    """Read a state file; None when it is gone or damaged, which its caller takes as a lost keeper."""
    try:
        return KeeperState.model_validate_json(state_file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _report(state: KeeperState | None, state_file: Path) -> ExitReport:
    """What the last state file of a keeper that is no more says about its service."""
    if state is None:
        error = f"{state_file} is missing or damaged: nobody knows how this attempt ended"
        return ExitReport(code=None, ended_at=time.time(), error=error, keeper_lost=True)
    is_lost = state.state != "gone"
    return ExitReport(
        code=state.exit_code,
        log_offset=state.log_offset,
        ended_at=state.ended_at or time.time(),
        ended=tuple(entry.words() for entry in state.ended),
        error="its keeper was killed: nobody saw how it ended" if is_lost else state.error,
        unkillable=tuple(entry.words() for entry in state.unkillable),
        keeper_lost=is_lost,
    )


def _send(process: ProcessId, number: signal.Signals) -> None:
    stat = read_stat(process.pid)
    if stat is not None and stat.start_ticks == process.start_ticks:
        send_signal(stat, number)
        send_signal(stat, signal.SIGCONT)  # a suspended process hears nothing before it goes on


async def end_of(process: ProcessId) -> None:
    """Wait until a process has ended, child or not."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except OSError:  # no pidfd in this kernel, or no descriptor left
        while process.is_alive():  # noqa: ASYNC110 - nothing tells us when a stranger's process ends
            await asyncio.sleep(POLL_S)
        return
    try:
        if process.is_alive():  # asked after the handle was taken, so it is the handle of this very process
            await _readable(handle)
    finally:
        os.close(handle)


async def _reap(process: ProcessId) -> None:
    """Wait for a process, and bury it if it is a child of ours."""
    await end_of(process)
    with suppress(ChildProcessError), own_children() as children:
        os.waitpid(process.pid, os.WNOHANG)  # noqa: ASYNC222 - returns at once
        children.discard(process.pid)


async def _readable(descriptor: int) -> None:
    """Wait until there is something to read, an end included."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _resolve(ready: asyncio.Future[None]) -> None:
    """Settle a future once: a descriptor may be readable twice before its waiter wakes."""
    if not ready.done():
        ready.set_result(None)


async def _read_to_end(descriptor: int) -> bytes:
    """Everything that comes out of a pipe until its writers have closed it."""
    content = b""
    while True:
        await _readable(descriptor)
        part = os.read(descriptor, 65536)
        if not part:
            return content
        content += part
