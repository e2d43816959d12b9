"""The client side of the supervisor's unix socket: one connection per command, one for the stream of events.

`launch.py` starts supervisors.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

from grpo_engine.errors import PeerError, PeerUnavailable
from grpo_engine.wire.codec import MAX_LINE_BYTES, to_line
from grpo_engine.wire.supervisor import (
    PROTOCOL_VERSION,
    Bye,
    Command,
    Event,
    Hello,
    Reply,
    Snapshot,
    Subscribe,
    read_from_daemon,
)
from grpo_engine.wire.unix_peers import peer_of
from grpo_tui.paths import socket_path
from grpo_tui.supervisor.keeper.proc import user_name
from grpo_tui.supervisor.lock import read_address

HELLO_LIMIT_S = 3.5
"""A supervisor answers within milliseconds, whatever its services do; one that takes longer than this hangs."""
Do = Literal["status", "start", "stop", "restart", "kill", "down"]


class Daemon:
    """The supervisor of one run."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder

    async def hello(self, *, any_version: bool = False) -> Hello:
        """Connect and return its greeting.

        Raises:
            PeerUnavailable: it does not answer.
            PeerError: it uses another protocol, and `any_version` is not set; or it is another user's.
        """
        async with self._connected(any_version=any_version) as (hello, _, _):
            return hello

    async def command(
        self,
        do: Do,
        service: str | None = None,
        *,
        wait: bool = False,
        timeout_s: float | None = None,
        take_ports: bool = False,
    ) -> Reply:
        """Send a command; the reply comes once it is applied, or once it is done if `wait`.

        Raises:
            PeerUnavailable: the supervisor does not answer, or exits before it does.
        """
        async with self._connected() as (_, reader, writer):
            writer.write(
                to_line(Command(id=1, do=do, service=service, wait=wait, timeout_s=timeout_s, take_ports=take_ports))
            )
            await writer.drain()
            while line := await self._read_line(reader):
                message = read_from_daemon(line)
                if isinstance(message, Reply):
                    return message
        raise PeerUnavailable(f"the supervisor of {self.run_folder.name} closed the connection before it answered {do}")

    async def events(self) -> AsyncIterator[Snapshot | Event | Bye]:
        """A snapshot and every event after it, until the connection closes; `Bye` comes last when the run is over.

        Raises:
            PeerUnavailable: the supervisor does not answer.
        """
        async with self._connected() as (_, reader, writer):
            writer.write(to_line(Subscribe()))
            await writer.drain()
            while line := await self._read_line(reader):
                message = read_from_daemon(line)
                if not isinstance(message, Hello | Reply):
                    yield message

    @asynccontextmanager
    async def _connected(
        self, *, any_version: bool = False
    ) -> AsyncIterator[tuple[Hello, asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect and compare protocols; a connection that breaks in the middle of a line counts as closed."""
        address = read_address(self.run_folder)
        path = Path(address.socket) if address is not None else socket_path(self.run_folder)
        name = self.run_folder.name
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
        except OSError as error:
            raise PeerUnavailable(f"the supervisor of {name} does not answer on {path}: {error.strerror}") from None
        try:
            pid = self._listener(writer)
            hello = await self._shake_hands(reader, writer, any_version)
            yield hello.model_copy(update={"pid": pid}), reader, writer
        except (OSError, asyncio.IncompleteReadError) as error:  # also ENOTCONN, when its backlog is full
            raise PeerUnavailable(f"the supervisor of {name} closed the connection: {error}") from None
        finally:
            writer.transport.abort()

    async def _read_line(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readline()
        except ValueError:  # asyncio's word for it; what came of the line is dropped
            raise PeerUnavailable(
                f"the supervisor of {self.run_folder.name} sent a line above {MAX_LINE_BYTES:,} bytes"
            ) from None

    def _listener(self, writer: asyncio.StreamWriter) -> int:
        """Pid of the process that listens.

        Raises:
            PeerError: it is neither of this user nor of the owner of the run folder.
        """
        pid, uid = peer_of(writer.get_extra_info("socket"))
        trusted = {os.geteuid()}
        with suppress(OSError):  # a folder that was deleted
            trusted.add(self.run_folder.stat().st_uid)
        if uid not in trusted:
            raise PeerError(f"{self.run_folder}: user {user_name(uid)} (pid {pid}) listens in place of its supervisor")
        return pid

    async def _shake_hands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, any_version: bool
    ) -> Hello:
        name = self.run_folder.name
        writer.write(to_line(Hello(run=name, pid=0)))
        try:
            async with asyncio.timeout(HELLO_LIMIT_S):
                line = await self._read_line(reader)
        except TimeoutError:
            raise PeerUnavailable(f"the supervisor of {name} has not answered in {HELLO_LIMIT_S:g} s") from None
        if not line:
            raise PeerUnavailable(f"the supervisor of {name} closed the connection at once")
        hello = read_from_daemon(line)
        if not isinstance(hello, Hello) or (hello.version != PROTOCOL_VERSION and not any_version):
            version = hello.version if isinstance(hello, Hello) else "none"
            raise PeerError(
                f"the supervisor of {name} uses protocol {version}, this program {PROTOCOL_VERSION}: "
                f"`grpo-tui upgrade {name}` replaces the supervisor and leaves its services running"
            )
        return hello


def answers(run_folder: Path, *, any_version: bool = False) -> bool:
    """Whether the supervisor of a run answers.

    Raises:
        PeerError: it uses another protocol, and `any_version` is not set.
    """
    try:
        asyncio.run(Daemon(run_folder).hello(any_version=any_version))
    except PeerUnavailable:
        return False
    return True
