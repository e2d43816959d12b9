"""`state.json` of a run: the status document for everybody, and below it what a successor of this daemon has to know.

Replaced whole, by one writer, off the event loop; changes that come while a write is under way are written together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import Message, from_line, write_atomically
from grpo_engine.wire.supervisor import RunState, RunStatus, ServiceState
from grpo_tui.paths import KEEPERS, STATE_FILE
from grpo_tui.supervisor.machine import AfterStop, Service

LEDGER_VERSION = 1
log = logging.getLogger(__name__)


class ServiceLedger(Message):
    """One service, as its next supervisor takes it over; times in unix seconds, which outlive a process."""

    state: ServiceState
    attempt: int
    has_process: bool
    was_ready: bool
    since: float
    deadline: float | None
    restarted_at: tuple[float, ...]
    after_stop: AfterStop
    exit_code: int | None
    reason: str | None
    last_lines: tuple[str, ...]
    is_refused: bool
    started_at: float | None
    ready_at: float | None


class Ledger(Message):
    """What a successor needs besides the plan and the keepers."""

    version: int = LEDGER_VERSION
    ending: RunState | None
    """What the run was being ended as; None while it goes on."""
    has_been_up: bool
    services: dict[str, ServiceLedger]


class StateDocument(RunStatus):
    """The content of `state.json`."""

    ledger: Ledger | None = None


def read_state(run_folder: Path) -> StateDocument | None:
    """The state that was written last, or None when none was yet.

    Raises:
        PeerError: the file is damaged, or of a version that this program does not read.
    """
    path = run_folder / STATE_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    document = from_line(StateDocument, content, peer=str(path))
    if document.ledger is not None and document.ledger.version != LEDGER_VERSION:
        raise PeerError(f"{path}: of version {document.ledger.version}, this program reads {LEDGER_VERSION}")
    return document


def last_attempt(run_folder: Path, service: str) -> int:
    """The number of the latest attempt that a keeper was started for; 0 when there was none."""
    folder = run_folder / KEEPERS
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    numbers = [name.removeprefix(f"{service}.").removesuffix(".json") for name in names if name.endswith(".json")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def to_ledger(service: Service, now_s: float, *, started_at: float | None, ready_at: float | None) -> ServiceLedger:
    """Write down where a service stands."""
    to_unix = time.time() - now_s
    return ServiceLedger(
        state=service.state,
        attempt=service.attempt,
        has_process=service.has_process,
        was_ready=service.was_ready,
        since=service.since_s + to_unix,
        deadline=None if service.deadline_s is None else service.deadline_s + to_unix,
        restarted_at=tuple(at + to_unix for at in service.restarted_at_s),
        after_stop=service.after_stop,
        exit_code=service.exit_code,
        reason=service.reason,
        last_lines=service.last_lines,
        is_refused=service.is_refused,
        started_at=started_at,
        ready_at=ready_at,
    )


def from_ledger(name: str, entry: ServiceLedger, now_s: float) -> Service:
    """Take a service over where the predecessor left it."""
    to_monotonic = now_s - time.time()
    return Service(
        name=name,
        state=entry.state,
        attempt=entry.attempt,
        has_process=entry.has_process,
        was_ready=entry.was_ready,
        since_s=entry.since + to_monotonic,
        deadline_s=None if entry.deadline is None else entry.deadline + to_monotonic,
        restarted_at_s=tuple(at + to_monotonic for at in entry.restarted_at),
        after_stop=entry.after_stop,
        exit_code=entry.exit_code,
        reason=entry.reason,
        last_lines=entry.last_lines,
        is_refused=entry.is_refused,
    )


class StateWriter:
    """Writes the document whenever somebody says that it changed."""

    def __init__(self, run_folder: Path, document: Callable[[], StateDocument]) -> None:
        self._path = run_folder / STATE_FILE
        self._document = document
        self._has_changed = asyncio.Event()
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

    async def write(self) -> None:
        """Write now. A full disk or a deleted folder stops no service: it is told, and tried at the next change."""
        self._has_changed.clear()
        content = self._document().model_dump_json(indent=1).encode() + b"\n"
        try:
            await asyncio.to_thread(write_atomically, self._path, content)
        except OSError as error:
            if self._fault is None:
                log.error("%s: cannot be written: %s; services go on", self._path, error.strerror or error)
            self._fault = f"{self._path} cannot be written: {error.strerror or error}"
        else:
            self._fault = None
