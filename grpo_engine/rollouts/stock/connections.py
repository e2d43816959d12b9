"""Whether a batch was read, derived from its TCP connection: stock clients do not acknowledge batches.

A stock client asks for the next batch on a new connection, also after its own time-out cut off the last answer. The
state of the old connection distinguishes the cases. A socket that is closed with unread data, by a time-out or by the
end of its process, resets its connection; one that has read everything closes normally, and so does one that hung up
before the answer came. Once the peer's kernel has acknowledged every byte, the peer can read them even if this service
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from typing import Any

from grpo_engine.rollouts.state.records import Lease
from grpo_engine.serving.connections import LimitedProtocol

_TCP_CLOSE = 7
"""Linux's state of a connection that was reset; one that the peer closed normally has another."""
_FIRST_CHECK_S, _LAST_CHECK_S = 0.002, 0.25
"""Interval between checks of what the peer's kernel has yet to acknowledge; it doubles from the first to the last."""


class Deliveries:
    """The last batch that was sent on each open connection."""

    def __init__(self) -> None:
        self._sent: dict[object, Lease] = {}
        self._is_reset: dict[object, Callable[[], bool]] = {}
        """Whether such a connection was reset, which asyncio may not have reported yet."""

    def __contains__(self, connection: object) -> bool:
        return connection in self._sent

    def add(self, connection: object, lease: Lease) -> None:
        """Record that a batch is sent on a connection."""
        self._sent[connection] = lease

    def watch(self, connection: object, *, is_reset: Callable[[], bool]) -> None:
        """Register the check by which `reset_by` asks a connection."""
        self._is_reset[connection] = is_reset

    def lease_on(self, connection: object) -> Lease:
        """The batch that was sent on a connection."""
        return self._sent[connection]

    def reset_by(self, client: str) -> list[Lease]:
        """Batches whose connections this client has reset, and so did not read to the end."""
        return [
            lease
            for connection, lease in self._sent.items()
            if lease.client == client and connection in self._is_reset and self._is_reset[connection]()
        ]

    def remove(self, connection: object) -> Lease:
        """Forget a connection; returns the batch that was sent on it."""
        self._is_reset.pop(connection, None)
        return self._sent.pop(connection)


class WatchedProtocol(LimitedProtocol):
    """The protocol of all our services, which also reports to the coordinator how a connection with a batch ended."""

    _has_peer_closed = False

    def on_response_complete(self) -> None:
        """Begin to watch whether the bytes of a batch arrive."""
        super().on_response_complete()
        if self.client in self._coordinator.deliveries:
            self._coordinator.deliveries.watch(self.client, is_reset=lambda: _is_reset(self.transport))
            self.loop.create_task(self._watch())

    def eof_received(self) -> None:
        """Record that the peer closed first."""
        self._has_peer_closed = True
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report whether the batch was read."""
        if self.client in self._coordinator.deliveries:
            # The call changes the state at once: the same client's next request may be handled next.
            self.loop.create_task(self._coordinator.record_connection_end(self.client, was_read=self._was_read(exc)))
        super().connection_lost(exc)

    def _was_read(self, exc: Exception | None) -> bool | None:
        # A write that met the reset may have consumed the error: then the connection seems to end normally.
        if exc is not None or _is_reset(self.transport):
            return False
        if _num_unacknowledged(self.transport) == 0:
            return True
        # A peer that hung up before the answer came has closed normally as well, but does not acknowledge its bytes.
        return False if self._has_peer_closed else None

    async def _watch(self) -> None:
        pause_s = _FIRST_CHECK_S
        while not self.transport.is_closing() and self.client in self._coordinator.deliveries:
            if _num_unacknowledged(self.transport) == 0:
                await self._coordinator.record_arrival(self.client)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_CHECK_S)

    @property
    def _coordinator(self) -> Any:
        return self.config.app.state.coordinator


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether the peer has reset the connection, even if asyncio has not noticed; False where the OS does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return False
    with contextlib.suppress(OSError):
        state: bytes = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return state[0] == _TCP_CLOSE
    return False


def _num_unacknowledged(transport: asyncio.Transport) -> int | None:
    """Bytes that the peer's kernel has yet to acknowledge; None where the OS does not tell."""
    if transport.get_write_buffer_size():
        return transport.get_write_buffer_size()
    with contextlib.suppress(OSError):
        waiting = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
        return int(struct.unpack("i", waiting)[0])
    return None
