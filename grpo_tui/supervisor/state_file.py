"""`state.json` of a run: the status document for everybody, and below it what a successor of this daemon has to know.

Replaced whole, by one writer, off the event loop; changes that come while a write is under way are written together.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import Message, write_atomically
from grpo_engine.wire.supervisor import RunState, RunStatus, ServiceState
from grpo_tui.paths import KEEPERS, STATE_FILE
from grpo_tui.supervisor.machine import AfterStop, Service
from grpo_tui.supervisor.proc import ProcessId

LEDGER_VERSION = 2
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RECOVERY = "while the run lives, the next command to it (start, stop, down) recovers it"
log = logging.getLogger(__name__)


class ServiceLedger(Message):
    """One service, as its next supervisor takes it over; times on the monotonic clock, which no clock jump moves."""

    state: ServiceState
    attempt: int
    num_renewals: int = 0
    is_renewing: bool = False
    has_process: bool
    was_ready: bool
    since_s: float
    deadline_s: float | None
    moved_at_s: float
    restarted_at_s: tuple[float, ...]
    after_stop: AfterStop
    exit_code: int | None
    reason: str | None
    last_lines: tuple[str, ...]
    is_refused: bool
    started_at: float | None
    """Unix time, as everything that is shown."""
    begins_at: int | None = None
    """Where in its log this start begins; None: where its attempt does."""
    ready_at: float | None
    processes: tuple[tuple[int, int], ...]
    """PID and start time of what was seen of it: for the day on which its keeper dies with the daemon."""


class Ledger(Message):
    """What a successor needs besides the plan and the keepers."""

    version: int = LEDGER_VERSION
    boot_id: str
    """Of the boot in which the monotonic clock of this ledger runs."""
    ending: RunState | None
    """What the run was being ended as; None while it goes on."""
    has_been_up: bool
    restarting: tuple[str, ...]
    temporary_folder: Path | None = None
    """Of the run; None where none could be made."""
    services: dict[str, ServiceLedger]


class StateDocument(RunStatus):
    """The content of `state.json`."""

    ledger: Ledger | None = None


def read_state(run_folder: Path) -> StateDocument | None:
    """The state that was written last, or None when none was yet.

    A ledger of another version is left out: the status is readable all the same, and a successor goes by the keepers.

    Raises:
        PeerError: the file is damaged, or cannot be read.
    """
    path = run_folder / STATE_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PeerError(f"{path} cannot be read: {error.strerror}; {RECOVERY}") from None
    version = _ledger_version(content)
    if version not in (None, LEDGER_VERSION):
        log.warning("%s: its ledger is of version %s, this program reads %s", path, version, LEDGER_VERSION)
        content = json.dumps({**json.loads(content), "ledger": None}).encode()
    try:
        return StateDocument.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors(include_input=False)[0]
        words = ": ".join([*(str(part) for part in fault["loc"]), fault["msg"]])
        raise PeerError(f"{path} is damaged ({words}); {RECOVERY}") from None


def _ledger_version(content: bytes) -> object:
    """The version that a state file says its ledger has; None where it says none, or is damaged."""
    try:
        return json.loads(content)["ledger"]["version"]
    except (ValueError, TypeError, KeyError):
        return None


def last_attempt(run_folder: Path, service: str) -> int:
    """The number of the latest attempt that a keeper was started for; 0 when there was none."""
    return _latest_number(run_folder / KEEPERS, service, ".json")


def last_begun_attempt(run_folder: Path, service: str) -> int:
    """The number of the latest attempt for which a keeper was to be started, whether it came to write or not."""
    return _latest_number(run_folder / KEEPERS, service, ".spec.json")


def _latest_number(folder: Path, service: str, ending: str) -> int:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    numbers = [name.removeprefix(f"{service}.").removesuffix(ending) for name in names if name.endswith(ending)]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def to_ledger(
    service: Service,
    *,
    started_at: float | None,
    begins_at: int | None,
    ready_at: float | None,
    processes: Iterable[ProcessId],
) -> ServiceLedger:
    """Write down where a service stands."""
    return ServiceLedger(
        state=service.state,
        attempt=service.attempt,
        num_renewals=service.num_renewals,
        is_renewing=service.is_renewing,
        has_process=service.has_process,
        was_ready=service.was_ready,
        since_s=service.since_s,
        deadline_s=service.deadline_s,
        moved_at_s=service.moved_at_s,
        restarted_at_s=service.restarted_at_s,
        after_stop=service.after_stop,
        exit_code=service.exit_code,
        reason=service.reason,
        last_lines=service.last_lines,
        is_refused=service.is_refused,
        started_at=started_at,
        begins_at=begins_at,
        ready_at=ready_at,
        processes=tuple((process.pid, process.start_ticks) for process in processes),
    )


def from_ledger(name: str, entry: ServiceLedger) -> Service:
    """Take a service over where the predecessor left it."""
    return Service(
        name=name,
        state=entry.state,
        attempt=entry.attempt,
        num_renewals=entry.num_renewals,
        is_renewing=entry.is_renewing,
        has_process=entry.has_process,
        was_ready=entry.was_ready,
        since_s=entry.since_s,
        deadline_s=entry.deadline_s,
        moved_at_s=entry.moved_at_s,
        restarted_at_s=entry.restarted_at_s,
        after_stop=entry.after_stop,
        exit_code=entry.exit_code,
        reason=entry.reason,
        last_lines=entry.last_lines,
        is_refused=entry.is_refused,
    )


@functools.cache
def boot_id() -> str:
    """What names this boot of the machine: with another one, every PID and every monotonic time is void."""
    return BOOT_ID.read_text().strip()


class StateWriter:
    """Writes the document whenever somebody says that it changed."""

    def __init__(self, run_folder: Path, document: Callable[[], StateDocument]) -> None:
        self._path = run_folder / STATE_FILE
        self._document = document
        self._has_changed = asyncio.Event()
        self._one_at_a_time = threading.Lock()
        self._fault: str | None = None

    @property
    def fault(self) -> str | None:
        """Why the last write failed, in words; None when it did not."""
        return self._fault

    def mark(self) -> None:
        """Say that the document changed."""
        self._has_changed.set()

    async def run(self) -> None:
        """Write after every change, until cancelled."""
        while True:
            await self._has_changed.wait()
            await self.write()

    def _replace(self, content: bytes) -> None:
        with self._one_at_a_time:  # a write whose task was cancelled goes on in its thread
            try:
                write_atomically(self._path, content)
            except IsADirectoryError:  # whoever made it may want it back
                self._path.rename(self._path.with_name(f"{STATE_FILE}.{time.time_ns()}.aside"))
                write_atomically(self._path, content)

    async def write(self) -> None:
        """Write now. A full disk or a deleted folder stops no service: it is told, and tried at the next change."""
        self._has_changed.clear()
        content = self._document().model_dump_json(indent=1).encode() + b"\n"
        try:
            await asyncio.to_thread(self._replace, content)
        except OSError as error:
            if self._fault is None:
                log.error("%s: cannot be written: %s; services go on", self._path, error.strerror or error)
            self._fault = f"{self._path} cannot be written: {error.strerror or error}"
        else:
            self._fault = None
