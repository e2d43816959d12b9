"""Limits of one HTTP connection that uvicorn does not have: how long its headers may take, and how long they may be."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS_WITHIN_S = 30.0
"""From the connection, or the first byte of a later request, to the end of its headers; uvicorn waits without end."""
_LOOK_AGAIN_S = 1.0
"""A loop that was blocked runs its timers before it reads what has arrived meanwhile."""
MAX_HEADERS_BYTES = 64 * 1024
"""As h11 has it; httptools has none."""


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """uvicorn's protocol, which also closes a connection whose headers do not come to their end."""

    _closing: asyncio.TimerHandle | None = None
    """Closes the connection, unless headers are complete before."""
    _is_in_headers = False
    _num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._begin_wait()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        before = self.cycle
        if self._closing is None and (before is None or before.response_complete):
            self._begin_wait()
        super().data_received(data)
        if self.cycle is not before:
            self._end_wait()
        if self._is_in_headers:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADERS_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        """Count the headers that begin; only httptools calls this and the next."""
        super().on_message_begin()
        self._is_in_headers, self._num_header_bytes = True, 0

    def on_headers_complete(self) -> None:
        """They are complete."""
        self._is_in_headers = False
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left to close."""
        self._end_wait()
        super().connection_lost(exc)

    def _begin_wait(self) -> None:
        self._closing = self.loop.call_later(HEADERS_WITHIN_S, self._look_again)

    def _look_again(self) -> None:
        self._closing = self.loop.call_later(_LOOK_AGAIN_S, self.transport.close)

    def _end_wait(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
