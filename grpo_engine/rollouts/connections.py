"""Whether a batch was read, as its TCP connection tells it: stock clients never say so.

They ask for the next batch on a new connection, also when a time-out of theirs cut the last answer off. Two things
tell the cases apart. A socket that is closed with unread data in it, be it by a time-out or by the end of its process,
resets its connection; one that has read everything closes it in peace, and so does one that hung up before anything
came. And once the peer's kernel has acknowledged every byte, the peer will read them though we should end meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_TCP_CLOSE = 7
"""Linux's name for the state of a connection that was reset; one that the peer closed in peace is in another."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.002, 0.25
"""Between two looks at what the peer's kernel has yet to acknowledge."""


class WatchedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """uvicorn's protocol, except that the exchange learns how it went with batches."""

    _has_peer_closed = False

    def on_response_complete(self) -> None:
        """Watch the bytes of a batch on their way."""
        super().on_response_complete()
        if self._exchange.has_sent_batch(self.client):
            self._exchange.can_look_at(self.client, is_reset=lambda: _is_reset(self.transport))
            self.loop.create_task(self._watch())

    def eof_received(self) -> None:
        """Note who ends the connection."""
        self._has_peer_closed = True
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whether what went out on it was read."""
        if self._exchange.has_sent_batch(self.client):
            # Told at once: its client's next request may be the next thing that happens.
            self.loop.create_task(self._exchange.connection_ended(self.client, was_read=self._was_read(exc)))
        super().connection_lost(exc)

    def _was_read(self, exc: Exception | None) -> bool | None:
        # A write that met the reset may have swallowed the error: then the connection seems to end in peace.
        if exc is not None or _is_reset(self.transport):
            return False
        if _num_unacknowledged(self.transport) == 0:
            return True
        # One that hung up before the answer came has closed in peace as well, but nobody acknowledges its bytes.
        return False if self._has_peer_closed else None

    async def _watch(self) -> None:
        pause_s = _FIRST_LOOK_S
        while not self.transport.is_closing() and self._exchange.has_sent_batch(self.client):
            if _num_unacknowledged(self.transport) == 0:
                await self._exchange.batch_arrived(self.client)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)

    @property
    def _exchange(self) -> Any:
        return self.config.app.state.exchange


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether the peer has broken the connection off, also where nobody has noticed yet; False where nobody can say."""
    if not hasattr(socket, "TCP_INFO"):
        return False
    with contextlib.suppress(OSError):
        state: bytes = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return state[0] == _TCP_CLOSE
    return False


def _num_unacknowledged(transport: asyncio.Transport) -> int | None:
    """Bytes that the peer's kernel has yet to acknowledge; None where the system does not say."""
    if transport.get_write_buffer_size():
        return transport.get_write_buffer_size()
    with contextlib.suppress(OSError):
        waiting = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
        return int(struct.unpack("i", waiting)[0])
    return None
