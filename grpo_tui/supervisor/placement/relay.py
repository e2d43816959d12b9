"""Loopback over machines: a port of a service is reachable at 127.0.0.1 on every machine that the run uses.

Each machine has a *gate*, which listens on its address and passes connections on to services there, and a *door* for
each port of a service elsewhere, which listens on loopback and leads to the gate there. So services listen on loopback
only, and their clients need no other addresses. Gate and door prove to each other that they know the token of the run
before anything passes; what passes is not encrypted. The proofs name the address and port of the gate, so that a
process which took the port of a gate that ended cannot stand between a door and the next gate.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from grpo_engine.wire.run_folder import TOKEN_FILE
from grpo_engine.wire.tcp_sockets import client_socket, stranger_behind, user_name, who_has

HANDSHAKE_LIMIT_S = 10.0
PART_BYTES = 1 << 16
LINE_BYTES = 256
MAX_UNKNOWN = 128
"""Connections at a gate that have shown no proof; one more closes the oldest. A door needs milliseconds."""
REPORT_EVERY_S = 60.0
"""Refused connections are counted, those at the gate and those at doors, and each kind is logged at most so often."""
SILENT_LIMIT_S = 30.0
"""Between machines: a connection whose other end has not acknowledged for so long is closed, and with it that of the
client or service. A machine without power or link sends no end of it."""
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
        self._unknown: dict[asyncio.Task[None], None] = {}
        """Of connections at the gate that have shown no proof, the oldest first."""
        self._num_refused = {"the gate": 0, "doors": 0}
        self._reported_at_s = dict.fromkeys(self._num_refused, -math.inf)
        self._unreached_at_s: dict[int, float] = {}
        """When it was last logged that a port is not reachable: probes ask several times a second."""

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
            _end_with_link(writer)
            try:
                async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                    inner = await self._checked(reader, writer)
            except (Refused, OSError, ValueError, TimeoutError) as error:
                self._report("the gate", str(error) or f"no proof within {HANDSHAKE_LIMIT_S:g} s")
                return
            await _pass((reader, writer), inner)

    async def _checked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Streams:
        """The connection to a service of this machine that the other side may have, once it has shown its proof.

        Raises:
            Refused: it may not.
        """
        challenge, here = secrets.token_hex(16), _name(writer.get_extra_info("sockname"))
        with self._not_yet_known():
            writer.write(f"{challenge}\n".encode())
            port, answer, proof = (await reader.readline()).decode("ascii").split()
            if not hmac.compare_digest(proof, self._proof("door", challenge, port, answer, here)):
                raise Refused("a client that does not know the token of the run")
        if int(port) not in self._inside:
            raise Refused(f"port {port}, which no service here has")
        inner = await asyncio.open_connection(LOOPBACK, int(port))
        try:
            # The client's own check sees a door of its user there, not who listens on this machine.
            stranger = await asyncio.to_thread(
                stranger_behind, (LOOPBACK, int(port)), inner[1].get_extra_info("sockname")
            )
            if stranger is not None:
                raise Refused(f"port {port}, which is held by {await asyncio.to_thread(who_has, stranger)}")
            writer.write(f"{self._proof('gate', answer, port, here)}\n".encode())
        except BaseException:
            inner[1].close()
            raise
        return inner

    @contextmanager
    def _not_yet_known(self) -> Iterator[None]:
        """Count the current task among the connections without a proof, and end the oldest of too many."""
        task = asyncio.current_task()
        assert task is not None
        self._unknown[task] = None
        if len(self._unknown) > MAX_UNKNOWN:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            oldest.cancel()
        try:
            yield
        finally:
            self._unknown.pop(task, None)

    def _report(self, where: str, why: str) -> None:
        self._num_refused[where] += 1
        if time.monotonic() - self._reported_at_s[where] >= REPORT_EVERY_S:
            num = self._num_refused[where]
            log.warning("connections to %s are refused, %d so far; the last one: %s", where, num, why)
            self._reported_at_s[where] = time.monotonic()

    def _report_unreached(self, port: int, machine: str, why: str) -> None:
        if time.monotonic() - self._unreached_at_s.get(port, -math.inf) >= REPORT_EVERY_S:
            log.info("port %d cannot be reached at %s: %s", port, machine, why)
            self._unreached_at_s[port] = time.monotonic()

    def _leave(self, port: int, gate: tuple[str, int]):  # type: ignore[no-untyped-def]  # asyncio's own callback type
        async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with self._known(writer):
                try:
                    async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                        if (why := await asyncio.to_thread(_why_foreign, writer)) is not None:
                            self._report("doors", f"port {port}: {why}")
                            return
                        outer = await self._through(port, gate)
                except (Refused, OSError, ValueError, TimeoutError) as error:
                    self._report_unreached(port, gate[0], str(error) or f"no answer within {HANDSHAKE_LIMIT_S:g} s")
                    return
                await _pass((reader, writer), outer)

        return leave

    async def _through(self, port: int, gate: tuple[str, int]) -> Streams:
        """A connection through the gate of another machine."""
        reader, writer = await asyncio.open_connection(*gate, limit=LINE_BYTES)
        try:
            _end_with_link(writer)
            own, there = secrets.token_hex(16), _name(writer.get_extra_info("peername"))
            challenge = (await reader.readline()).decode("ascii").strip()
            writer.write(f"{port} {own} {self._proof('door', challenge, str(port), own, there)}\n".encode())
            proof = (await reader.readline()).decode("ascii").strip()
            if not proof:
                raise Refused("nothing listens there yet, or its gate refuses this one")
            if not hmac.compare_digest(proof, self._proof("gate", own, str(port), there)):
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


def _name(address: tuple[str, int]) -> str:
    """Address and port of a gate, as the kernel has them on both sides."""
    return f"{address[0]} {address[1]}"


def _why_foreign(writer: asyncio.StreamWriter) -> str | None:
    """Why a connection at a door is none of the run: another user than this one and root has it, or had it.

    They would use up its descriptors, and gain services elsewhere. One that is closed already counts too: what it sent
    first would be passed on, and whose it was cannot be known.
    """
    peer, own = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
    client = None if peer is None else client_socket(peer, own)
    if client is None:
        return "a client has closed its connection at once"
    if client.uid in (os.geteuid(), 0):
        return None
    return f"user {user_name(client.uid)} has connected, and not a process of this run"


def _end_with_link(writer: asyncio.StreamWriter) -> None:
    """Have the kernel close a connection between machines when nothing of it is acknowledged any more."""
    link = writer.get_extra_info("socket")
    every_s = max(1, int(SILENT_LIMIT_S / 6))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_LIMIT_S))


async def _pass(one: Streams, other: Streams) -> None:
    """Pass bytes both ways until both sides have ended, or one is broken."""
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_copy(one[0], other[1]))
            tasks.create_task(_copy(other[0], one[1]))
    except* OSError:
        pass
    finally:
        other[1].close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """
    Raises:
        OSError: one of them is broken.
    """
    while part := await reader.read(PART_BYTES):
        writer.write(part)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
