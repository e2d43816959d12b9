"""Events to every client that watches: numbered, in order, from one bounded queue a client.

A client that stops reading is let go when its queue is full: it holds up nobody, and can come back for a snapshot.
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
"""A quarter of an hour of a busy run; a client that is further behind does not read."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Client:
    """One connection as the daemon sees it."""

    name: str
    is_watching: bool = False
    is_dropped: bool = False
    lines: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING_LINES))
    dropped: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, message: BaseModel) -> None:
        """Queue a line for this client alone."""
        self.say_line(to_line(message))

    def say_line(self, line: bytes) -> None:
        """Queue an encoded line; a full queue drops the client."""
        if self.is_dropped:
            return
        try:
            self.lines.put_nowait(line)
        except asyncio.QueueFull:
            log.warning("%s does not read: let go with %d lines waiting", self.name, self.lines.qsize())
            self.is_dropped = True
            self.dropped.set()


class Broadcast:
    """All clients, and the numbers of the events they get."""

    def __init__(self, keep: Callable[[Event], None] | None = None) -> None:
        """`keep` is given every event, whether anybody watches or not."""
        self._keep = keep
        self.number = 0
        """Of the event that was sent last."""
        self.clients: set[Client] = set()
        self.figures_wanted = asyncio.Event()
        """Set when somebody begins to watch or a service has become ready; the sampler clears it."""

    @property
    def is_watched(self) -> bool:
        """Whether anybody reads events."""
        return any(client.is_watching for client in self.clients)

    def watch(self, client: Client) -> None:
        """From now on send every event to this client."""
        client.is_watching = True
        self.figures_wanted.set()

    def send(self, make: Callable[[int], Event]) -> None:
        """Number an event, keep it, and queue it for everybody who watches."""
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
                client.say_line(line)

    def farewell(self, message: BaseModel) -> None:
        """Queue a last line for everybody."""
        for client in self.clients:
            client.say(message)
