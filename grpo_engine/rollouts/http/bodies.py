"""Request and response bodies: size limits, OpenAPI schemas, compression.

Routes read their bodies through this module, so that one limit and one error format holds for all of them.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError

from grpo_engine.rollouts.validation import Refusal, decompressed, faults_of
from grpo_engine.wire.codec import num_marks

MessageT = TypeVar("MessageT", bound=BaseModel)
ResultT = TypeVar("ResultT")

_THREAD_FROM_BYTES = 256 * 1024
"""Bodies from this size on are parsed and compressed in a thread; below, the hop costs more than the work."""
_LONG_FROM_BYTES = 4 << 20
"""Decompressed. Tens of groups are shorter, and never wait for a longer one."""
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


async def parsed(request: Request, parse: Callable[[bytes], ResultT], *, max_bytes: int) -> ResultT:
    """Read, decompress and parse the request's body; long ones one at a time.

    Raises:
        Refusal: 413 when it is longer than `max_bytes` or has too many lists and texts, 400 or 415 when it cannot be
            decompressed; those of `parse`.
    """

    def checked(content: bytes) -> ResultT:
        if num_marks(content) > _MOST_MARKS:
            detail = f"the body has more than {_MOST_MARKS:,} brackets, braces and quotes: send fewer groups at once"
            raise Refusal(413, detail, "too_large")
        return parse(content)

    packed, encoding = await _received(request, max_bytes), request.headers.get("content-encoding")
    if len(packed) <= _LONG_FROM_BYTES:
        short_bytes = min(_LONG_FROM_BYTES, max_bytes)
        try:
            content = await run_sized(len(packed), lambda: decompressed(packed, encoding, max_bytes=short_bytes))
        except Refusal as refusal:
            if refusal.reason != "too_large" or short_bytes == max_bytes:
                raise
        else:
            return await run_sized(len(content), lambda: checked(content))
    async with request.app.state.long_body:
        return await asyncio.to_thread(lambda: checked(decompressed(packed, encoding, max_bytes=max_bytes)))


def take_long_bodies_in_turn(app: FastAPI) -> None:
    """Have an app decompress and parse one long body at a time: each may take gigabytes while it does.

    A few kilobytes of gzip become the longest body, which a list of small numbers multiplies by four. To parse one
    holds the GIL for seconds; of two, both would take it before the event loop has it again.
    """
    app.state.long_body = asyncio.Lock()


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
