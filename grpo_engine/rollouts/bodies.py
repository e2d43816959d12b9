"""Bodies of requests and answers over HTTP: read within bounds, described in the OpenAPI document, packed for those who
ask. Routes read their own bodies, so that one limit and one form of refusal holds for all of them.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError

from grpo_engine.rollouts.entry import Refusal, decompressed, faults_of

MessageT = TypeVar("MessageT", bound=BaseModel)
ResultT = TypeVar("ResultT")

_THREAD_FROM_BYTES = 256 * 1024
"""Bodies from here on are read and compressed in a thread: below, the hop costs more than the work."""
_COMPRESS_FROM_BYTES = 1000
"""Answers from here on are compressed for clients that ask, as the stock API does."""
_COMPRESS_LEVEL = 1
"""Level 9 takes ten times as long for a tenth fewer bytes; loopback needs neither."""


class Refused(BaseModel):
    """Body of every refusal."""

    detail: str | list[dict[str, Any]]
    """In words, or a list of faults in FastAPI's shape."""


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refused} for status in (400, 401, 403, 404, 409, 413, 415, 422, 503)
}
"""What the document says of them."""


def takes(schema: dict[str, Any]) -> dict[str, Any]:
    """What the document says of a body that a route reads by itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def message(request: Request, kind: type[MessageT], *, max_bytes: int) -> MessageT:
    """The request's body as one of `kind`.

    Raises:
        Refusal: 422 with the faults, and whatever `body` raises.
    """
    content = await body(request, max_bytes=max_bytes)
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise Refusal(422, faults_of(error), "malformed") from None


async def body(request: Request, *, max_bytes: int) -> bytes:
    """The request's body, decompressed, and never more of it than allowed.

    Raises:
        Refusal: 413 where it is longer, 400 or 415 where it cannot be decompressed.
    """
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise Refusal(413, f"the body is longer than {max_bytes} bytes: send fewer groups at once", "too_large")
        parts.append(part)
    encoding, packed = request.headers.get("content-encoding"), b"".join(parts)
    return await worked(len(packed), lambda: decompressed(packed, encoding, max_bytes=max_bytes))


async def worked(num_bytes: int, work: Callable[[], ResultT]) -> ResultT:
    """What `work` on so many bytes comes to; on many, it is done beside the event loop."""
    return work() if num_bytes < _THREAD_FROM_BYTES else await asyncio.to_thread(work)


async def json_answer(request: Request, content: bytes) -> Response:
    """An answer of ready JSON, compressed for those who ask."""
    if len(content) < _COMPRESS_FROM_BYTES or "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(content, media_type="application/json")
    packed = await worked(len(content), lambda: gzip.compress(content, _COMPRESS_LEVEL))
    headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return Response(packed, media_type="application/json", headers=headers)
