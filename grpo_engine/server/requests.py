"""What every route shares: reading bodies, who may ask, aborting for a client that left, and errors as statuses."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as StarletteMessage

from grpo_engine.config import did_you_mean
from grpo_engine.errors import BridgeError, DataError, GrpoError, HalfWritten, ModelError
from grpo_engine.server.engine import EngineUnavailable, WeightsBusy

ModelT = TypeVar("ModelT", bound=BaseModel)
ResultT = TypeVar("ResultT")

_STATUSES: tuple[tuple[type[GrpoError], int], ...] = (
    (EngineUnavailable, 503),
    (HalfWritten, 503),
    (WeightsBusy, 409),
    (BridgeError, 409),
    (DataError, 400),
    (ModelError, 400),
)
MAX_BODY_BYTES = 64 << 20
"""A prompt of a million tokens takes 8 MB."""
_OF_PROXIES = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


class ClientLeft(Exception):
    """The client closed the connection; nobody reads the answer."""


def add_error_answers(app: FastAPI) -> None:
    """Answer our errors with `{"detail": "what is wrong, and what to do"}` and a fitting status."""

    @app.exception_handler(GrpoError)
    async def _on_error(_request: Request, error: GrpoError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_of(error))

    @app.exception_handler(RequestValidationError)
    async def _on_invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        faults = [f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in error.errors()]
        return JSONResponse({"detail": "; ".join(faults)}, 422)

    @app.exception_handler(Exception)
    async def _on_defect(_request: Request, error: Exception) -> JSONResponse:
        why = f"{type(error).__name__}: {error}"  # memory that runs out in a batch, for one
        return JSONResponse({"detail": f"{why}; the server's log says where"}, 500)

    @app.exception_handler(ClientLeft)
    async def _on_left(_request: Request, _error: ClientLeft) -> JSONResponse:
        return JSONResponse({"detail": "the client left"}, 499)


def status_of(error: GrpoError) -> int:
    """The HTTP status that says what an error says."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


async def read_body(request: Request, model: type[ModelT]) -> ModelT:
    """The body as `model`; 422 naming each key that is unknown or wrong, 413 where it is longer than any prompt.

    Raises:
        ClientLeft: the client closed the connection before it had sent all of it.
    """
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES:,} bytes, which no prompt is")
        return model.model_validate_json(bytes(body))
    except ClientDisconnect:
        raise ClientLeft from None
    except ValidationError as error:
        raise HTTPException(422, "; ".join(dict.fromkeys(_fault_lines(error, model)))) from None


def only_this_machine(request: Request) -> None:
    """Refuse whoever is no program on this machine: these routes read paths and change weights.

    A proxy speaks for somebody elsewhere, and so does a web page in a browser here, even one under a name of its own
    that resolves to loopback.
    """
    peer = request.client.host if request.client else "an unknown peer"
    headers = request.headers
    if not _is_loopback(peer):
        why = f"not {peer}"
    elif (header := next((name for name in _OF_PROXIES if name in headers), None)) is not None:
        why = f"not what a proxy passes on (it sent {header})"
    elif "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        why = f"and no web page ({headers.get('origin', 'of another site')})"
    elif not _is_name_of_this_machine(_without_port(headers.get("host", ""))):
        why = f"by its own name, not as {headers['host']}"
    else:
        return
    raise HTTPException(403, f"{request.url.path} answers this machine alone, {why}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_name_of_this_machine(host: str) -> bool:
    """A web page has a name that somebody gave it; an address it cannot have."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.lower() in ("", "localhost", socket.gethostname().lower())
    return True


def _without_port(host: str) -> str:
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


class RefuseAtTheEnd:
    """ASGI middleware: requests that a shutdown cuts off are answered 503, "ask again", and not 500.

    A trainer waits for the next server on a 503; a 500 it takes for a fault.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        has_begun = False

        async def note(message: StarletteMessage) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except asyncio.CancelledError:  # uvicorn's, once its grace for open requests is over
            if has_begun or scope["type"] != "http":
                raise
            await JSONResponse({"detail": "this server is ending; ask the one that follows"}, 503)(scope, receive, send)


async def unless_client_leaves(request: Request, work: Awaitable[ResultT]) -> ResultT:
    """The result of `work`, which is cancelled when the client closes the connection.

    Raises:
        ClientLeft: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_client_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _fault_lines(error: ValidationError, model: type[BaseModel]) -> list[str]:
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"] if part not in ("TokenPrompt", "str"))
        if fault["type"] == "extra_forbidden":
            lines.append(f"{key}: not a parameter here{did_you_mean(key, model.model_fields)}")
        else:
            lines.append(f"{key or 'body'}: {fault['msg']}")
    return lines
