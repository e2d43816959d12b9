"""Who may speak to the rollout API: no web page of another origin, and with a token only those who carry it.

A browser on the same machine reaches loopback ports, and a page from anywhere could post training data or reset a run;
browsers always say where such a request comes from. Programs do not, and are let through.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
OPEN_PATHS = frozenset({"/", "/info"})
"""Answered without a token: everybody probes them for readiness."""


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self._app = app
        self._authorization = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> JSONResponse | None:
        origin = headers.get("origin")
        is_own = origin is None or origin.partition("://")[2] == headers.get("host")
        if not is_own or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return JSONResponse({"detail": f"requests from web pages of {origin or 'another site'} are refused"}, 403)
        if self._authorization is None or path in OPEN_PATHS:
            return None
        if hmac.compare_digest(headers.get("authorization", "").encode(), self._authorization):
            return None
        return JSONResponse(
            {"detail": "this rollout API asks for a token: send Authorization: Bearer <token>"},
            401,
            {"WWW-Authenticate": "Bearer"},
        )
