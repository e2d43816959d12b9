"""`state.json` of a run: the status document, and the ledger from which the next supervisor takes the run over.

Replaced whole, by one writer, off the event loop; changes during a write are written together after it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import FiniteFloat, ValidationError

from grpo_engine.errors import PeerError
from grpo_engine.serving.reporting import write_fault
from grpo_engine.wire.codec import Message, Pid, Ticks, Time, Whole, write_atomically
from grpo_engine.wire.run_folder import STATE_FILE
from grpo_engine.wire.supervisor import Refusal, RunState, RunStatus, ServiceState, WriteFault
from grpo_engine.wire.terminal_text import printable
from grpo_tui.run_files.whole_file import read_whole
from grpo_tui.supervisor.keeper.proc import ProcessId
from grpo_tui.supervisor.machine import AfterStop, Service

LEDGER_VERSION = 2
MAX_OBJECTS = 65_536
"""In the file; that of 4096 services, or of a thousand machines with eight GPUs each, has less. A screen looks through
all several times a second."""
MAX_BYTES = 16 << 20
"""Twice that of 4096 services: `ps` reads the states of all runs, at 7 MB a second."""
MAX_VALUES = 1_048_576
"""In the file, by its commas: those of that many objects. A list of ten million ports took `ps` 70 s and 1.6 GB."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RECOVERY = "while the run lives, the next command to it (start, stop, down) writes it again"
NOT_STATED = "the state is written again at the next change"
log = logging.getLogger(__name__)


class ServiceLedger(Message):
    """The state of one service; times are on the monotonic clock, which is not affected by clock changes."""

    state: ServiceState
    attempt: Whole
    num_renewals: Whole = 0
    """Restarts in place."""
    is_renewing: bool = False
    """Whether a restart in place is in progress."""
    has_process: bool
    is_held: bool = False
    is_prepared: bool = False
    was_ready: bool
    since_s: FiniteFloat
    deadline_s: FiniteFloat | None
    moved_at_s: FiniteFloat
    """When its start-up last made progress."""
    restarted_at_s: tuple[FiniteFloat, ...]
    after_stop: AfterStop
    exit_code: Whole | None
    oom_kills: Whole | None = None
    reason: str | None
    last_lines: tuple[str, ...]
    is_refused: bool
    refusals: tuple[Refusal, ...] = ()
    started_at: Time | None
    """Unix time, as in the status document."""
    begins_at: Whole | None = None
    """Offset in its log where this start begins; None: where its attempt begins."""
    prepared_at: Time | None = None
    begun_at: Time | None = None
    ready_at: Time | None
    is_restart_pending: bool = False
    was_asked_to_restart: bool = False
    processes: tuple[tuple[Pid, Ticks], ...]
    """PID and start time of every process seen of it, needed if its keeper dies together with the supervisor."""


@dataclass(slots=True)
class StartTimes:
    """Unix times of the latest start of a service; None: not yet, or not in this start."""

    prepared_at: float | None = None
    """It had done what it can before its turn."""
    begun_at: float | None = None
    """Its turn had come, and its process ran."""
    ready_at: float | None = None


class Ledger(Message):
    """What the next supervisor needs besides the plan and the files of the keepers."""

    version: int = LEDGER_VERSION
    boot_id: str
    """Identifies the boot whose monotonic clock this ledger uses."""
    ending: RunState | None
    """The state in which the run is being ended; None while it is not."""
    has_been_up: bool
    restarting: tuple[str, ...] = ()
    """Services with a pending restart; written by earlier versions, now `ServiceLedger.is_restart_pending`."""
    temporary_folder: Path | None = None
    """None where none could be made."""
    services: dict[str, ServiceLedger]


class StateDocument(RunStatus):
    """The content of `state.json`."""

    ledger: Ledger | None = None


def read_state(run_folder: Path) -> StateDocument | None:
    """The state that was written last, or None when none was written yet.

    A ledger of another version is left out: the status stays readable, and the next supervisor uses the keepers' files.

    Raises:
        PeerError: the file is damaged, or cannot be read.
    """
    path = run_folder / STATE_FILE
    try:
        content = read_whole(path, max_bytes=MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PeerError(f"{path} cannot be read: {error.strerror}; {RECOVERY}") from None
    if content.count(b"{") > MAX_OBJECTS:
        raise PeerError(f"{path} is damaged (more than {MAX_OBJECTS:,} objects); {RECOVERY}")
    if content.count(b",") > MAX_VALUES:
        raise PeerError(f"{path} is damaged (more than {MAX_VALUES:,} values); {RECOVERY}")
    version = _ledger_version(content)
    if version not in (None, LEDGER_VERSION):
        words = version if isinstance(version, int) else "no number"
        text = f"{path}: its ledger is of version {words}, this program reads {LEDGER_VERSION}"
        log.warning("%s", printable(text))  # of a command it goes to the terminal
        content = json.dumps({**json.loads(content), "ledger": None}).encode()
    try:
        return StateDocument.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors(include_input=False)[0]
        words = ": ".join([*(str(part) for part in fault["loc"]), fault["msg"]])
        raise PeerError(f"{path} is damaged ({words}); {RECOVERY}") from None


def _ledger_version(content: bytes) -> object:
    """The version of the ledger in a state file; None where there is none, or the file is damaged."""
    try:
        return json.loads(content)["ledger"]["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def to_ledger(
    service: Service,
    *,
    started_at: float | None,
    begins_at: Whole | None,
    times: StartTimes,
    processes: Iterable[ProcessId],
) -> ServiceLedger:
    """The ledger entry of a service."""
    return ServiceLedger(
        state=service.state,
        attempt=service.attempt,
        num_renewals=service.num_in_place_restarts,
        is_renewing=service.is_restarting_in_place,
        has_process=service.has_process,
        is_held=service.is_held,
        is_prepared=service.is_prepared,
        was_ready=service.was_ready,
        since_s=service.since_s,
        deadline_s=service.deadline_s,
        moved_at_s=service.progressed_at_s,
        restarted_at_s=service.restarted_at_s,
        after_stop=service.after_stop,
        exit_code=service.exit_code,
        oom_kills=service.oom_kills,
        reason=service.reason,
        last_lines=service.last_lines,
        is_refused=service.is_refused,
        refusals=service.refusals,
        is_restart_pending=service.is_restart_pending,
        was_asked_to_restart=service.was_asked_to_restart,
        started_at=started_at,
        begins_at=begins_at,
        prepared_at=times.prepared_at,
        begun_at=times.begun_at,
        ready_at=times.ready_at,
        processes=tuple((process.pid, process.start_ticks) for process in processes),
    )


def from_ledger(name: str, entry: ServiceLedger) -> Service:
    """A service in the state that its ledger entry describes."""
    return Service(
        name=name,
        state=entry.state,
        attempt=entry.attempt,
        num_in_place_restarts=entry.num_renewals,
        is_restarting_in_place=entry.is_renewing,
        has_process=entry.has_process,
        is_held=entry.is_held,
        is_prepared=entry.is_prepared,
        was_ready=entry.was_ready,
        since_s=entry.since_s,
        deadline_s=entry.deadline_s,
        progressed_at_s=entry.moved_at_s,
        restarted_at_s=entry.restarted_at_s,
        after_stop=entry.after_stop,
        exit_code=entry.exit_code,
        oom_kills=entry.oom_kills,
        reason=entry.reason,
        last_lines=entry.last_lines,
        is_refused=entry.is_refused,
        refusals=entry.refusals,
        is_restart_pending=entry.is_restart_pending,
        was_asked_to_restart=entry.was_asked_to_restart,
    )


@functools.cache
def boot_id() -> str:
    """Identifies this boot of the machine: after a reboot, PIDs and monotonic times of a ledger are invalid."""
    return BOOT_ID.read_text().strip()


class StateWriter:
    """Writes the document after every change."""

    def __init__(self, run_folder: Path, document: Callable[[], StateDocument]) -> None:
        self._path = run_folder / STATE_FILE
        self._document = document
        self._has_changed = asyncio.Event()
        self._one_at_a_time = threading.Lock()
        self._fault: WriteFault | None = None

    @property
    def faults(self) -> list[WriteFault]:
        """Why the last write failed; empty when it did not."""
        return [] if self._fault is None else [self._fault]

    def mark(self) -> None:
        """Have the document written soon."""
        self._has_changed.set()

    async def run(self) -> None:
        """Write after every change, until cancelled."""
        while True:
            await self._has_changed.wait()
            await self.write()

    def _replace(self, content: bytes) -> None:
        with self._one_at_a_time:  # a write whose task was cancelled continues in its thread
            try:
                write_atomically(self._path, content)
            except IsADirectoryError:  # renamed, not removed: somebody made it
                self._path.rename(self._path.with_name(f"{STATE_FILE}.{time.time_ns()}.aside"))
                write_atomically(self._path, content)

    async def write(self) -> None:
        """Write now. A full disk or a deleted folder stops no service: it is reported, and tried at the next change."""
        self._has_changed.clear()
        content = self._document().model_dump_json(indent=1).encode() + b"\n"
        try:
            await asyncio.to_thread(self._replace, content)
        except OSError as error:
            if self._fault is None:
                log.error("%s: cannot be written: %s; services keep running", self._path, error.strerror or error)
            since = time.time() if self._fault is None else self._fault.since
            self._fault = await asyncio.to_thread(write_fault, self._path, error, effect=NOT_STATED, since=since)
        else:
            self._fault = None
