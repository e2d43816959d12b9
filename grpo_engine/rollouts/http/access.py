"""Access control of the rollout API: no requests from web pages of another origin, and a bearer token if one is set.

A browser on the same machine reaches loopback ports, so any web page could post training data or reset a run. Browsers
send the origin of such requests; programs send none, and are admitted. Against DNS rebinding, an API that listens on
loopback answers browsers only under loopback's host names.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
OPEN_PATHS = frozenset({"/", "/info", "/health"})
"""Answered without a token, for probes."""


class AccessControl:
    """ASGI middleware that refuses such requests."""

    def __init__(self, app: ASGIApp, token: str | None = None, host: str = "127.0.0.1") -> None:
        """
        Args:
            token: bearer token that requests must carry; None: no token is needed.
            host: address on which the application listens.
        """
        self._app = app
        self._is_loopback = host in LOOPBACK
        self._authorization = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> JSONResponse | None:
        origin, host, site = (headers.get(name) for name in ("origin", "host", "sec-fetch-site"))
        is_own = origin is None or origin.partition("://")[2] == host
        is_renamed = self._is_loopback and (origin or site) and _name(host or "") not in LOOPBACK
        if not is_own or is_renamed or site not in (None, "none", "same-origin"):
            return JSONResponse({"detail": f"requests from web pages of {origin or 'another site'} are refused"}, 403)
        if self._authorization is None or path in OPEN_PATHS:
            return None
        if hmac.compare_digest(headers.get("authorization", "").encode(), self._authorization):
            return None
        return JSONResponse(
            {"detail": "this rollout API requires a token: send Authorization: Bearer <token>"},
            401,
            {"WWW-Authenticate": "Bearer"},
        )


def _name(host: str) -> str:
    """The host of a Host header, without port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
