"""Limits of the request bodies of an HTTP service: the memory of all that are being received, and how slow one may be.

What a body may contain, and how long one may be, is decided by the routes. Requests with the service's token have room
of their own, which requests without it cannot fill.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_engine.serving.access import Token, token_of
from grpo_engine.wire.codec import num_marks

ROOM_WITHIN_S = 20.0
"""Wait for room until other bodies have been received; stock clients retry the 503 that follows."""
BEHIND_S = 60.0
"""Longest time without a part of a body, and how far one may fall behind `LEAST_BYTES_PER_S`."""
LEAST_BYTES_PER_S = 64 << 10
"""Rate of a slow network. Without it, a client that sends a byte a minute could hold this memory indefinitely."""
SHORT_BYTES = 1 << 20
"""Bodies declared to be this short never wait for longer ones."""
SHORT_ROOM_BYTES = 64 << 20
"""Room for them beyond that of all bodies."""
RETRY_AFTER = {"Retry-After": "5"}


class BodyLimits:
    """ASGI middleware, inside of `AccessControl`: a body is read while there is room, and refused if none comes."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        longest_bytes: int,
        num_at_once: int,
        longest_without_token_bytes: int = SHORT_BYTES,
        most_marks: int | None = None,
    ) -> None:
        """
        Args:
            longest_bytes: longest body that a route accepts.
            num_at_once: how many of the longest there is room for.
            longest_without_token_bytes: the same of requests without the token, where the service has one.
            most_marks: `num_marks` of a body, where all bodies are JSON.
        """
        self._app = app
        self._longest_without_token_bytes = longest_without_token_bytes
        self._most_marks = most_marks
        self._room = _Room(longest_bytes, num_at_once)
        self._room_without_token = _Room(longest_without_token_bytes, num_at_once)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request; its body is limited while the application reads it."""
        if scope["type"] != "http" or not has_body(headers := Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        num_declared = num_declared_bytes(headers)
        is_short = num_declared is not None and num_declared <= SHORT_BYTES
        room, most_bytes = self._room, None
        if token_of(scope) is Token.WRONG:
            room, most_bytes = self._room_without_token, self._longest_without_token_bytes
        longest_bytes, most_marks = most_bytes if num_declared is None else num_declared, self._most_marks
        if longest_bytes is not None and most_marks is not None and longest_bytes <= most_marks:
            most_marks = None  # it cannot have more, and counting takes longer than receiving it
        body = _Body(receive, send, room, is_short=is_short, most_bytes=most_bytes, most_marks=most_marks)
        if num_declared is not None:
            body.check_length(num_declared)
        try:
            with suppress(ClientDisconnect):  # of a body that was refused too, else the client is gone
                if body.refusal is None:
                    await self._app(scope, body.receive, body.send)
        finally:
            body.end()
        if body.refusal is not None and not body.is_answered:
            await body.refusal(scope, receive, send)


def has_body(headers: Headers) -> bool:
    """Whether a request with these headers has a body."""
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def num_declared_bytes(headers: Headers) -> int | None:
    """Length of a body by its headers; None: they do not say it."""
    declared = headers.get("content-length", "")
    return int(declared) if declared.isdecimal() and "transfer-encoding" not in headers else None


def too_many_marks(most: int) -> JSONResponse:
    """The refusal of a body with more `num_marks`."""
    return JSONResponse(
        {"detail": f"the body has more than {most:,} brackets, braces and quotes: send several requests"}, 413
    )


class _Room:
    """Memory for bodies that are being received.

    Of the short bodies, and of the longer ones, that which began first always has room, so that those which are half
    received do not wait for each other.
    """

    def __init__(self, longest_bytes: int, num_at_once: int) -> None:
        self._num_bytes = longest_bytes * num_at_once
        self._num_shared_bytes = longest_bytes * (num_at_once - 1)
        self._num_received = 0
        self._short: OrderedDict[_Body, None] = OrderedDict()
        self._long: OrderedDict[_Body, None] = OrderedDict()
        """In the order in which they began."""
        self._waiting: list[asyncio.Future[None]] = []

    async def has_room(self, body: _Body) -> bool:
        """Whether there is room for another part of it, or comes within `ROOM_WITHIN_S`."""
        (self._short if body.is_short else self._long)[body] = None
        try:
            async with asyncio.timeout(ROOM_WITHIN_S):
                while not self._has_room(body):
                    freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.append(freed)
                    await freed
        except TimeoutError:
            return False
        return True

    def _has_room(self, body: _Body) -> bool:
        if body.is_short:
            return body is next(iter(self._short)) or self._num_received < self._num_bytes + SHORT_ROOM_BYTES
        first = next(iter(self._long))
        return body is first or self._num_received - first.num_received < self._num_shared_bytes

    def add(self, num_bytes: int) -> None:
        self._num_received += num_bytes

    def remove(self, body: _Body) -> None:
        self._num_received -= body.num_received
        (self._short if body.is_short else self._long).pop(body, None)
        waiting, self._waiting = self._waiting, []
        for freed in waiting:
            if not freed.done():
                freed.set_result(None)


class _Body:
    """The body of one request; one that is refused is to the application as if its client had disconnected."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        room: _Room,
        *,
        is_short: bool,
        most_bytes: int | None,
        most_marks: int | None,
    ) -> None:
        self._receive = receive
        self._send = send
        self._room = room
        self._most_bytes = most_bytes
        self._most_marks = most_marks
        self._num_marks = 0
        self._left_s = BEHIND_S
        self._has_ended = False
        self.is_short = is_short
        self.num_received = 0
        self.refusal: JSONResponse | None = None
        self.is_answered = False

    def check_length(self, num_bytes: int) -> None:
        if self._most_bytes is not None and num_bytes > self._most_bytes:
            detail = f"the body is longer than {self._most_bytes:,} bytes, the limit without the token"
            self._refuse(detail, 413)

    def _check_marks(self, part: bytes) -> None:
        if self._most_marks is None:
            return
        self._num_marks += num_marks(part)
        if self._num_marks > self._most_marks:
            self.refusal = too_many_marks(self._most_marks)

    async def receive(self) -> Message:
        if self.refusal is not None:
            return {"type": "http.disconnect"}
        if self._has_ended:
            return await self._receive()
        if not await self._room.has_room(self):
            return self._refuse("the bodies of other requests are being received: retry", 503, RETRY_AFTER)
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._left_s):
                message = await self._receive()
        except TimeoutError:
            detail = f"the body came {BEHIND_S:g} s later than it does at {LEAST_BYTES_PER_S:,} bytes/s"
            return self._refuse(detail, 408, {"Connection": "close"})
        part = message.get("body", b"")
        num_bytes = len(part)
        spent_s = asyncio.get_running_loop().time() - began
        self._left_s = min(self._left_s - spent_s + num_bytes / LEAST_BYTES_PER_S, BEHIND_S)
        self.num_received += num_bytes
        self._room.add(num_bytes)
        self.check_length(self.num_received)
        self._check_marks(part)
        if self.refusal is not None:
            return {"type": "http.disconnect"}
        if not message.get("more_body", False):
            self.end()
        return message

    async def send(self, message: Message) -> None:
        if self.refusal is None:
            self.is_answered = True
            await self._send(message)

    def end(self) -> None:
        """All of it is received, or will not be."""
        if not self._has_ended:
            self._has_ended = True
            self._room.remove(self)

    def _refuse(self, detail: str, status: int, headers: dict[str, str] | None = None) -> Message:
        self.refusal = JSONResponse({"detail": detail}, status, headers)
        return {"type": "http.disconnect"}
