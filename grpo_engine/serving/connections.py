"""Limits of HTTP connections that uvicorn does not have: their number, the time for headers, their length and number,
chunks of a few bytes, requests that come before the ones before them are answered, and answers that are not read."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from grpo_engine.processes import MAX_DESCRIPTORS
from grpo_engine.serving.access import ON_TOKEN_KEY, Token, caller

HEADERS_WITHIN_S = 30.0
"""From the connection, or the first byte of a later request, to the end of its headers; uvicorn waits without end."""
READ_WITHIN_S = 60.0
"""For `LEAST_READ_BYTES` of an answer that waits to be read, without the token; uvicorn keeps it without end."""
LEAST_READ_BYTES = 4 << 20
"""In that time: 64 KiB/s, as of a body."""
MAX_UNREAD_BYTES = 256 << 20
"""Of answers to requests without the token: at 64 KiB/s one of 30 MB is read for 8 minutes, and others add up to it."""
_LOOK_AGAIN_S = 1.0
"""A loop that was blocked runs its timers before it reads what has arrived meanwhile."""
RESERVED_SHARE = 1 / 8
"""Of the descriptors, for files, and for connections that are accepted at once."""
MAX_HEADERS_BYTES = 64 * 1024
"""Of headers, and of what follows the chunks of a body (trailers). As h11 has it; httptools has none."""
MAX_HEADERS = 100
"""Of a request, trailers too. One of four bytes takes 150: in 800 connections 52 MB of them took 1.2 GB, and held the
event loop for 18 s."""
MAX_SMALL_CHUNKS = 1000
"""Chunks of a body beyond one for each `LEAST_CHUNK_BYTES`: 60 MB of those of one byte held the event loop for 13 s."""
LEAST_CHUNK_BYTES = 64
MAX_PIPELINED = 9
"""Requests of a connection that wait for an answer to an earlier one; with httptools uvicorn queues them without end,
and parses a read of 256 KiB at once, which may be 6000 of them. h11 queues none."""
MAX_WITHOUT_TOKEN = 2048
"""Connections whose last request lacked the token of a service that has one."""
TURNS = 16
TURNS_EVERY_S = 0.02
"""In which so many connections that lack the token may go on to their next request; the others wait, unread. Beside
2,048 that had one at all times, a request of the run waited for as many answers in each round of the event loop."""
WARN_EVERY_S = 60.0
"""Of each warning of uvicorn: it has one for every malformed request, and a client could fill a disk with them. So with
tracebacks of requests at which vLLM's routes fail, 6 kB each, and with what vLLM logs of requests that it refuses."""
MAX_WARNING_CHARS = 1000
"""vLLM logs the name of a model that it does not have: 25 requests a second wrote 25 MB/s."""


def exception_place(record: logging.LogRecord) -> str | None:
    """What was raised where; None without a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    frames = [] if error is None else list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return None
    frame, line = frames[-1]
    return f"{type(error).__name__} {frame.f_code.co_filename}:{line}"


def warning_or_exception(record: logging.LogRecord) -> str | None:
    """The same, and of a warning its text before anything is filled in."""
    return exception_place(record) or (str(record.msg) if record.levelno == logging.WARNING else None)


def warning_place(record: logging.LogRecord) -> str | None:
    """What was raised where, or where a warning or an error was logged, whose text may be of a client; below, only
    what a request without the token has logged: a header of each (`endpoint-load-metrics-format`) is a line of vLLM."""
    is_limited = record.levelno >= logging.WARNING or caller().token is Token.WRONG
    place = f"{record.pathname}:{record.lineno}" if is_limited else None
    return exception_place(record) or place


class SomeWarnings(logging.Filter):
    """Passes on the beginning of each kind of record once in `WARN_EVERY_S`, and all that are of no kind."""

    def __init__(
        self,
        kind_of: Callable[[logging.LogRecord], str | None] = warning_or_exception,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._kind_of = kind_of
        self._now = now
        self._logged_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log it."""
        kind = self._kind_of(record)
        if kind is None:
            return True
        now = self._now()
        if now - self._logged_at.get(kind, -WARN_EVERY_S) < WARN_EVERY_S:
            return False
        self._logged_at[kind] = now
        with suppress(TypeError, ValueError):  # its arguments do not fit, which the handler reports
            if len(text := record.getMessage()) > MAX_WARNING_CHARS:
                record.msg, record.args = f"{text[:MAX_WARNING_CHARS]}…", ()
        return True


def max_connections() -> int:
    """How many connections a process may hold; beyond that it closes those that have shown no token."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int((1 - RESERVED_SHARE) * (MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft))


class Strangers:
    """Connections of one server that have not shown its token, in the order in which another takes their place."""

    def __init__(self) -> None:
        kinds = ((is_wrong, is_busy) for is_busy in (False, True) for is_wrong in (True, False))
        self._kinds: dict[tuple[bool, bool], OrderedDict[LimitedProtocol, None]] = {
            kind: OrderedDict() for kind in kinds
        }
        """Each in the order in which they became so: idle ones before those with a request that is being answered."""
        self._turns = TURNS
        self._waiting: deque[LimitedProtocol] = deque()
        self._unread: OrderedDict[LimitedProtocol, None] = OrderedDict()
        """Those that have not read their answer, in the order in which they began to."""

    def put(self, connection: LimitedProtocol, *, is_busy: bool) -> None:
        """It is one, and now the newest of its kind."""
        self.remove(connection)
        self._kinds[connection.token is Token.WRONG, is_busy][connection] = None

    def remove(self, connection: LimitedProtocol) -> None:
        """It has shown the token, or is closed."""
        for each in self._kinds.values():
            each.pop(connection, None)

    def take_turn(self, connection: LimitedProtocol) -> None:
        """Read its next request, at once or in its turn."""
        if self._turns == TURNS:
            connection.loop.call_later(TURNS_EVERY_S, self._renew_turns, connection.loop)
        if self._turns:
            self._turns -= 1
        else:
            connection.flow.pause_reading()
            self._waiting.append(connection)

    def _renew_turns(self, loop: asyncio.AbstractEventLoop) -> None:
        self._turns = TURNS
        while self._waiting and self._turns:
            connection = self._waiting.popleft()
            if not connection.transport.is_closing():
                connection.flow.resume_reading()
                self._turns -= 1
        if self._turns < TURNS:
            loop.call_later(TURNS_EVERY_S, self._renew_turns, loop)

    def put_unread(self, connection: LimitedProtocol) -> None:
        """It has an answer to read; where there are too many bytes of them, the slowest readers are closed."""
        self._unread[connection] = None
        num_bytes = sum(each.transport.get_write_buffer_size() for each in self._unread)
        while num_bytes > MAX_UNREAD_BYTES and len(self._unread) > 1:
            slowest = next(iter(self._unread))
            num_bytes -= slowest.transport.get_write_buffer_size()
            self.remove_unread(slowest)
            slowest.abort()

    def remove_unread(self, connection: LimitedProtocol) -> None:
        """It has read its answer, or is closed."""
        self._unread.pop(connection, None)

    def num_wrong(self) -> int:
        """Those with a request that lacked the token of a service that has one."""
        return sum(len(each) for (is_wrong, _), each in self._kinds.items() if is_wrong)

    def first(self, *, is_wrong: bool) -> LimitedProtocol | None:
        """The one to close; only one of `num_wrong` if `is_wrong`."""
        kinds = (each for (lacks, _), each in self._kinds.items() if each and (lacks or not is_wrong))
        return next((next(iter(each)) for each in kinds), None)


_strangers: WeakKeyDictionary[Any, Strangers] = WeakKeyDictionary()
"""By the state of a uvicorn server."""


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """uvicorn's protocol, which also closes a connection whose headers do not come to their end."""

    _closing: asyncio.TimerHandle | None = None
    """Closes the connection, unless headers are complete before."""
    _reading: asyncio.TimerHandle | None = None
    """Closes the connection, unless enough of the answer is read before."""
    token: Token | None = None
    """What its last request had of the service's token; None before the first."""
    _answering: Any = None
    """uvicorn's cycle of the request that is being answered, or was last; `cycle` is that of the newest one."""
    _is_in_headers = False
    _num_header_bytes = 0
    _num_headers = 0
    _num_read_bytes = 0
    _num_body_bytes = 0
    _num_chunks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for the first request; one connection too many takes the place of one without the token."""
        super().connection_made(transport)
        self.ws_protocol_class = None  # no route has websockets, whose connections know no token
        self._begin_wait()
        self._strangers = _strangers.setdefault(self.server_state, Strangers())
        if len(self.connections) > max_connections() and (other := self._strangers.first(is_wrong=False)) is not None:
            other.abort()
        self._strangers.put(self, is_busy=False)

    def abort(self) -> None:
        """Close it, whatever it is doing."""
        self._strangers.remove(self)
        self.connections.discard(self)
        self._stop_answering()
        self.transport.abort()

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
        self._num_headers = self._num_body_bytes = self._num_chunks = 0

    def on_chunk_header(self) -> None:
        """Count what follows, unless it is a part of the body; the chunks before it may have come in the same read."""
        self._is_in_headers, self._num_header_bytes = True, -self._num_read_bytes
        self._num_chunks += 1
        if self._num_chunks > MAX_SMALL_CHUNKS + self._num_body_bytes // LEAST_CHUNK_BYTES:
            raise ValueError(f"the chunks of a body have less than {LEAST_CHUNK_BYTES} bytes on average")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, and no trailer: uvicorn adds it to the headers of the request, which is being answered."""
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise ValueError(f"more than {MAX_HEADERS} headers")
        if self.cycle is None or self.scope is not self.cycle.scope:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._is_in_headers = False
        self._num_body_bytes += len(body)
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
        self.scope[ON_TOKEN_KEY] = self._on_token
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle

    def on_response_complete(self) -> None:
        """The next request may be answered; without one the connection is idle."""
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._answering = following or self._answering
        if following is None and self.token is not Token.RIGHT and self in self.connections:
            self._strangers.put(self, is_busy=False)
            if self.token is Token.WRONG and not self.transport.is_closing():
                self._strangers.take_turn(self)

    def send_400_response(self, msg: str) -> None:
        """Refuse what came; a request before it is not answered any more."""
        self._stop_answering()
        super().send_400_response(msg)

    def _on_token(self, token: Token) -> None:
        """A request is being answered; with many that lack the token it takes the place of another."""
        self.token = token
        if self not in self.connections:
            return
        if token is Token.RIGHT:
            self._strangers.remove(self)
            return
        self._strangers.put(self, is_busy=True)
        if self._strangers.num_wrong() > MAX_WITHOUT_TOKEN and (other := self._strangers.first(is_wrong=True)):
            other.abort()

    def _stop_answering(self) -> None:
        """Have the request that is being answered end as for a client that is gone; uvicorn tells only the newest."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def pause_writing(self) -> None:
        """More of an answer is there than the client has read: it is to read on."""
        super().pause_writing()
        self._await_reader()
        if self.token is Token.WRONG:
            self._strangers.put_unread(self)

    def resume_writing(self) -> None:
        """It has read nearly all."""
        super().resume_writing()
        self._end_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left to close."""
        self._end_wait()
        self._end_reading()
        self._strangers.remove(self)
        self._stop_answering()
        super().connection_lost(exc)

    def _begin_wait(self) -> None:
        self._closing = self.loop.call_later(HEADERS_WITHIN_S, self._look_again)

    def _look_again(self) -> None:
        self._closing = self.loop.call_later(_LOOK_AGAIN_S, self.transport.close)

    def _await_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()

        def look_again() -> None:
            if self.token is not Token.RIGHT and self.transport.get_write_buffer_size() > unread - LEAST_READ_BYTES:
                self.abort()
            else:
                self._await_reader()

        self._reading = self.loop.call_later(READ_WITHIN_S, look_again)

    def _end_reading(self) -> None:
        self._strangers.remove_unread(self)
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _end_wait(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
