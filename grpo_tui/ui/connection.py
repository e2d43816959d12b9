"""What the screen needs of the run's daemon, and the real thing over its socket.

The screen knows only `RunConnection`; tests give it one without a daemon.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from grpo_engine.wire.supervisor import Bye, Event, Reply, Snapshot
from grpo_tui.view.state import Do


class RunConnection(Protocol):
    """A way to hear what a run's daemon says, and to ask it for things."""

    def events(self) -> AsyncIterator[Snapshot | Event | Bye]:
        """Connect, and yield a snapshot and every event after it until the daemon hangs up.

        Raises:
            PeerError: no daemon answers, or it answers something outside the protocol.
        """
        ...

    async def command(self, do: Do, service: str | None = None) -> Reply:
        """Ask for an action and wait for the answer that it was taken up.

        Raises:
            PeerError: no daemon answers.
        """
        ...
