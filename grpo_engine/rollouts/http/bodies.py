"""Request and response bodies: size limits, OpenAPI schemas, compression.

Routes read their bodies through this module, so that one limit and one error format holds for all of them.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError

from grpo_engine.rollouts.validation import Refusal, decompressed, faults_of

MessageT = TypeVar("MessageT", bound=BaseModel)
ResultT = TypeVar("ResultT")

_THREAD_FROM_BYTES = 256 * 1024
"""Bodies from this size on are parsed and compressed in a thread; below, the hop costs more than the work."""
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
        Refusal: 422 with the faults, and those of `body`.
    """
    content = await body(request, max_bytes=max_bytes)
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise Refusal(422, faults_of(error), "malformed") from None


async def body(request: Request, *, max_bytes: int) -> bytes:
    """Read and decompress the request's body, up to `max_bytes`.

    Raises:
        Refusal: 413 when it is longer, 400 or 415 when it cannot be decompressed.
    """
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise Refusal(413, f"the body is longer than {max_bytes} bytes: send fewer groups at once", "too_large")
        parts.append(part)
    encoding, packed = request.headers.get("content-encoding"), b"".join(parts)
    return await run_sized(len(packed), lambda: decompressed(packed, encoding, max_bytes=max_bytes))


async def run_sized(num_bytes: int, work: Callable[[], ResultT]) -> ResultT:
    """Run `work` on this many bytes, in a thread if they are many."""
    return work() if num_bytes < _THREAD_FROM_BYTES else await asyncio.to_thread(work)


async def json_answer(request: Request, content: bytes) -> Response:
    """An answer of encoded JSON, compressed for clients that accept gzip."""
    if len(content) < _COMPRESS_FROM_BYTES or "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(content, media_type="application/json")
    packed = await run_sized(len(content), lambda: gzip.compress(content, _COMPRESS_LEVEL))
    headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return Response(packed, media_type="application/json", headers=headers)
