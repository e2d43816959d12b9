"""Reports to the supervisor what a service waits for and which files it cannot write.

Over the supervisor's socket, since a full disk takes neither a file nor a line of a log. A service without a supervisor
reports nothing. One that is being replaced misses a report and gets the next.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.environment_variables import (
    ATTEMPT_VARIABLE,
    REPORTS_VARIABLE,
    RUN_FOLDER_VARIABLE,
    SERVICE_VARIABLE,
)
from grpo_engine.wire.run_folder import ADDRESS_FILE
from grpo_engine.wire.supervisor import (
    REPORT_VALID_S,
    Address,
    DiskSpace,
    MachinesReport,
    RanksReport,
    ServiceReport,
    VersionsInFlight,
    WaitsFor,
    WriteFault,
)
from grpo_engine.wire.unix_peers import require_supervisor

CHECK_EVERY_S = 1.0
SEND_EVERY_S = REPORT_VALID_S / 3
"""While nothing changes."""
SHORT_WAIT_S = 3.0
"""A wait that is no longer is part of the work, and not reported."""
SEND_WITHIN_S = 2.0
FULL_BYTES = 1 << 20
"""With less, hardly anything can be written."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A wait that has begun."""

    what: WaitsFor
    since: float
    """Unix seconds."""


class Reporter:
    """Reports from a thread of its own while it is entered; its methods never block or fail, and are for any thread."""

    def __init__(
        self, send: Callable[[ServiceReport], None] | None = None, *, service: str = "", attempt: int = 0
    ) -> None:
        """
        Args:
            send: takes a report; None: nothing is reported.
        """
        self._send = send
        self._service = service
        self._attempt = attempt
        self._waiting: Waiting | None = None
        self._faults: dict[Path, WriteFault] = {}
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self.ask_waiting: Callable[[], Waiting | None] = lambda: self._waiting
        """Called for each report, in its thread; by default the innermost `waiting_for`."""
        self.ask_note: Callable[[], str | None] = lambda: None
        self.ask_versions: Callable[[], VersionsInFlight | None] = lambda: None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Reporter:
        """A reporter to the supervisor that started this process; a silent one without."""
        folder, service = environment.get(RUN_FOLDER_VARIABLE), environment.get(SERVICE_VARIABLE)
        if not folder or not service:
            return cls()
        attempt = environment.get(ATTEMPT_VARIABLE, "")
        return cls(
            lambda report: send_to_supervisor(Path(folder), report, environment.get(REPORTS_VARIABLE)),
            service=service,
            attempt=int(attempt) if attempt.isdigit() else 0,
        )

    def __enter__(self) -> Reporter:
        if self._send is not None:
            self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()

    @contextmanager
    def waiting_for(self, what: WaitsFor) -> Iterator[None]:
        """Report this wait until the block is left."""
        before, self._waiting = self._waiting, Waiting(what=what, since=time.time())
        try:
            yield
        finally:
            self._waiting = before

    def cannot_write(self, path: Path, error: BaseException, *, effect: str) -> None:
        """Report until `can_write` that a file or folder cannot be written; `effect` as in `WriteFault`."""
        known = self._faults.get(path)
        self._faults[path] = write_fault(path, error, effect=effect, since=known.since if known else time.time())

    def can_write(self, path: Path) -> None:
        """It was written."""
        self._faults.pop(path, None)

    def report(self) -> ServiceReport:
        """The report of this moment."""
        waiting = self.ask_waiting()
        if waiting is not None and time.time() - waiting.since < SHORT_WAIT_S:
            waiting = None
        return ServiceReport(
            service=self._service,
            attempt=self._attempt,
            waits_for=waiting.what if waiting else None,
            waits_since=waiting.since if waiting else None,
            note=self.ask_note(),
            versions=self.ask_versions(),
            write_faults=[
                fault.model_copy(update={"disk": disk_space(path)}) for path, fault in list(self._faults.items())
            ],
        )

    def _run(self) -> None:
        assert self._send is not None
        nothing = sent = ServiceReport(service=self._service, attempt=self._attempt)
        sent_at = time.monotonic()
        while not self._ends.wait(CHECK_EVERY_S):
            try:
                report = self.report()
            except Exception:  # read from another thread while it changes
                log.debug("no report", exc_info=True)
                continue
            if report == sent and (report == nothing or time.monotonic() - sent_at < SEND_EVERY_S):
                continue
            with suppress(OSError, ValueError):
                self._send(report)
                sent, sent_at = report, time.monotonic()


def write_fault(path: Path, error: BaseException, *, effect: str, since: float) -> WriteFault:
    """What is known of a failed write."""
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return WriteFault(path=str(path), error=words, effect=effect, since=since, disk=disk_space(path))


def disk_space(path: Path) -> DiskSpace | None:
    """Space of the file system of a file or folder, or of the nearest folder above it; None where none answers."""
    for folder in (path, *path.parents):
        try:
            space, device = os.statvfs(folder), folder.stat().st_dev
        except OSError:
            continue
        free_blocks = space.f_bfree if os.geteuid() == 0 else space.f_bavail
        free_bytes, total_bytes = free_blocks * space.f_frsize, space.f_blocks * space.f_frsize
        has_no_inodes = space.f_files > 0 and space.f_ffree == 0
        return DiskSpace(
            folder=str(folder if folder.is_dir() else folder.parent),
            device=device,
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            is_full=free_bytes < min(FULL_BYTES, total_bytes) or has_no_inodes,
        )
    return None


def ranks_report(environment: Mapping[str, str]) -> Callable[[RanksReport], None] | None:
    """Sends what a launcher says of its ranks to the supervisor that started it; None without one."""
    folder, service = environment.get(RUN_FOLDER_VARIABLE), environment.get(SERVICE_VARIABLE)
    if not folder or not service:
        return None
    attempt = environment.get(ATTEMPT_VARIABLE, "")
    sender = {"service": service, "attempt": int(attempt) if attempt.isdigit() else 0}
    at = environment.get(REPORTS_VARIABLE)
    return lambda report: send_to_supervisor(Path(folder), report.model_copy(update=sender), at)


def send_to_supervisor(
    run_folder: Path, report: ServiceReport | RanksReport | MachinesReport, at: str | None = None
) -> None:
    """Send one report.

    Args:
        at: the socket of who passes it on, on a machine without the supervisor.

    Raises:
        OSError: no supervisor listens, or another user does in its place.
        ValueError: its address is damaged.
    """
    path = at or Address.model_validate_json((run_folder / ADDRESS_FILE).read_bytes()).socket
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SEND_WITHIN_S)
        connection.connect(path)
        require_supervisor(connection, run_folder)
        connection.sendall(to_line(report))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):  # its greeting; unread, it would reset the connection
            pass
