"""Request and response bodies: size limits, OpenAPI schemas, compression.

Routes read their bodies through this module, so that one limit and one error format holds for all of them.
"""

from __future__ import annotations

import asyncio
import gzip
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError

from grpo_engine.rollouts.validation import Refusal, decompressed, faults_of
from grpo_engine.wire.codec import num_marks

MessageT = TypeVar("MessageT", bound=BaseModel)
ResultT = TypeVar("ResultT")

_THREAD_FROM_BYTES = 256 * 1024
"""Bodies from this size on are parsed and compressed in a thread; below, the hop costs more than the work."""
_PACKED_FROM_BYTES = 64 * 1024
"""The same of a gzip body as it is received: tokens and log-probabilities take a third of their length or more."""
_LONG_FROM_BYTES = 4 << 20
"""Decompressed. Tens of groups are shorter, and never wait for a longer one."""
_THREADS = 4
"""Bodies that are decompressed and parsed in threads at once, besides a long one: of those that wait, only what was
received is in memory. 300 times 4 kB that become 4 MiB took 1.2 GB, and held the event loop for 21 s."""
_MANY_MARKS = 4096
"""A body with more waits for others of that kind. A post of tens of groups has less, whatever their length; one of
1,024 has 18,000 at least."""
_TURN_S = 0.02
"""Of a turn of the event loop, for bodies that are parsed on it; so many more than one that arrive at once are parsed
in the next turns."""
_MOST_MARKS = 1 << 22
"""A hundred groups have less, also where each token has a list for distillation."""
_COMPRESS_FROM_BYTES = 1000
"""Answers from this size on are compressed for clients that accept gzip, as in the stock API."""
_COMPRESS_LEVEL = 1
"""Level 9 takes ten times as long for a tenth fewer bytes."""


class Refused(BaseModel):
    """Body of every error answer."""

    detail: str | list[dict[str, Any]]
    """A message, or a list of faults in FastAPI's format."""


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refused} for status in (400, 401, 403, 404, 408, 409, 413, 415, 422, 503)
}
"""Error answers in the OpenAPI document."""


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI entry for a body that the route reads itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class BodyTurns:
    """Shares the event loop and memory among bodies that arrive at once. Use it from one event loop."""

    def __init__(self) -> None:
        self.long = asyncio.Lock()
        """Held for one of the longest bodies, which takes gigabytes: a few kilobytes of gzip become one, and a list of
        small numbers multiplies that by four. To parse one holds the GIL for seconds; of two, both would take it before
        the event loop has it again."""
        self.many = asyncio.Lock()
        """Held for one body of many parts: what follows it holds the event loop again."""
        self._threads = asyncio.Semaphore(_THREADS)
        self._waiting: deque[Callable[[], None]] = deque()
        self._turn_ends_s: float | None = None
        """Until when this turn of the event loop may be used; None before its first use."""

    async def in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        """The result of `work` in a thread, of which few run at once."""
        async with self._threads:
            return await asyncio.to_thread(work)

    async def on_loop(self, work: Callable[[], ResultT]) -> ResultT:
        """The result of `work` on the event loop: now, or in a later turn where this one was used for `_TURN_S`."""
        loop = asyncio.get_running_loop()
        if self._turn_ends_s is None:
            self._turn_ends_s = loop.time() + _TURN_S
            loop.call_soon(self._next_turn, loop)
        if not self._waiting and loop.time() < self._turn_ends_s:
            return work()
        result: asyncio.Future[ResultT] = loop.create_future()

        def do() -> None:
            if result.done():  # its request was cancelled
                return
            try:
                result.set_result(work())
            except Exception as error:  # whatever it is, its request has to be answered
                result.set_exception(error)

        self._waiting.append(do)
        return await result

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._turn_ends_s = None
        if not self._waiting:
            return
        self._turn_ends_s = loop.time() + _TURN_S
        loop.call_soon(self._next_turn, loop)
        self._waiting.popleft()()
        while self._waiting and loop.time() < self._turn_ends_s:
            self._waiting.popleft()()


async def message(request: Request, kind: type[MessageT], *, max_bytes: int) -> MessageT:
    """Read the request's body as a `kind`.

    Raises:
        Refusal: 422 with the faults, and those of `parsed`.
    """

    def read(content: bytes) -> MessageT:
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            raise Refusal(422, faults_of(error), "malformed") from None

    return await parsed(request, read, max_bytes=max_bytes)


class _IsLonger(Exception):
    """A body is longer than one that is read in this way."""


class _HasMany(Exception):
    """A body has more parts than one that waits for no other."""


async def parsed(
    request: Request,
    parse: Callable[[bytes], ResultT],
    *,
    max_bytes: int,
    before_many: Callable[[], Awaitable[None]] | None = None,
) -> ResultT:
    """Read, decompress and parse the request's body; long ones one at a time, and so those of many parts.

    Args:
        before_many: ends what bodies of many parts before this one have begun.

    Raises:
        Refusal: 413 when it is longer than `max_bytes` or has too many lists and texts, 400 or 415 when it cannot be
            decompressed; those of `parse`.
    """
    packed, encoding = await _received(request, max_bytes), request.headers.get("content-encoding")

    def read(most_bytes: int, most_marks: int = _MOST_MARKS) -> ResultT:
        try:
            content = decompressed(packed, encoding, max_bytes=most_bytes)
        except Refusal as refusal:
            if refusal.reason == "too_large" and most_bytes < max_bytes:
                raise _IsLonger from None
            raise
        num = num_marks(content)
        if num > _MOST_MARKS:
            detail = f"the body has more than {_MOST_MARKS:,} brackets, braces and quotes: send fewer groups at once"
            raise Refusal(413, detail, "too_large")
        if num > most_marks:
            raise _HasMany
        return parse(content)

    turns: BodyTurns = request.app.state.body_turns
    ways: list[tuple[Callable[[Callable[[], ResultT]], Awaitable[ResultT]], int]] = []
    if len(packed) < (_PACKED_FROM_BYTES if encoding else _THREAD_FROM_BYTES):
        ways.append((turns.on_loop, min(_THREAD_FROM_BYTES, max_bytes)))
    if len(packed) <= _LONG_FROM_BYTES:
        ways.append((turns.in_thread, min(_LONG_FROM_BYTES, max_bytes)))
    for run, most_bytes in ways:
        try:
            return await run(partial(read, most_bytes, _MANY_MARKS))
        except _IsLonger:
            continue
        except _HasMany:
            async with turns.many:
                if before_many is not None:
                    await before_many()
                return await run(partial(read, most_bytes))
    async with turns.long:
        return await asyncio.to_thread(read, max_bytes)


async def _received(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise Refusal(413, f"the body is longer than {max_bytes} bytes: send fewer groups at once", "too_large")
        parts.append(part)
    return b"".join(parts)


async def run_sized(num_bytes: int, work: Callable[[], ResultT]) -> ResultT:
    """Run `work` on this many bytes, in a thread if they are many."""
    return work() if num_bytes < _THREAD_FROM_BYTES else await asyncio.to_thread(work)


async def json_answer(request: Request, content: bytes) -> Response:
    """An answer of encoded JSON, compressed for clients that accept gzip."""
    if len(content) < _COMPRESS_FROM_BYTES or "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(content, media_type="application/json")
    packed = await run_sized(len(content), lambda: gzip.compress(content, _COMPRESS_LEVEL, mtime=0))
    headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return Response(packed, media_type="application/json", headers=headers)
