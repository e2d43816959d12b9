"""Shared by all routes: reading bodies, access control, aborting for a disconnected client, errors as statuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pydantic_core
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as StarletteMessage

from grpo_engine.config import did_you_mean
from grpo_engine.errors import BridgeError, DataError, GrpoError, HalfWritten, ModelError
from grpo_engine.server.engine import EngineUnavailable, WeightsBusy
from grpo_engine.serving.access import (
    TOKEN_HEADERS,
    TOKEN_REQUIRED,
    Token,
    caller,
    is_loopback,
    is_name_of_this_machine,
    token_of,
)
from grpo_engine.wire.codec import shortened

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
"""A prompt of a million tokens has 8 MB."""
MAX_BODY_BYTES_WITHOUT_TOKEN = 1 << 20
"""Where the server has a token: a text of that length takes two seconds to encode."""
MAX_BODY_MARKS = 1 << 20
"""Brackets, braces and quotes in a body; the longest conversation has a tenth of that beside those in its text."""
_MAX_FAULTS = 10
"""Of a body that an answer names."""
_PATH_SHOWN_CHARS = 100
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


class ClientDisconnected(Exception):
    """The client closed the connection before the answer."""


def add_error_answers(app: FastAPI) -> None:
    """Answer our errors with `{"detail": "what is wrong, and what to do"}` and the matching status."""

    @app.exception_handler(GrpoError)
    async def _on_error(_request: Request, error: GrpoError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_of(error))

    @app.exception_handler(RequestValidationError)
    async def _on_invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        faults = error.errors()[:_MAX_FAULTS]
        lines = [shortened(f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}") for fault in faults]
        return JSONResponse({"detail": "; ".join(lines)}, 422)

    @app.exception_handler(Exception)
    async def _on_unexpected(_request: Request, error: Exception) -> JSONResponse:
        why = f"{type(error).__name__}: {error}"  # e.g. out of memory in a batch
        return JSONResponse({"detail": f"{why}; see the traceback in the server's log"}, 500)

    @app.exception_handler(ClientDisconnected)
    async def _on_disconnected(_request: Request, _error: ClientDisconnected) -> JSONResponse:
        return JSONResponse({"detail": "the client disconnected"}, 499)


def status_of(error: GrpoError) -> int:
    """The HTTP status of an error."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


async def read_body(request: Request, model: type[ModelT]) -> ModelT:
    """The body as `model`; 422 naming each unknown or wrong key, and as `read_bytes`."""
    return _checked(await read_bytes(request), model)


async def read_bytes(request: Request) -> bytes:
    """The body; 413 if it is longer than any prompt.

    Raises:
        ClientDisconnected: the client closed the connection before the end of the body.
    """
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES:,} bytes")
    except ClientDisconnect:
        raise ClientDisconnected from None
    return bytes(body)


def _checked(body: bytes, model: type[ModelT]) -> ModelT:
    try:
        value = pydantic_core.from_json(body)
    except ValueError as error:
        raise HTTPException(422, f"body: not JSON: {error}") from None
    faults = []
    if isinstance(value, dict) and model.model_config.get("extra") == "forbid":
        unknown = [key for key in value if key not in model.model_fields]
        faults = [
            f"{shortened(key)}: not a parameter here{did_you_mean(key, model.model_fields)}"
            for key in unknown[:_MAX_FAULTS]
        ]
    try:
        checked = model.model_validate(value, extra="ignore")  # each unknown key would be an error, of half a kilobyte
    except ValidationError as error:
        faults += _fault_lines(error)
    else:
        if not faults:
            return checked
    raise HTTPException(422, "; ".join(dict.fromkeys(faults)))


def only_owner(request: Request) -> None:
    """Refuse all but programs on this machine that have the token, if there is one: these routes steer the run.

    They read paths and change weights. A proxy may act for a remote client, and so may a web page in a local browser,
    even one whose own host name resolves to loopback.

    Raises:
        HTTPException: 403, or 401 where only the token is wrong.
    """
    peer = request.client.host if request.client else "an unknown peer"
    headers, token = request.headers, token_of(request.scope)
    if not is_loopback(peer):
        why = f"not {peer}"
    elif (header := next((name for name in _PROXY_HEADERS if name in headers), None)) is not None:
        why = f"not clients behind a proxy (the request has {header})"
    elif "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        why = f"not web pages ({headers.get('origin', 'of another site')})"
    elif token is not Token.RIGHT and not is_name_of_this_machine(headers.get("host", "")):
        why = f"under its own name, not as {headers['host']}"
    elif token is Token.WRONG:
        raise HTTPException(401, TOKEN_REQUIRED, TOKEN_HEADERS)
    else:
        return
    raise HTTPException(403, f"{request.url.path} answers only this machine, {why}")


def read_path(text: str) -> Path:
    """An absolute path from a request, whether anything is there or not.

    Raises:
        DataError: no file can have this path, or this server may not look.
    """
    path = Path(text).absolute()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # too long, a loop of links, no permission; a NUL character
        why = getattr(error, "strerror", None) or error
        shown = text if len(text) <= _PATH_SHOWN_CHARS else f"{text[:_PATH_SHOWN_CHARS]}…"
        shown = shown.encode(errors="replace").decode()  # half a character cannot be in an answer
        raise DataError(f"{shown}: {why}: send the path of a folder that this server can read") from None
    return path


class AnswerMaker:
    """Makes the bodies of answers that may be long.

    Those to requests without the token, where the server has one, are made in another thread, one at a time: half a
    million log-probabilities take seconds, during which the event loop would serve nobody.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def answer(self, make: Callable[[], bytes]) -> Response:
        """The answer whose body, of JSON, is made so."""
        if caller().token is Token.WRONG:
            async with self._turn:
                content = await asyncio.to_thread(make)
        else:
            content = make()
        return Response(content, media_type="application/json")


class RefuseDuringShutdown:
    """ASGI middleware: requests that a shutdown cuts off are answered 503 instead of 500.

    A trainer waits for the next server on a 503, and reports a 500 as an error.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        has_begun = False

        async def record_start(message: StarletteMessage) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, record_start)
        except asyncio.CancelledError:  # from uvicorn, after its grace period for open requests
            if has_begun or scope["type"] != "http":
                raise
            await JSONResponse({"detail": "this server is shutting down; retry"}, 503)(scope, receive, send)


async def unless_disconnected(request: Request, work: Awaitable[ResultT]) -> ResultT:
    """The result of `work`, which is cancelled when the client closes the connection.

    Raises:
        ClientDisconnected: the client closed the connection.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        disconnected.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _fault_lines(error: ValidationError) -> list[str]:
    lines = []
    for fault in error.errors(include_input=False, include_url=False, include_context=False)[:_MAX_FAULTS]:
        key = ".".join(str(part) for part in fault["loc"] if part not in ("TokenPrompt", "str"))
        lines.append(shortened(f"{key or 'body'}: {fault['msg']}"))
    return lines
