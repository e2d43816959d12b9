"""Transports of httpx that bound an answer as a whole: its bytes, and the time until its last one.

httpx limits the time of each read, and no length, so that a server that never ends its answer would hold its client, or
fill its memory. Here the read timeout of a request holds for its whole answer, headers included, plus a second for each
`LEAST_BYTES_PER_S` that have arrived. An answer has to come as it is: one that is compressed is refused, since it may
grow a thousandfold as it is decompressed. Its text is UTF-8 whatever it names: of Python's codecs some fail with any
class of error, and punycode takes time with the square of the length. Cookies are not kept, and redirections lead
nowhere: httpx parses the address of each, also where it does not follow it, and fails with `InvalidURL` at some.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import httpx

from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import num_marks

if TYPE_CHECKING:
    import httpcore

MAX_ANSWER_BYTES = 64 << 20
"""Longest answer, where the request does not allow a longer one (`allowing`)."""
MAX_ANSWER_MARKS = 1 << 20
"""Brackets, braces and quotes of an answer, likewise: lists take thirty times their bytes once they are parsed."""
MAX_HEAD_BYTES = 1 << 20
"""Of informational answers (1xx), of which a server may send any number, and headers, of which httpcore takes 100 kB;
with them comes a first part of the body."""
LEAST_BYTES_PER_S = 64 << 10
"""Rate of a slow network; also that of request bodies in `grpo_engine.serving.bodies`."""
_MOST_BYTES, _MOST_MARKS = "most_answer_bytes", "most_answer_marks"
_TIMEOUT = "timeout"


class AnswerTooLong(PeerError):
    """An answer is longer than its limit; not temporary."""


def allowing(most_bytes: int, most_marks: int | None = None) -> dict[str, Any]:
    """Extensions of a request whose answer may have this many bytes and marks, where that is more than others may have.

    Args:
        most_marks: None: any number, of an answer that is no JSON.
    """
    marks = None if most_marks is None else max(most_marks, MAX_ANSWER_MARKS)
    return {_MOST_BYTES: max(most_bytes, MAX_ANSWER_BYTES), _MOST_MARKS: marks}


def at_most(most_bytes: int) -> dict[str, Any]:
    """Extensions of a request whose answer has no more than this; it may take so many `LEAST_BYTES_PER_S` longer."""
    return {_MOST_BYTES: most_bytes}


class BoundedTransport(httpx.BaseTransport):
    """Bounds the answers of another transport."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self._inner = inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; its answer is bounded while it is read."""
        bounds = _Bounds(request)
        try:
            response = self._inner.handle_request(request)
        except httpx.ReadTimeout as error:
            raise bounds.too_late(error) from None
        try:
            bounds.check_headers(response)
        except PeerError:
            response.close()
            raise
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _Stream(response.stream, bounds)
        return response

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()


class AsyncBoundedTransport(httpx.AsyncBaseTransport):
    """As `BoundedTransport`."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; its answer is bounded while it is read."""
        bounds = _Bounds(request)
        try:
            response = await self._inner.handle_async_request(request)
        except httpx.ReadTimeout as error:
            raise bounds.too_late(error) from None
        try:
            bounds.check_headers(response)
        except PeerError:
            await response.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _AsyncStream(response.stream, bounds)
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


class _Bounds:
    """What the answer to one request may be."""

    def __init__(self, request: httpx.Request) -> None:
        self._request = request
        self._most_bytes: int = request.extensions.get(_MOST_BYTES, MAX_ANSWER_BYTES)
        self._most_marks: int | None = request.extensions.get(_MOST_MARKS, MAX_ANSWER_MARKS)
        self._num_bytes = self._num_marks = 0
        timeouts = request.extensions.get(_TIMEOUT, {})
        self._time = _TimeLeft(timeouts["read"], request) if timeouts.get("read") is not None else None
        request.extensions = {**request.extensions, _TIMEOUT: {**timeouts, "read": self._time}}

    @property
    def _where(self) -> str:
        return _where(self._request)

    def check_headers(self, response: httpx.Response) -> None:
        if self._time is not None:
            self._time.is_head = False
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise PeerError(
                f"{self._where}: the answer is compressed ({encoding[:40]}), which was not asked for: is this the "
                "right server, and is there a proxy before it?"
            )
        response.encoding = "utf-8"
        for name in ("set-cookie", "location"):
            response.headers.pop(name, None)
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._most_bytes:
            raise self._too_long()

    def count(self, part: bytes) -> bytes:
        self._num_bytes += len(part)
        if self._num_bytes > self._most_bytes:
            raise self._too_long()
        if self._most_marks is not None:
            self._num_marks += num_marks(part)
            if self._num_marks > self._most_marks:
                raise AnswerTooLong(
                    f"{self._where}: the answer has more than {self._most_marks:,} brackets, braces and quotes: is "
                    "this the right server?"
                )
        return part

    def too_late(self, error: httpx.ReadTimeout) -> httpx.ReadTimeout:
        """The error of a read, with what had arrived."""
        if self._time is None:
            return error
        return httpx.ReadTimeout(
            f"{self._where}: no complete answer in {self._time:g} s, of which {self._time.num_bytes:,} bytes arrived"
        )

    def _too_long(self) -> AnswerTooLong:
        return AnswerTooLong(
            f"{self._where}: the answer is longer than {self._most_bytes:,} bytes: is this the right server?"
        )


def _where(request: httpx.Request) -> str:
    """For a message: making it takes longer than all else here."""
    return f"{request.method} {request.url.copy_with(userinfo=b'', query=None)}"


class _Stream(httpx.SyncByteStream):
    def __init__(self, inner: httpx.SyncByteStream, bounds: _Bounds) -> None:
        self._inner = inner
        self._bounds = bounds

    def __iter__(self) -> Iterator[bytes]:
        try:
            for part in self._inner:
                yield self._bounds.count(part)
        except httpx.ReadTimeout as error:
            raise self._bounds.too_late(error) from None

    def close(self) -> None:
        self._inner.close()


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, inner: httpx.AsyncByteStream, bounds: _Bounds) -> None:
        self._inner = inner
        self._bounds = bounds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._inner:
                yield self._bounds.count(part)
        except httpx.ReadTimeout as error:
            raise self._bounds.too_late(error) from None

    async def aclose(self) -> None:
        await self._inner.aclose()


# --- reads of a connection: below the parser, since headers and the sizes of chunks may trickle too ------------------


class _TimeLeft(float):
    """The read timeout of a request, which httpcore passes on to each read as it is: here with the time that is left.

    It begins with the first read, so that a long request does not use up the time of its answer.
    """

    _until: float | None = None
    num_bytes = 0
    is_head = True
    """Whether the headers of the answer are not complete yet."""

    def __new__(cls, limit_s: float, request: httpx.Request) -> _TimeLeft:
        return super().__new__(cls, limit_s)

    def __init__(self, limit_s: float, request: httpx.Request) -> None:
        self._request = request

    def count(self, part: bytes) -> bytes:
        self.num_bytes += len(part)
        if self.is_head and self.num_bytes > MAX_HEAD_BYTES:
            raise AnswerTooLong(
                f"{_where(self._request)}: {self.num_bytes:,} bytes arrived, and no answer yet: is this the right "
                "server?"
            )
        return part

    def left_s(self) -> float:
        now = time.monotonic()
        if self._until is None:
            self._until = now + self
        left_s = self._until + self.num_bytes / LEAST_BYTES_PER_S - now
        if left_s <= 0:
            raise httpx.ReadTimeout("no time is left")
        return left_s


def limit_reads(stream: httpcore.NetworkStream) -> None:
    """Have the reads of a new connection end in the time that is left for the answer."""
    read = stream.read

    def read_in_time(max_bytes: int, timeout: float | None = None) -> bytes:
        if not isinstance(timeout, _TimeLeft):
            return read(max_bytes, timeout)
        return timeout.count(read(max_bytes, timeout.left_s()))

    stream.read = read_in_time  # type: ignore[method-assign]


def limit_async_reads(stream: httpcore.AsyncNetworkStream) -> None:
    """As `limit_reads`."""
    read = stream.read

    async def read_in_time(max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 (httpcore's name)
        if not isinstance(timeout, _TimeLeft):
            return await read(max_bytes, timeout)
        return timeout.count(await read(max_bytes, timeout.left_s()))

    stream.read = read_in_time  # type: ignore[method-assign]
