"""Keepers as the supervisor handles them: start one, stop it, learn how its attempt ended, find it after a crash.

A keeper is known by its identity (pid and start time) and by the state file that it writes; see
`grpo_tui/keeper_process.py`. When to start and whether to restart is decided in `core.py`. The environment is handed to
the keeper in memory, never on disk.
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
from grpo_engine.python_command import without_empty_entries
from grpo_engine.wire.codec import Message, Pid, Ticks, Time, Whole, write_json_atomically
from grpo_engine.wire.environment_variables import (
    ATTEMPT_VARIABLE,
    GATE_VARIABLE,
    RUN_FOLDER_VARIABLE,
    RUN_VARIABLE,
    SERVICE_VARIABLE,
    TOKEN_FILE_VARIABLE,
)
from grpo_engine.wire.run_folder import (
    TOKEN_FILE,
    console_offset_file,
    keeper_spec_file,
    keeper_state_file,
    keeper_state_files,
    service_log,
)
from grpo_engine.wire.secrets import masked_argv
from grpo_tui import keeper_process
from grpo_tui.paths import is_own
from grpo_tui.run_files.whole_file import read_whole
from grpo_tui.supervisor.keeper.orphans import own_children
from grpo_tui.supervisor.keeper.proc import ProcessId, marker, read_stat, send_signal

if TYPE_CHECKING:
    from grpo_tui.services.base import Launch

KEPT_ATTEMPTS = 20
"""Of a service, besides the first: more than a crash report lists."""
POLL_S = 0.05
"""Between two looks at a keeper where the kernel has no pidfd."""


class ProcessEntry(Message):
    """A process in a state file."""

    pid: Pid
    start_ticks: Ticks

    def identity(self) -> ProcessId:
        """The same, to compare with running processes."""
        return ProcessId(self.pid, self.start_ticks)


class EndedEntry(Message):
    """A process that a keeper had to terminate, in a state file."""

    pid: Pid
    comm: str
    how: str

    def words(self) -> str:
        """As messages show it."""
        return f"pid {self.pid} ({self.comm}) by {self.how}"


class KeeperState(Message):
    """A keeper's state file; written by `keeper_process.py`, read here."""

    service: str
    attempt: Whole
    state: str
    """`held` (started held, and its gate is closed), `running`, `exited` (the main process has exited, the rest is
    being ended) or `gone` (no process is left)."""
    keeper: ProcessEntry
    main: ProcessEntry | None
    started_at: Time
    ended_at: Time | None
    exit_code: Whole | None
    error: str | None
    log_offset: Whole
    ended: tuple[EndedEntry, ...]
    unkillable: tuple[EndedEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReport:
    """How an attempt ended."""

    code: int | None
    """Exit code of its main process, negative for a signal; None when it is unknown."""
    ended_at: float
    ended: tuple[str, ...] = ()
    """Processes that had to be terminated, for messages."""
    error: str | None = None
    """Why it could not be started or followed."""
    unkillable: tuple[str, ...] = ()
    """Processes still alive seconds after SIGKILL, for messages."""
    log_offset: int | None = None
    """Where in the log the attempt begins; None when it is unknown."""
    keeper_lost: bool = False
    """Whether the keeper was killed: processes may be left, which `teardown.sweep` must find."""


class Keeper:
    """A running keeper, started by this process or by an earlier supervisor."""

    def __init__(self, state: KeeperState, state_file: Path, reaping: asyncio.Task[None] | None = None) -> None:
        self.identity = state.keeper.identity()
        self.service = state.service
        self.attempt = state.attempt
        self.main_pid = state.main.pid if state.main else None
        self.started_at = state.started_at
        self.log_offset = state.log_offset
        """Absolute offset in the log behind the line that opens the attempt."""
        self.is_held = state.state == "held"
        """Whether its service waits for `open_gate`, as far as this process knows."""
        self._state = state
        self._state_file = state_file
        self._reaping = reaping
        """Reaps the keeper if it is a child of this process, whether `exited` is awaited or not."""
        self._end: asyncio.Task[ExitReport] | None = None

    async def exited(self) -> ExitReport:
        """Wait until the keeper has exited, and with it all processes of its service; several tasks may wait."""
        if self._end is None:
            self._end = asyncio.create_task(self._follow(), name=f"keeper of {self.service}")
        return await asyncio.shield(self._end)

    def stop(self) -> None:
        """Request a stop: stop signal, grace period, SIGKILL. Returns at once; does nothing when the keeper is gone."""
        _send(self.identity, keeper_process.STOP)

    def kill(self) -> None:
        """Request SIGKILL to all processes of the service. Returns at once; does nothing when the keeper is gone."""
        _send(self.identity, keeper_process.KILL_NOW[-1])

    def open_gate(self) -> None:
        """Let a service that was started held begin. Returns at once; does nothing when it has begun."""
        self.is_held = False
        self._state = self._state.model_copy(update={"state": "running"})
        _send(self.identity, keeper_process.OPEN_GATE)

    def signal_service(self, number: signal.Signals) -> None:
        """Send a signal to the service's main process only. Returns at once; does nothing when it is gone."""
        if self._state.main is not None:
            _send(self._state.main.identity(), number)

    def write_state(self) -> None:
        """Write its state file again, as it was when the service started, after it was deleted."""
        write_json_atomically(self._state_file, self._state)

    async def _follow(self) -> ExitReport:
        await (_reap(self.identity) if self._reaping is None else asyncio.shield(self._reaping))
        try:
            state = _read_state(self._state_file)
        except OSError:
            state = None
        return _report(state, self._state_file)


async def start_keeper(
    launch: Launch, *, run: str, attempt: int, run_folder: Path, files: Path | None = None, is_held: bool = False
) -> Keeper:
    """Start a keeper for one attempt of a service; return once it has started the service, or failed to.

    A program that cannot be executed is no error here: `exited` reports it, with the exit code that a shell would give.

    Args:
        files: where its log and the files of its keeper are; None: in the run folder.
        is_held: whether the service prepares and then waits for `Keeper.open_gate`.

    Raises:
        GrpoError: no keeper could be started: disk full, folder gone, too many processes.
    """
    spec = _spec(launch, attempt, files or run_folder)
    if is_held:
        spec = spec._replace(gate_variable=GATE_VARIABLE)
    report, report_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        pid = _spawn(spec, _environment(launch, run, attempt, run_folder), report_write)
    except (OSError, ValueError) as error:
        os.close(report)
        raise GrpoError(
            f"no keeper could be started in {files or run_folder}: {error}; check disk and process limits"
        ) from None
    finally:
        os.close(report_write)
    try:
        content = await _read_to_end(report)
    except asyncio.CancelledError:
        os.kill(pid, keeper_process.KILL_NOW[-1])  # our child and not reaped: the pid is still its own
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
        raise GrpoError(f"{launch.name}: its keeper exited before it started the service; see {spec.log}")
    return Keeper(KeeperState.model_validate_json(content), Path(spec.state), reaping)


def adopt_keeper(run_folder: Path, service: str, attempt: int) -> Keeper | ExitReport | None:
    """Find an attempt that an earlier supervisor started: its keeper, its exit report, or None when there was none."""
    state_file = keeper_state_file(run_folder.resolve(), service, attempt)
    if not state_file.exists():
        return None
    state = _read_state(state_file)
    if state is not None and state.state != "gone" and state.keeper.identity().is_alive():
        return Keeper(state, state_file)
    return _report(state, state_file)


def living_keepers(folder: Path) -> Iterator[KeeperState]:
    """The keepers of a run that are alive: processes of this user that were started for this very folder.

    A state file alone proves nothing: in a folder that somebody sent it may name any process of this machine.
    """
    for state in keeper_states(folder):
        if state.state != "gone" and state.keeper.identity().is_alive():
            mark = marker(state.keeper.pid)
            if mark is not None and mark.run_folder == str(folder.resolve()):
                yield state


def keeper_states(folder: Path) -> Iterator[KeeperState]:
    """The state files of a run's keepers, alive or not."""
    for path in keeper_state_files(folder):
        try:
            yield KeeperState.model_validate_json(read_whole(path))
        except (ValidationError, OSError):
            continue  # being written, or damaged: a supervisor that takes over reports it


def _spec(launch: Launch, attempt: int, run_folder: Path) -> keeper_process.Spec:
    """The keeper's spec; every path is absolute, since the service has its own working directory."""
    folder = run_folder.resolve()
    return keeper_process.Spec(
        service=launch.name,
        attempt=attempt,
        argv=list(launch.argv),
        cwd=str(launch.cwd),
        log=str(service_log(folder, launch.name)),
        state=str(keeper_state_file(folder, launch.name, attempt)),
        stop_signal=launch.stop_signal,
        grace_s=launch.stop_grace_s,
        leftover_grace_s=keeper_process.LEFTOVER_GRACE_ON_GPU_S if launch.gpus else keeper_process.LEFTOVER_GRACE_S,
        cpus=None if launch.cpus is None else list(launch.cpus),
        nice=launch.nice,
        shown_argv=masked_argv(launch.argv),
    )


def _environment(launch: Launch, run: str, attempt: int, run_folder: Path) -> dict[str, str]:
    """The run's token, the supervisor's environment, the service's, and the marker by which its processes are found;
    the later ones win. Its working directory is searched only where it is named: others may write there."""
    marks = {
        RUN_VARIABLE: run,
        SERVICE_VARIABLE: launch.name,
        ATTEMPT_VARIABLE: str(attempt),
        RUN_FOLDER_VARIABLE: str(run_folder.resolve()),
    }
    # setproctitle, which vLLM calls, would overwrite the environment in /proc, and with it the marker.
    own = {"PYTHONUNBUFFERED": "1", "SPT_NOENV": "1"}
    token = run_folder.resolve() / TOKEN_FILE
    # A run of an earlier version has none; a person may have set another.
    found = {TOKEN_FILE_VARIABLE: str(token)} if token.exists() else {}
    environment = without_empty_entries({**found, **os.environ, **own, **launch.env, **marks})
    environment.pop(GATE_VARIABLE, None)  # of a service in which this supervisor was started
    return environment


def _spawn(spec: keeper_process.Spec, environment: dict[str, str], report: int) -> int:
    """Write the spec and start the keeper, with the spec on stdin, its report on stdout and its own errors in the
    service's log.

    Raises:
        OSError: the disk is full, or another user has put a folder in the place of the run's.
    """
    run_folder = Path(spec.log).parent
    spec_file = keeper_spec_file(run_folder, spec.service, spec.attempt)
    os.close(_open_own_folder(run_folder))
    spec_file.parent.mkdir(mode=0o700, exist_ok=True)
    folder = _open_own_folder(spec_file.parent)
    try:
        Path(spec.state).unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        written = os.open(spec_file.name, flags, 0o600, dir_fd=folder)  # argv may hold secrets
    finally:
        os.close(folder)
    try:
        keeper_process.write_all(written, json.dumps(spec._asdict()).encode())
        os.lseek(written, 0, os.SEEK_SET)
        return _spawn_on(written, spec_file, spec, environment, report)
    finally:
        os.close(written)


def _open_own_folder(folder: Path) -> int:
    """A descriptor of a folder of ours; where others may write to the folder above, its name may lead to another one.

    Raises:
        PermissionError: it is a link, or others own it or may write to it, and so would choose what is run.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise PermissionError(f"{folder} is no folder now: somebody has replaced it") from None
    if is_own(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{folder} is another user's now, or others may write to it: somebody has replaced it")


def _spawn_on(
    written: int, spec_file: Path, spec: keeper_process.Spec, environment: dict[str, str], report: int
) -> int:
    """Start the keeper of a spec that is open as `written`."""
    run_folder = Path(spec.log).parent
    if spec.attempt - KEPT_ATTEMPTS > 1:  # the first attempt is kept
        forget_attempt(run_folder, spec.service, spec.attempt - KEPT_ATTEMPTS)
    log = os.open(spec.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with own_children() as children:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", keeper_process.__file__, str(spec_file)],
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, written, 0),
                    (os.POSIX_SPAWN_DUP2, report, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
                setsid=True,
                setsigmask=[],
                setsigdef=[keeper_process.STOP, *keeper_process.KILL_NOW],
            )
            children.add(pid)
        return pid
    finally:
        os.close(log)


def forget_attempt(run_folder: Path, service: str, attempt: int) -> None:
    """Remove the files of an attempt that has ended, so that the folder does not fill up."""
    for file in (keeper_state_file, keeper_spec_file, console_offset_file):
        with suppress(OSError):
            file(run_folder, service, attempt).unlink()


def _read_state(state_file: Path) -> KeeperState | None:
    """Read a state file; None when it is missing or damaged, as of a lost keeper."""
    try:
        return KeeperState.model_validate_json(read_whole(state_file))
    except (FileNotFoundError, ValidationError):
        return None


def _report(state: KeeperState | None, state_file: Path) -> ExitReport:
    """How an attempt ended, by the state file of its keeper, which has exited."""
    if state is None:
        error = f"{state_file} is missing or damaged: how this attempt ended is unknown"
        return ExitReport(code=None, ended_at=time.time(), error=error, keeper_lost=True)
    is_lost = state.state != "gone"
    return ExitReport(
        code=state.exit_code,
        log_offset=state.log_offset,
        ended_at=state.ended_at or time.time(),
        ended=tuple(entry.words() for entry in state.ended),
        error="its keeper was killed: how it ended is unknown" if is_lost else state.error,
        unkillable=tuple(entry.words() for entry in state.unkillable),
        keeper_lost=is_lost,
    )


def _send(process: ProcessId, number: signal.Signals) -> None:
    stat = read_stat(process.pid)
    if stat is not None and stat.start_ticks == process.start_ticks:
        send_signal(stat, number)
        send_signal(stat, signal.SIGCONT)  # a suspended process gets no signal before SIGCONT


async def end_of(process: ProcessId) -> None:
    """Wait until a process has exited, child or not."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except OSError:  # no pidfd in this kernel, or no descriptor left
        while process.is_alive():  # noqa: ASYNC110 - there is no event for the exit of a process that is no child
            await asyncio.sleep(POLL_S)
        return
    try:
        if process.is_alive():  # checked after the handle was opened, so it is the handle of this very process
            await _readable(handle)
    finally:
        os.close(handle)


async def _reap(process: ProcessId) -> None:
    """Wait for a process, and reap it if it is a child of ours."""
    await end_of(process)
    with suppress(ChildProcessError), own_children() as children:
        os.waitpid(process.pid, os.WNOHANG)  # noqa: ASYNC222 - returns at once
        children.discard(process.pid)


async def _readable(descriptor: int) -> None:
    """Wait until there is something to read, or the end."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _resolve(ready: asyncio.Future[None]) -> None:
    """Resolve a future once: a descriptor may be readable twice before its waiter wakes."""
    if not ready.done():
        ready.set_result(None)


async def _read_to_end(descriptor: int) -> bytes:
    """The content of a pipe until its writers have closed it."""
    content = b""
    while True:
        await _readable(descriptor)
        part = os.read(descriptor, 65536)
        if not part:
            return content
        content += part
