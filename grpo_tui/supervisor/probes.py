"""Readiness and liveness probes: HTTP status, open port, line in the log, existing file, exit code of a command.

One `Prober` runs one probe of one attempt, and remembers how far the log was read. `service_runner.py` decides when,
`machine.py` what follows. A service that does not answer is an `Answer`, not an exception.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from grpo_engine.wire.supervisor import ProbeOutcome
from grpo_engine.wire.tcp_sockets import stranger_behind, who_has
from grpo_engine.wire.terminal_text import printable
from grpo_tui.run_files.log_file import place, read_part, searched_lines
from grpo_tui.services.base import Probe, pattern_words
from grpo_tui.supervisor.keeper.client import end_of
from grpo_tui.supervisor.keeper.orphans import own_children
from grpo_tui.supervisor.keeper.proc import identify

MAX_LOG_PART_BYTES = 4 * 1024 * 1024
"""Searched at a time."""
STATUS_LINE = re.compile(rb"HTTP/\d(?:\.\d)? (\d{3})\b")
MAX_BODY_BYTES = 4096
BODY_WITHIN_S = 1.0
"""For the body, which only explains a status that is known already."""
MAX_REASON_CHARS = 300
COMMAND_END_LIMIT_S = 0.5
"""For a command to exit after SIGKILL; one that hangs in the kernel, as `nvidia-smi` may, is left behind."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a probe."""

    kind: ProbeOutcome
    words: str
    """For people: `/health answers 503: the model is loading`, `port 9000 is closed`, `no answer in 5 s`."""

    @property
    def passed(self) -> bool:
        """Whether the probe succeeded."""
        return self.kind is ProbeOutcome.PASSED

    @classmethod
    def to_yes_or_no(cls, is_yes: bool, words: str) -> Answer:
        """The answer of a probe that can only pass or not pass yet."""
        return cls(ProbeOutcome.PASSED if is_yes else ProbeOutcome.NOT_YET, words)


class ForeignListener(Exception):
    """A process of another user listens on a port of the service; says which."""


async def ask(
    probe: Probe, *, log: Path, log_offset: int, cwd: Path, env: Mapping[str, str], ports: Collection[int] = ()
) -> Answer:
    """Run a probe once; to repeat it keep a `Prober`, which does not read the same log twice."""
    return await Prober(probe, log=log, log_offset=log_offset, cwd=cwd, env=env, ports=ports).ask()


class Prober:
    """Runs one probe of one attempt repeatedly."""

    def __init__(
        self,
        probe: Probe,
        *,
        log: Path,
        log_offset: int,
        cwd: Path,
        env: Mapping[str, str],
        ports: Collection[int] = (),
    ) -> None:
        """Send nothing yet.

        Args:
            log_offset: where in `log` this attempt begins; the log of earlier attempts is not searched.
            env: environment of a `command` probe, added to ours.
            ports: of the service; on loopback, another user's process that listens there is not the service.
        """
        self._probe = probe
        self._ports = ports
        self._cwd = cwd
        self._env = env
        self._log = None if probe.log is None else LogSearch(log, log_offset, probe.log)
        self._command: asyncio.Task[int] | None = None
        """The last command; its result is the exit code."""

    async def ask(self) -> Answer:
        """Run the probe once, within its time limit."""
        try:
            async with asyncio.timeout(self._probe.timeout_s):
                return await self._ask()
        except TimeoutError:
            return Answer(ProbeOutcome.SILENT, f"{self._subject()}no answer in {self._probe.timeout_s:g} s")
        except ForeignListener as error:
            return Answer(ProbeOutcome.FOREIGN_LISTENER, str(error))
        except OSError as error:  # a log or a file that may not be read, no descriptor left
            return Answer(ProbeOutcome.UNASKABLE, f"{self._subject()}{_reason(error)}")

    async def _ask(self) -> Answer:
        probe = self._probe
        if probe.http is not None:
            return await self._ask_pages(probe.http, probe.then_http)
        if probe.tcp is not None:
            return await _ask_tcp(probe.tcp, self._ports)
        if self._log is not None:
            return await asyncio.to_thread(self._log.search)
        if probe.file is not None:
            return await asyncio.to_thread(_ask_file, self._cwd / probe.file)
        assert probe.command is not None, "`Probe` validates that one kind of probe is set"
        return await self._ask_command(probe.command)

    async def _ask_pages(self, http: str, then_http: str | None) -> Answer:
        """GET one page, and then the one that needs the engine behind it."""
        wanted, body_within_s = self._probe.status, min(BODY_WITHIN_S, self._probe.timeout_s / 2)
        answer = await _ask_http(http, wanted, self._ports, body_within_s=body_within_s)
        if then_http is None or not answer.passed:
            return answer
        try:
            async with asyncio.timeout(self._probe.timeout_s / 2):
                then = await _ask_http(then_http, wanted, self._ports, body_within_s=body_within_s / 2)
        except TimeoutError:
            path = _path(urlsplit(then_http))
            then = Answer(ProbeOutcome.SILENT, f"{path} does not answer in {self._probe.timeout_s / 2:g} s")
        return then if then.passed else Answer(ProbeOutcome.ENGINE_STALLED, f"{answer.words}, but {then.words}")

    async def _ask_command(self, argv: tuple[str, ...]) -> Answer:
        """Run it in its own session, which is killed after the answer, at the time limit, or on cancellation."""
        if self._command is not None and not self._command.done():
            return Answer(ProbeOutcome.SILENT, f"{argv[0]} is still alive after SIGKILL: it hangs in the kernel")
        try:
            process = _start_command(argv, self._cwd, self._env)
        except (OSError, ValueError) as error:
            return Answer(ProbeOutcome.UNASKABLE, f"cannot run {argv[0]}: {_reason(error)}")
        self._command = asyncio.create_task(_end_of_command(process))
        try:
            code = await asyncio.shield(self._command)
        finally:
            if not self._command.done():
                _kill_group(process)
                await asyncio.wait({self._command}, timeout=COMMAND_END_LIMIT_S)
        return Answer.to_yes_or_no(code == 0, f"{argv[0]} exits {code}")

    def _subject(self) -> str:
        """The target of a probe that got no answer, to begin a message with."""
        probe = self._probe
        if probe.http is not None:
            return f"{_path(urlsplit(probe.http))}: "
        return "" if probe.command is None else f"{probe.command[0]}: "


class LogSearch:
    """Searches a growing log for a line, each part once."""

    def __init__(self, log: Path, offset: int, pattern: str) -> None:
        self._log = log
        self._offset = offset
        self._pattern = re.compile(pattern)
        self._is_found = False
        self._one_at_a_time = threading.Lock()

    def search(self) -> Answer:
        """Search the lines written since the last call, and the unfinished last line.

        An unfinished line is searched again until it ends. Parts that were dropped to cap the log are skipped; a log
        that was emptied by hand is searched from its start. While an earlier call is searching, as where a service
        prints faster than that goes, nothing is.
        """
        if not self._is_found and self._one_at_a_time.acquire(blocking=False):
            try:
                self._is_found = self._search()
            finally:
                self._one_at_a_time.release()
        words = pattern_words(self._pattern.pattern)
        return Answer.to_yes_or_no(
            self._is_found, f"log {'contains' if self._is_found else 'does not contain'} {words}"
        )

    def _search(self) -> bool:
        try:
            with self._log.open("rb") as file:
                end = place(file.fileno()).end
                while True:
                    part = read_part(file.fileno(), self._offset, MAX_LOG_PART_BYTES, with_header=False)
                    if any(self._pattern.search(line) for line in searched_lines(part.data)):
                        return True
                    ended = 1 + max(part.data.rfind(b"\n"), part.data.rfind(b"\r"))
                    if len(part.data) < MAX_LOG_PART_BYTES:
                        self._offset = part.offset + ended
                        return False
                    # A line that is too long is searched in pieces.
                    self._offset = part.offset + (ended or len(part.data))
                    if self._offset >= end:
                        return False
        except FileNotFoundError:
            return False


async def _ask_http(url: str, wanted: tuple[int, ...], own_ports: Collection[int], *, body_within_s: float) -> Answer:
    """GET it over a new connection; the body is read only if the status is not a wanted one, for the reason."""
    parts = urlsplit(url)
    path, port, host = _path(parts), _port(parts), parts.netloc.rpartition("@")[2]
    target = f"{path}?{parts.query}" if parts.query else path
    body = b""
    try:
        is_tls = parts.scheme == "https"
        async with _connected(parts.hostname or "", port, own_ports, is_tls=is_tls) as (reader, writer):
            request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
            writer.write(request.encode())
            await writer.drain()
            line = await reader.readline()
            status = STATUS_LINE.match(line)
            if status is not None and int(status[1]) not in wanted:
                body = await _body(reader, body_within_s)
    except ConnectionRefusedError:
        return Answer(ProbeOutcome.CLOSED, f"port {port} is closed")
    except (ConnectionResetError, BrokenPipeError) as error:
        return Answer(ProbeOutcome.HUNG_UP, f"{path}: {_reason(error)}")
    except ValueError as error:  # a line without an end
        return Answer(ProbeOutcome.NO_HTTP, f"{path}: {_reason(error)}")
    except OSError as error:
        return Answer(ProbeOutcome.UNASKABLE, f"{path}: {_reason(error)}")
    if not line:
        return Answer(ProbeOutcome.HUNG_UP, f"{path}: connection closed without an answer")
    if status is None:
        return Answer(ProbeOutcome.NO_HTTP, f"{path} does not answer in HTTP")
    code = int(status[1])
    if code in wanted:
        return Answer(ProbeOutcome.PASSED, f"{path} answers {code}")
    reason, is_stalled = _explained(body)
    kind = ProbeOutcome.ENGINE_STALLED if is_stalled else ProbeOutcome.BAD_STATUS
    return Answer(kind, f"{path} answers {code}" + (f": {reason}" if reason else ""))


async def _body(reader: asyncio.StreamReader, within_s: float) -> bytes:
    """The beginning of a body, as far as it arrives in time."""
    received = bytearray(b"\r\n")  # the end of the status line: there may be no header
    try:
        async with asyncio.timeout(within_s):
            while len(received) < MAX_BODY_BYTES and (part := await reader.read(MAX_BODY_BYTES)):
                received += part
    except (TimeoutError, OSError):
        pass
    _headers, _, body = bytes(received).partition(b"\r\n\r\n")
    return body[:MAX_BODY_BYTES]


def _explained(body: bytes) -> tuple[str, bool]:
    """The reason in a body, and whether it is that the engine is stalled, as our inference server reports it.

    Reads `{"detail": …}` (ours, FastAPI's), `{"error": …}`, `{"error": {"message": …}}` (OpenAI's), also in chunks.
    JSON may escape what no terminal should get, and half a character, which cannot be sent on.
    """
    try:
        told = json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])
    except (ValueError, RecursionError):
        return "", False
    reason = told.get("detail") or told.get("error") or told.get("message")
    if isinstance(reason, dict):
        reason = reason.get("message")
    words = printable(" ".join(reason.split()))[:MAX_REASON_CHARS] if isinstance(reason, str) else ""
    return words, told.get("engine") == "stalled"


async def _ask_tcp(address: str, own_ports: Collection[int]) -> Answer:
    host, _, port = address.rpartition(":")
    try:
        async with _connected(host, int(port), own_ports, is_tls=False):
            return Answer(ProbeOutcome.PASSED, f"port {port} is open")
    except ConnectionRefusedError:
        return Answer(ProbeOutcome.CLOSED, f"port {port} is closed")
    except (OSError, UnicodeError) as error:
        return Answer(ProbeOutcome.UNASKABLE, f"{address}: {_reason(error)}")


def _ask_file(path: Path) -> Answer:
    there = path.exists()
    return Answer.to_yes_or_no(there, f"{path.name} {'exists' if there else 'does not exist yet'}")


def _start_command(argv: tuple[str, ...], cwd: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process; asyncio's own function would reap it in its child watcher."""
    nothing = subprocess.DEVNULL
    with own_children() as children:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env={**os.environ, **env},
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            start_new_session=True,
        )
        children.add(process.pid)
    return process


async def _end_of_command(process: subprocess.Popen[bytes]) -> int:
    """Wait for its exit and kill its process group; returns its exit code."""
    try:
        running = identify(process.pid)
        if running is not None:
            await end_of(running)
    finally:
        _kill_group(process)
    with own_children() as children:
        code = process.wait()
        children.discard(process.pid)
    return code


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Must be called before its leader is reaped, after which the group id may be reused."""
    with suppress(PermissionError):  # another user's (sudo)
        os.killpg(process.pid, signal.SIGKILL)


@asynccontextmanager
async def _connected(
    host: str, port: int, own_ports: Collection[int], *, is_tls: bool
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is aborted at the end, without draining.

    Raises:
        ForeignListener: it is to one of `own_ports`, where another user's process listens.
    """
    reader, writer = await asyncio.open_connection(host, port, ssl=ssl.create_default_context() if is_tls else None)
    try:
        if port in own_ports:
            stranger = await asyncio.to_thread(stranger_behind, writer.get_extra_info("peername"))
            if stranger is not None:
                who = await asyncio.to_thread(who_has, stranger)
                raise ForeignListener(f"port {port} is held by {who}, not by this service; end that process")
        yield reader, writer
    finally:
        writer.transport.abort()


def _path(parts: SplitResult) -> str:
    return parts.path or "/"


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
