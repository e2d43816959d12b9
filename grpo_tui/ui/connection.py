"""The screen's connection to a run: the supervisor's socket, and the run's files if no supervisor answers.

The screen uses only `RunConnection`; tests pass a fake.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from grpo_engine.errors import PeerUnavailable
from grpo_engine.wire.supervisor import Bye, Event, Reply, RunStatus, Snapshot
from grpo_tui.client.launch import ensure_daemon
from grpo_tui.client.local import look_at, stored_status
from grpo_tui.client.socket import Daemon
from grpo_tui.supervisor.lock import has_daemon
from grpo_tui.view.state import Do


class RunConnection(Protocol):
    """Receives events of a run, and sends commands to its supervisor."""

    def events(self) -> AsyncIterator[Snapshot | Event | Bye]:
        """Connect, and yield a snapshot and every later event until the supervisor closes the connection.

        Raises:
            PeerError: no supervisor answers, or its answer is not of the protocol.
        """
        ...

    async def command(self, do: Do, service: str | None = None, *, take_ports: bool = False) -> Reply:
        """Send a command and wait until the supervisor accepts it.

        Args:
            take_ports: end foreign processes of this user that hold a port of the service.

        Raises:
            GrpoError: no supervisor answers, and none could be started.
        """
        ...

    async def replace_supervisor(self) -> bool:
        """Start a supervisor if the run is not over and has none; returns whether it did.

        Raises:
            GrpoError: it could not be started.
        """
        ...

    def stored_status(self) -> RunStatus:
        """The run's status as its files have it; blocks while it reads.

        Raises:
            PeerError: they are missing or damaged.
        """
        ...


class LocalRun:
    """A run on this machine. A command restarts the supervisor if it died; the new one adopts the services."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._daemon = Daemon(run_folder)
        self._was_live = False

    async def events(self) -> AsyncIterator[Snapshot | Event | Bye]:
        """See `RunConnection.events`; never starts a supervisor."""
        async for message in self._daemon.events():
            self._was_live = True
            yield message

    async def command(self, do: Do, service: str | None = None, *, take_ports: bool = False) -> Reply:
        """See `RunConnection.command`."""
        try:
            return await self._daemon.command(do, service, take_ports=take_ports)
        except PeerUnavailable:
            if not await asyncio.to_thread(self._ensure_daemon):
                raise PeerUnavailable(f"the run {self._run_folder.name} is over") from None
            return await self._daemon.command(do, service, take_ports=take_ports)

    async def replace_supervisor(self) -> bool:
        """See `RunConnection.replace_supervisor`."""
        if await asyncio.to_thread(has_daemon, self._run_folder):
            return False  # it closed this connection only, since we read too slowly
        return await asyncio.to_thread(self._ensure_daemon)

    def _ensure_daemon(self) -> bool:
        return ensure_daemon(self._run_folder, was_live=self._was_live)

    def stored_status(self) -> RunStatus:
        """See `RunConnection.stored_status`."""
        return stored_status(look_at(self._run_folder))
