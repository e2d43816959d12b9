"""What the screen needs of a run, and the real thing: the daemon's socket, and the files where no daemon answers.

The screen knows only `RunConnection`; tests give it one without a daemon.
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
from grpo_tui.view.state import Do


class RunConnection(Protocol):
    """A way to hear how a run stands, and to ask its daemon for things."""

    def events(self) -> AsyncIterator[Snapshot | Event | Bye]:
        """Connect, and yield a snapshot and every event after it until the daemon hangs up.

        Raises:
            PeerError: no daemon answers, or it answers something outside the protocol.
        """
        ...

    async def command(self, do: Do, service: str | None = None, *, take_ports: bool = False) -> Reply:
        """Ask for an action and wait for the answer that it was taken up.

        Args:
            take_ports: the word to end strangers of our own user that hold a port of the service.

        Raises:
            GrpoError: no daemon answers, and none could be started.
        """
        ...

    def stored_status(self) -> RunStatus:
        """How the run stands by its files; blocks while it reads.

        Raises:
            PeerError: they are missing or damaged.
        """
        ...


class LocalRun:
    """A run of this machine. A command brings the daemon back if it died: the new one takes the services over."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._daemon = Daemon(run_folder)

    def events(self) -> AsyncIterator[Snapshot | Event | Bye]:
        """See `RunConnection.events`; never starts a daemon, since looking must not."""
        return self._daemon.events()

    async def command(self, do: Do, service: str | None = None, *, take_ports: bool = False) -> Reply:
        """See `RunConnection.command`."""
        try:
            return await self._daemon.command(do, service, take_ports=take_ports)
        except PeerUnavailable:
            if not await asyncio.to_thread(ensure_daemon, self._run_folder):
                raise PeerUnavailable(f"the run {self._run_folder.name} is over") from None
            return await self._daemon.command(do, service, take_ports=take_ports)

    def stored_status(self) -> RunStatus:
        """See `RunConnection.stored_status`."""
        return stored_status(look_at(self._run_folder))
