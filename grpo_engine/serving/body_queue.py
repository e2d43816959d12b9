"""A queue for bodies of requests without the token: routes have few of them at a time, until each is answered.

A route parses a body on the event loop, into several times its length, and keeps that while it waits for an engine.
Requests with the token, of a service without one, and without a body are passed on at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_engine.serving.access import Token, token_of
from grpo_engine.serving.bodies import RETRY_AFTER, has_body, too_many_marks
from grpo_engine.wire.codec import num_marks

ROUTES_BYTES = 4 << 20
"""Of bodies that routes have: 80 prompts of 8,000 tokens (50 kB as JSON), whose keys and values fill a card of 80 GB
for an 8B model, or 1,400 of 3 kB. Parsed, it takes 30 MB, and the event loop for 0.2 s."""
WAITING_BYTES = 32 << 20
"""Of bodies that wait for them: 600 such prompts, or as many of 3 kB as there may be connections without the token."""
MAX_MARKS = 1 << 17
"""Of a body: 4,096 messages have 37,000 beside those in their text. 1 MB of 340,000 empty lists took 2 s to parse."""
_AT_ONCE_BYTES = 256 << 10
"""Passed on in one turn of the event loop, or one that is longer; after them it is for others for as long as these held
it. uvloop accepts one connection a turn, so 300 bodies that are refused, one a turn, held `/health` for 7 s."""
_LOOK_AFTER_S = 0.005
"""Whether they held it; later than their routes begin."""


class BodyQueue:
    """ASGI middleware, inside of `BodyLimits`: bodies are received, wait for their turn, and are passed on in order."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_bytes = 0
        """Of bodies that routes have."""
        self._waiting: OrderedDict[asyncio.Future[None], int] = OrderedDict()
        """Turn → length, in the order in which they came."""
        self._num_waiting_bytes = 0
        self._is_paused = False
        """Since bodies were passed on; others are not yet."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request; without the token when it is its turn, unless its client is gone by then."""
        if scope["type"] != "http" or token_of(scope) is not Token.WRONG or not has_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        body = await _received(receive)
        if body is None:
            return
        if self._num_waiting_bytes + len(body) > WAITING_BYTES:
            detail = "other requests without the token of the run are waiting: send it, or retry"
            await JSONResponse({"detail": detail}, 503, RETRY_AFTER)(scope, receive, send)
            return
        async with self._turn(len(body), receive) as is_connected:
            if is_connected and num_marks(body) > MAX_MARKS:
                await too_many_marks(MAX_MARKS)(scope, receive, send)
            elif is_connected:
                await self._app(scope, replayed(body, receive), send)

    @asynccontextmanager
    async def _turn(self, num_bytes: int, receive: Receive) -> AsyncIterator[bool]:
        """Wait for a turn, and have it until the block ends; yields whether the client is still connected."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = num_bytes
        self._num_waiting_bytes += num_bytes
        self._pass_on()
        leaving = asyncio.ensure_future(receive())  # with the body received, the next message is that it has closed
        try:
            await asyncio.wait((turn, leaving), return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            yield not leaving.done()
        finally:
            leaving.cancel()
            if turn.done():
                self._num_bytes -= num_bytes
            else:
                del self._waiting[turn]
                self._num_waiting_bytes -= num_bytes
            self._pass_on()

    def _pass_on(self) -> None:
        """Begin the turns for which there is room, some at once."""
        if self._is_paused:
            return
        num_begun = 0
        while self._waiting:
            turn, num_bytes = next(iter(self._waiting.items()))
            if self._num_bytes and self._num_bytes + num_bytes > ROUTES_BYTES:
                break
            if num_begun and num_begun + num_bytes > _AT_ONCE_BYTES:
                break
            del self._waiting[turn]
            turn.set_result(None)
            num_begun += num_bytes
            self._num_waiting_bytes -= num_bytes
            self._num_bytes += num_bytes
        if num_begun:
            self._is_paused = True
            loop = asyncio.get_running_loop()
            loop.call_later(_LOOK_AFTER_S, self._pause, loop.time() + _LOOK_AFTER_S)

    def _pause(self, due_s: float) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(loop.time() - due_s, self._go_on)

    def _go_on(self) -> None:
        self._is_paused = False
        self._pass_on()


def replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` that begins with a body which was read from it."""
    unread = [body]

    async def receive_again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return receive_again


async def _received(receive: Receive) -> bytes | None:
    """The body; None: the client has closed the connection before its end, or it is refused."""
    body = bytearray()
    while (message := await receive())["type"] != "http.disconnect":
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)
    return None
