"""Limits of HTTP connections that uvicorn does not have: their number, the time for headers, their length, requests
that come before the ones before them are answered, and answers that are not read."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from grpo_engine.processes import MAX_DESCRIPTORS
from grpo_engine.serving.access import TOKEN_KEY, Token

HEADERS_WITHIN_S = 30.0
"""From the connection, or the first byte of a later request, to the end of its headers; uvicorn waits without end."""
READ_WITHIN_S = 60.0
"""For `LEAST_READ_BYTES` of an answer that waits to be read, without the token; uvicorn keeps it without end."""
LEAST_READ_BYTES = 4 << 20
"""In that time: 64 KiB/s, as of a body."""
_LOOK_AGAIN_S = 1.0
"""A loop that was blocked runs its timers before it reads what has arrived meanwhile."""
RESERVED_SHARE = 1 / 8
"""Of the descriptors, for files, and for connections that are accepted at once."""
MAX_HEADERS_BYTES = 64 * 1024
"""Of headers, and of what follows the chunks of a body (trailers). As h11 has it; httptools has none."""
MAX_PIPELINED = 32
"""Requests of a connection that wait for an answer to an earlier one; with httptools uvicorn queues them without end,
and parses a read of 256 KiB at once, which may be 6000 of them. h11 queues none. Our clients send none."""
WARN_EVERY_S = 60.0
"""Of each warning of uvicorn: it has one for every malformed request, and a client could fill a disk with them."""


class SomeWarnings(logging.Filter):
    """Passes on each warning once in `WARN_EVERY_S`."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._logged_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log it."""
        if record.levelno != logging.WARNING:
            return True
        now, text = self._now(), str(record.msg)
        if now - self._logged_at.get(text, -WARN_EVERY_S) < WARN_EVERY_S:
            return False
        self._logged_at[text] = now
        return True


def max_connections() -> int:
    """How many connections a process may hold; beyond that it closes those that have shown no token."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int((1 - RESERVED_SHARE) * (MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft))


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """uvicorn's protocol, which also closes a connection whose headers do not come to their end."""

    _closing: asyncio.TimerHandle | None = None
    """Closes the connection, unless headers are complete before."""
    _reading: asyncio.TimerHandle | None = None
    """Closes the connection, unless enough of the answer is read before."""
    opened_at = 0.0
    _is_in_headers = False
    _num_header_bytes = 0
    _num_read_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for the first request; one connection too many takes the place of one without the token."""
        super().connection_made(transport)
        self.ws_protocol_class = None  # no route has websockets, whose connections know no token
        self._begin_wait()
        self.opened_at = self.loop.time()
        if len(self.connections) > max_connections():
            others = [each for each in self.connections if each is not self and not each.has_token]
            if others:
                min(others, key=lambda each: (each.is_busy, each.opened_at)).transport.abort()

    @property
    def has_token(self) -> bool:
        """Whether its last request had the service's token."""
        return self.cycle is not None and self.cycle.scope.get(TOKEN_KEY) is Token.RIGHT

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        before = self.cycle
        self._num_read_bytes = len(data)
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
        """Count the headers that begin; only httptools calls this and the following."""
        super().on_message_begin()
        self._is_in_headers, self._num_header_bytes = True, 0

    def on_chunk_header(self) -> None:
        """Count what follows, unless it is a part of the body; the chunks before it may have come in the same read."""
        self._is_in_headers, self._num_header_bytes = True, -self._num_read_bytes

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, and no trailer: uvicorn adds it to the headers of the request, which is being answered."""
        if self.cycle is None or self.scope is not self.cycle.scope:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._is_in_headers = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for the next request."""
        self._is_in_headers = False
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        """They are complete; one request too many ends the connection, as one that is malformed does."""
        self._is_in_headers = False
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError(f"more than {MAX_PIPELINED} requests before the first is answered")
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """More of an answer is there than the client has read: it is to read on."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """It has read nearly all."""
        super().resume_writing()
        self._end_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left to close."""
        self._end_wait()
        self._end_reading()
        super().connection_lost(exc)

    def _begin_wait(self) -> None:
        self._closing = self.loop.call_later(HEADERS_WITHIN_S, self._look_again)

    def _look_again(self) -> None:
        self._closing = self.loop.call_later(_LOOK_AGAIN_S, self.transport.close)

    def _await_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()

        def look_again() -> None:
            if not self.has_token and self.transport.get_write_buffer_size() > unread - LEAST_READ_BYTES:
                self.transport.abort()
            else:
                self._await_reader()

        self._reading = self.loop.call_later(READ_WITHIN_S, look_again)

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _end_wait(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
