"""The HTTP application of a parameter service: a trainer pushes versions, and services of other machines fetch them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from grpo_engine.bridges.transport.parameter_store import ParameterStore
from grpo_engine.errors import BridgeError
from grpo_engine.parameters.machines import OtherMachines
from grpo_engine.serving.access import AccessControl
from grpo_engine.serving.bodies import BodyLimits
from grpo_engine.wire.codec import first_fault
from grpo_engine.wire.parameters import (
    BEGIN_ROUTE,
    COMMIT_ROUTE,
    FILE_ROUTE,
    HEALTH_ROUTE,
    MACHINES_ROUTE,
    STATE_ROUTE,
    BeginAnswer,
    BeginRequest,
    CommitRequest,
    MachineReport,
)

MOST_BODY_BYTES = 1 << 16
CHUNK_BYTES = 1 << 20

MessageT = TypeVar("MessageT", bound=BaseModel)


class _Refused(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def create_app(
    store: ParameterStore, *, host: str, token: str | None, machines: OtherMachines | None = None
) -> Starlette:
    """All routes over one store; its state is that of all machines that report to it."""
    others = machines or OtherMachines()

    async def health(_request: Request) -> Response:
        return Response()

    async def state(_request: Request) -> Response:
        return JSONResponse(others.with_them(store.state()).model_dump())

    async def report(request: Request) -> Response:
        others.take(await _read(request, MachineReport))
        return Response()

    async def begin(request: Request) -> Response:
        body = await _read(request, BeginRequest)
        path = await asyncio.to_thread(store.begin, body)
        return JSONResponse(BeginAnswer(path=str(path)).model_dump())

    async def commit(request: Request) -> Response:
        body = await _read(request, CommitRequest)
        state = await asyncio.to_thread(store.commit, body.policy_version)
        return JSONResponse(others.with_them(state).model_dump())

    def file_of(request: Request) -> Path:
        """A file of the newest version; no other, and none outside of its folder."""
        newest, name = store.newest, request.path_params["name"]
        if newest is None or newest.number != request.path_params["number"]:
            raise _Refused(404, f"number {request.path_params['number']} is not the newest version here")
        path: Path = newest.checkpoint.path / name
        if path.parent != newest.checkpoint.path or path.is_symlink() or not path.is_file():
            raise _Refused(404, f"{name!r} is not a file of that version")
        return path

    async def content(request: Request) -> Response:
        path = file_of(request)
        headers = {"Content-Length": str(path.stat().st_size)}
        return StreamingResponse(_chunks(path), media_type="application/octet-stream", headers=headers)

    async def sha256(request: Request) -> Response:
        path = file_of(request)
        return PlainTextResponse(await asyncio.to_thread(_digest, path, path.stat().st_mtime_ns))

    async def on_refused(_request: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, _Refused) else 400
        return JSONResponse({"detail": str(error)}, status)

    app = Starlette(
        routes=[
            Route(HEALTH_ROUTE, health),
            Route(STATE_ROUTE, state),
            Route(BEGIN_ROUTE, begin, methods=["POST"]),
            Route(COMMIT_ROUTE, commit, methods=["POST"]),
            Route(MACHINES_ROUTE, report, methods=["POST"]),
            Route(f"{FILE_ROUTE}/{{number:int}}/{{name}}", content),
            Route(f"{FILE_ROUTE}/{{number:int}}/{{name}}/sha256", sha256),
        ],
        exception_handlers={_Refused: on_refused, BridgeError: on_refused, OSError: on_refused},
    )
    app.add_middleware(BodyLimits, longest_bytes=MOST_BODY_BYTES, num_at_once=8)
    app.add_middleware(AccessControl, host=host, token=token, needs_token=lambda path: path != HEALTH_ROUTE)
    return app


async def _read(request: Request, kind: type[MessageT]) -> MessageT:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise _Refused(413, f"the body is longer than {MOST_BODY_BYTES:,} bytes")
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        raise _Refused(422, first_fault(error)) from None


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    """The content, also where the file is removed meanwhile."""
    with path.open("rb") as file:
        while part := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield part


@lru_cache(maxsize=256)
def _digest(path: Path, _mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
