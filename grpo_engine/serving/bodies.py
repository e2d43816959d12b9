"""Limits of the request bodies of an HTTP service: the memory of all that are being received, and the wait for a part.

What a body may contain, and how long one may be, is decided by the routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ROOM_WITHIN_S = 20.0
"""Wait for room until other bodies have been received; stock clients retry the 503 that follows."""
PART_WITHIN_S = 60.0
"""Wait for the next part of a body."""
_RETRY_AFTER = {"Retry-After": "5"}


class BodyLimits:
    """ASGI middleware: a request with a body waits until there is room for all of it, and is refused if none comes."""

    def __init__(self, app: ASGIApp, *, longest_bytes: int, num_at_once: int) -> None:
        """
        Args:
            longest_bytes: longest body that a route accepts; a body of unknown length counts as that long.
            num_at_once: how many of the longest there is room for.
        """
        self._app = app
        self._longest_bytes = longest_bytes
        self._free_bytes = longest_bytes * num_at_once
        self._waiting: list[asyncio.Future[None]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request when there is room for its body."""
        num_bytes = self._num_bytes(scope)
        if num_bytes == 0:
            await self._app(scope, receive, send)
            return
        if not await self._has_taken(num_bytes):
            detail = f"the bodies of other requests are being received, without room for {num_bytes:,} bytes: retry"
            await JSONResponse({"detail": detail}, 503, _RETRY_AFTER)(scope, receive, send)
            return
        body = _Body(receive, send, on_end=lambda: self._give_back(num_bytes))
        try:
            await self._app(scope, body.receive, body.send)
        except ClientDisconnect:
            if not body.is_stalled:
                raise
        finally:
            body.end()
        if body.is_stalled and not body.is_answered:
            detail = f"no part of the body has come for {PART_WITHIN_S:g} s"
            await JSONResponse({"detail": detail}, 408, {"Connection": "close"})(scope, receive, send)

    def _num_bytes(self, scope: Scope) -> int:
        """Bytes of the body, as far as a route would read it."""
        if scope["type"] != "http":
            return 0
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if length.isdecimal():
            return min(int(length), self._longest_bytes)
        return self._longest_bytes if length or "transfer-encoding" in headers else 0

    async def _has_taken(self, num_bytes: int) -> bool:
        try:
            async with asyncio.timeout(ROOM_WITHIN_S):
                while self._free_bytes < num_bytes:
                    freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.append(freed)
                    await freed
        except TimeoutError:
            return False
        self._free_bytes -= num_bytes
        return True

    def _give_back(self, num_bytes: int) -> None:
        self._free_bytes += num_bytes
        waiting, self._waiting = self._waiting, []
        for freed in waiting:
            if not freed.done():
                freed.set_result(None)


class _Body:
    """The body of one request; one that stalls is to the application as if its client had disconnected."""

    def __init__(self, receive: Receive, send: Send, *, on_end: Callable[[], None]) -> None:
        self._receive = receive
        self._send = send
        self._on_end: Callable[[], None] | None = on_end
        self.is_stalled = False
        self.is_answered = False

    async def receive(self) -> Message:
        if self._on_end is None:
            return {"type": "http.disconnect"} if self.is_stalled else await self._receive()
        try:
            async with asyncio.timeout(PART_WITHIN_S):
                message = await self._receive()
        except TimeoutError:
            self.is_stalled = True
            message = {"type": "http.disconnect"}
        if not message.get("more_body", False):
            self.end()
        return message

    async def send(self, message: Message) -> None:
        if not self.is_stalled:
            self.is_answered = True
            await self._send(message)

    def end(self) -> None:
        """All of it is received, or will not be."""
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end()
