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
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from grpo_engine.wire.run_folder import TOKEN_FILE
from grpo_engine.wire.tcp_sockets import client_socket, stranger_behind, user_name, who_has

HANDSHAKE_LIMIT_S = 10.0
PART_BYTES = 1 << 16
LINE_BYTES = 256
MAX_UNKNOWN = 512
"""Connections at a gate that have shown no proof; one more closes the oldest. A door needs milliseconds. Half of
the 1,024 descriptors that most processes may have."""
BACKLOG = 4096
"""Connections that wait until a gate takes them, or as many as the kernel allows. Where it drops one, the door's kernel
tries again after a second."""
OUT_OF_DESCRIPTORS_S = 1.0
"""Until a gate that could take no connection tries again."""
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
        self._gate: _Listener | None = None
        self._doors: dict[int, tuple[tuple[str, int], _Listener]] = {}
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
            self._gate = _Listener(address, 0, partial(self._begin, self._enter))
        return self._gate.port

    async def set_doors(self, doors: Mapping[int, tuple[str, int]]) -> list[str]:
        """Listen on loopback for each port, and lead to the gate at its address; returns why a port cannot be had."""
        for port, (gate, door) in list(self._doors.items()):
            if doors.get(port) != gate:
                door.close()
                del self._doors[port]
        faults = []
        for port, gate in doors.items():
            if port in self._doors:
                continue
            try:
                door = _Listener(self._door_host, port, partial(self._begin, partial(self._leave, port, gate)))
            except OSError as error:
                faults.append(f"port {port}: {error.strerror or error}")
            else:
                self._doors[port] = gate, door
        return faults

    async def close(self) -> None:
        """Stop listening, and end what passes."""
        for listener in (self._gate, *(door for _, door in self._doors.values())):
            if listener is not None:
                listener.close()
        self._gate = None
        self._doors.clear()
        tasks = set(self._passing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close their sockets in the next round of the loop

    def _begin(self, serve: Callable[[socket.socket], Coroutine[None, None, None]], link: socket.socket) -> None:
        """Serve a new connection in a task that `close` ends, and close it at the end."""
        task = asyncio.create_task(serve(link))
        self._passing.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._passing.discard(task)
            link.close()

        task.add_done_callback(end)

    async def _enter(self, link: socket.socket) -> None:
        """A connection at the gate: check it, and pass it on to a service of this machine."""
        with ExitStack() as ending:
            try:
                async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                    here = _name(link.getsockname())
                    port, answer = await self._proven(link, here)
                    outer = await _streams(link)
                    ending.callback(outer[1].close)
                    _end_with_link(outer[1])
                    inner = await self._service(port)
                    ending.callback(inner[1].close)
                    outer[1].write(f"{self._proof('gate', answer, port, here)}\n".encode())
            except (Refused, OSError, ValueError, TimeoutError) as error:
                self._report("the gate", str(error) or f"no proof within {HANDSHAKE_LIMIT_S:g} s")
                return
            await _pass(outer, inner)

    async def _proven(self, link: socket.socket, here: str) -> tuple[str, str]:
        """The port that the other side asks for and the number that it wants proved, once it has shown its proof.

        Without streams: these are most of what a connection costs, and it may be one of thousands a second.

        Raises:
            Refused: it has none.
        """
        loop, challenge, line = asyncio.get_running_loop(), secrets.token_hex(16), b""
        with self._not_yet_known():
            await loop.sock_sendall(link, f"{challenge}\n".encode())
            while not line.endswith(b"\n"):
                part = await loop.sock_recv(link, LINE_BYTES)
                line += part
                if not part or len(line) > LINE_BYTES:
                    raise Refused("a client that sends no proof")
        port, answer, proof = line.decode("ascii").split()
        if not hmac.compare_digest(proof, self._proof("door", challenge, port, answer, here)):
            raise Refused("a client that does not know the token of the run")
        return port, answer

    async def _service(self, port: str) -> Streams:
        """A connection to a service of this machine that the other side may have.

        Raises:
            Refused: it may not.
        """
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

    async def _leave(self, port: int, gate: tuple[str, int], link: socket.socket) -> None:
        """A connection at a door: check it, and pass it on to the gate of the other machine."""
        with ExitStack() as ending:
            try:
                async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                    if (why := await asyncio.to_thread(_why_foreign, link)) is not None:
                        self._report("doors", f"port {port}: {why}")
                        return
                    inner = await _streams(link)
                    ending.callback(inner[1].close)
                    outer = await self._through(port, gate)
            except (Refused, OSError, ValueError, TimeoutError) as error:
                self._report_unreached(port, gate[0], str(error) or f"no answer within {HANDSHAKE_LIMIT_S:g} s")
                return
            await _pass(inner, outer)

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


class _Listener:
    """Takes one connection in each round of the loop.

    `asyncio.start_server` takes all that wait: strangers who connect without pause had each door be the oldest without
    a proof before its answer was read, and held up what passes.
    """

    def __init__(self, address: str, port: int, take: Callable[[socket.socket], None]) -> None:
        """
        Raises:
            OSError: the port cannot be had.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, port), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self._take = take
        self._listen()

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _listen(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            link, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            log.warning("no connection can be taken for %g s: %s", OUT_OF_DESCRIPTORS_S, error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.call_later(OUT_OF_DESCRIPTORS_S, self._listen)
            return
        link.setblocking(False)
        self._take(link)


async def _streams(link: socket.socket) -> Streams:
    """Of a connection, whose socket they take over."""
    return await asyncio.open_connection(sock=socket.socket(fileno=link.detach()))


def _name(address: tuple[str, int]) -> str:
    """Address and port of a gate, as the kernel has them on both sides."""
    return f"{address[0]} {address[1]}"


def _why_foreign(link: socket.socket) -> str | None:
    """Why a connection at a door is none of the run: another user than this one and root has it, or had it.

    They would use up its descriptors, and gain services elsewhere. One that is closed already counts too: what it sent
    first would be passed on, and whose it was cannot be known.
    """
    try:
        client = client_socket(link.getpeername(), link.getsockname())
    except OSError:  # it is not connected any more
        client = None
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
