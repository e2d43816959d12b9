"""Loopback over machines: a port of a service is reachable at 127.0.0.1 on every machine that the run uses.

Each machine has a *gate*, which listens on its address and passes connections on to services there, and a *door* for
each port of a service elsewhere, which listens on loopback and leads to the gate there. So services listen on loopback
only, and their clients need no other addresses. Gate and door prove to each other that they know the token of the run
before anything passes; what passes is not encrypted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_engine.wire.run_folder import TOKEN_FILE

HANDSHAKE_LIMIT_S = 10.0
PART_BYTES = 1 << 16
LINE_BYTES = 256
LOOPBACK = "127.0.0.1"
log = logging.getLogger(__name__)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Refused(Exception):
    """The other side does not know the token, or leads to no such port."""


def run_token(run_folder: Path) -> str:
    """The token of a run.

    Raises:
        OSError: it cannot be read.
    """
    return (run_folder / TOKEN_FILE).read_text().strip()


class Relay:
    """The gate and the doors of one machine."""

    def __init__(self, token: str, *, door_host: str = LOOPBACK) -> None:
        """
        Args:
            token: of the run.
            door_host: where doors listen; another address of loopback in tests, which have one machine.
        """
        self._token = token.encode()
        self._door_host = door_host
        self._inside: frozenset[int] = frozenset()
        self._gate: asyncio.Server | None = None
        self._doors: dict[int, tuple[tuple[str, int], asyncio.Server]] = {}
        self._passing: set[asyncio.Task[None]] = set()

    async def open_gate(self, address: str, inside: Iterable[int]) -> int:
        """Listen on an address of this machine for connections to these ports; returns the port of the gate."""
        self._inside = frozenset(inside)
        if self._gate is None:
            self._gate = await asyncio.start_server(self._enter, address, 0, limit=LINE_BYTES)
        port: int = self._gate.sockets[0].getsockname()[1]
        return port

    async def set_doors(self, doors: Mapping[int, tuple[str, int]]) -> list[str]:
        """Listen on loopback for each port, and lead to the gate at its address; returns why a port cannot be had."""
        for port, (gate, server) in list(self._doors.items()):
            if doors.get(port) != gate:
                server.close()
                del self._doors[port]
        faults = []
        for port, gate in doors.items():
            if port in self._doors:
                continue
            try:
                server = await asyncio.start_server(self._leave(port, gate), self._door_host, port, limit=LINE_BYTES)
            except OSError as error:
                faults.append(f"port {port}: {error.strerror or error}")
            else:
                self._doors[port] = gate, server
        return faults

    async def close(self) -> None:
        """Stop listening, and end what passes."""
        for server in (self._gate, *(server for _, server in self._doors.values())):
            if server is not None:
                server.close()
        self._gate = None
        self._doors.clear()
        tasks = set(self._passing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close their sockets in the next round of the loop

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection at the gate: check it, and pass it on to a service of this machine."""
        with self._known(writer):
            await self._check((reader, writer))

    async def _check(self, outer: Streams) -> None:
        reader, writer = outer
        challenge = secrets.token_hex(16)
        try:
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                writer.write(f"{challenge}\n".encode())
                port, answer, proof = (await reader.readline()).decode().split()
                if not hmac.compare_digest(proof, self._proof("door", challenge, port, answer)):
                    raise Refused("a client that does not know the token of the run")
                if int(port) not in self._inside:
                    raise Refused(f"port {port}, which no service here has")
                inner = await asyncio.open_connection(LOOPBACK, int(port))
        except (Refused, OSError, ValueError, TimeoutError) as error:
            log.warning("a connection to the gate is refused: %s", error)
            return
        writer.write(f"{self._proof('gate', answer, port)}\n".encode())
        await _pass(outer, inner)

    def _leave(self, port: int, gate: tuple[str, int]):  # type: ignore[no-untyped-def]  # asyncio's own callback type
        async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with self._known(writer):
                try:
                    async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                        outer = await self._through(port, gate)
                except (Refused, OSError, ValueError, TimeoutError) as error:
                    log.info("port %d cannot be reached at %s: %s", port, gate[0], error)
                    return
                await _pass((reader, writer), outer)

        return leave

    async def _through(self, port: int, gate: tuple[str, int]) -> Streams:
        """A connection through the gate of another machine."""
        reader, writer = await asyncio.open_connection(*gate, limit=LINE_BYTES)
        try:
            challenge, own = (await reader.readline()).decode().strip(), secrets.token_hex(16)
            writer.write(f"{port} {own} {self._proof('door', challenge, str(port), own)}\n".encode())
            if not hmac.compare_digest((await reader.readline()).decode().strip(), self._proof("gate", own, str(port))):
                raise Refused("no gate of this run")
        except BaseException:
            writer.close()
            raise
        return reader, writer

    def _proof(self, *words: str) -> str:
        return hmac.new(self._token, " ".join(words).encode(), hashlib.sha256).hexdigest()

    @contextmanager
    def _known(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Count the current task among those that `close` ends, and close its connection at the end."""
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        try:
            yield
        except asyncio.CancelledError:
            pass
        finally:
            self._passing.discard(task)
            writer.close()


async def _pass(one: Streams, other: Streams) -> None:
    """Pass bytes both ways until both sides have ended."""
    try:
        await asyncio.gather(_copy(one[0], other[1]), _copy(other[0], one[1]))
    finally:
        other[1].close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while part := await reader.read(PART_BYTES):
            writer.write(part)
            await writer.drain()
    with suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()
