"""Sends events to every client that watches: numbered, in order, through one bounded queue per client.

A client that stops reading is disconnected when its queue is full; it can reconnect and gets a snapshot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import BaseModel

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.supervisor import Event

MAX_WAITING_LINES = 2000
"""About fifteen minutes of a busy run; a client that is further behind has stopped reading."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Client:
    """One connection, in the supervisor."""

    name: str
    is_watching: bool = False
    is_dropped: bool = False
    lines: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING_LINES))
    dropped: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, message: BaseModel) -> None:
        """Queue a message for this client only."""
        self.send_line(to_line(message))

    def send_line(self, line: bytes) -> None:
        """Queue an encoded line; a full queue disconnects the client."""
        if self.is_dropped:
            return
        try:
            self.lines.put_nowait(line)
        except asyncio.QueueFull:
            log.warning("%s does not read: disconnected with %d lines waiting", self.name, self.lines.qsize())
            self.is_dropped = True
            self.dropped.set()


class Broadcast:
    """All clients, and the number of the last event."""

    def __init__(self, keep: Callable[[Event], None] | None = None) -> None:
        """`keep` is called with every event, whether a client watches or not."""
        self._keep = keep
        self.number = 0
        """Number of the last event."""
        self.clients: set[Client] = set()
        self.figures_wanted = asyncio.Event()
        """Set when a client starts to watch or a service becomes ready; the sampler clears it."""

    @property
    def is_watched(self) -> bool:
        """Whether any client reads events."""
        return any(client.is_watching for client in self.clients)

    def watch(self, client: Client) -> None:
        """Send every event from now on to this client."""
        client.is_watching = True
        self.figures_wanted.set()

    def send(self, make: Callable[[int], Event]) -> None:
        """Number an event, keep it, and queue it for every client that watches."""
        self.number += 1
        if self._keep is None and not self.is_watched:
            return
        event = make(self.number)
        if self._keep is not None:
            self._keep(event)
        if not self.is_watched:
            return
        line = to_line(event)
        for client in self.clients:
            if client.is_watching:
                client.send_line(line)

    def send_to_all(self, message: BaseModel) -> None:
        """Queue a message for every client, watching or not."""
        for client in self.clients:
            client.send(message)
