"""HTTP clients that send the token of a run: on loopback, only to a process of this user, or of root.

A loopback port whose service has ended, or does not listen yet, may be taken by any user of the machine. So each new
connection is checked before anything is sent on it: one look into `/proc/net` for each connection, none for a request.
Peers on other machines are not checked. Answers are bounded (`bounded_answers.py`), whether there is a token or not.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httpx

from grpo_engine.wire.access_token import authorization
from grpo_engine.wire.bounded_answers import AsyncBoundedTransport, BoundedTransport, limit_async_reads, limit_reads
from grpo_engine.wire.spread_transport import spread_transport
from grpo_engine.wire.tcp_sockets import stranger_behind, who_has

_CONNECTED = "connection.connect_tcp.complete"
_ENCRYPTED = "connection.start_tls.complete"
"""What httpcore calls the events of a new connection."""
_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20)
"""The defaults of httpx."""


class ForeignListener(httpx.ConnectError):
    """A process of another user listens on the port; temporary, as a refused connection is."""


def open_client(token: str | None, *, transport: httpx.BaseTransport | None = None, **settings: Any) -> httpx.Client:
    """As `httpx.Client`, with the token, if any, in each request, and bounds on each answer."""

    def prepare(request: httpx.Request) -> None:
        # The password of a URL is a token too.
        is_checked = token is not None or "authorization" in request.headers
        request.extensions["trace"] = partial(note, is_checked)

    def note(is_checked: bool, event: str, details: dict[str, Any]) -> None:
        if event not in (_CONNECTED, _ENCRYPTED):
            return
        connection = details["return_value"]
        if is_checked and event == _CONNECTED and (error := _why_unsafe(connection)) is not None:
            connection.close()
            raise error
        limit_reads(connection)

    return httpx.Client(
        transport=BoundedTransport(transport or httpx.HTTPTransport(trust_env=False)),
        headers=_headers(token, settings),
        event_hooks={"request": [prepare]},
        trust_env=False,
        **settings,
    )


def open_async_client(
    token: str | None,
    *,
    sends_token: bool = True,
    limits: httpx.Limits = _LIMITS,
    transport: httpx.AsyncBaseTransport | None = None,
    **settings: Any,
) -> httpx.AsyncClient:
    """As `open_client`; with `sends_token=False` the connections are checked as well, and the token is not sent."""

    async def prepare(request: httpx.Request) -> None:
        is_checked = token is not None or "authorization" in request.headers
        request.extensions["trace"] = partial(note, is_checked)

    async def note(is_checked: bool, event: str, details: dict[str, Any]) -> None:
        if event not in (_CONNECTED, _ENCRYPTED):
            return
        connection = details["return_value"]
        if is_checked and event == _CONNECTED:
            try:
                if (error := await asyncio.to_thread(_why_unsafe, connection)) is not None:
                    raise error
            except BaseException:  # also when cancelled: nothing else would close the connection
                import anyio  # by which httpcore has made it

                with anyio.CancelScope(shield=True):
                    await connection.aclose()
                raise
        limit_async_reads(connection)

    return httpx.AsyncClient(
        transport=AsyncBoundedTransport(transport or spread_transport(limits)),
        headers=_headers(token if sends_token else None, settings),
        event_hooks={"request": [prepare]},
        trust_env=False,
        **settings,
    )


def _headers(token: str | None, settings: dict[str, Any]) -> dict[str, str]:
    """Takes `headers` out of the settings. Answers uncompressed: on loopback decompression costs more than sending."""
    return {"Accept-Encoding": "identity", **settings.pop("headers", {}), **authorization(token)}


def _why_unsafe(stream: Any) -> httpx.ConnectError | None:
    """The error for a connection whose other end is another user's, or is gone."""
    try:
        peer, own = (stream.get_extra_info(name)[:2] for name in ("server_addr", "client_addr"))
        stranger = stranger_behind(peer, own)
    except OSError as error:  # it is closed, or no descriptor is left to ask the kernel with
        return httpx.ConnectError(str(error))
    except TypeError:  # anyio has None for the address of a connection that was reset meanwhile
        return httpx.ConnectError("the connection was closed at once")
    if stranger is None:
        return None
    return ForeignListener(
        f"{peer[0]}:{peer[1]} is held by {who_has(stranger)}, not by this run: the token is not sent; end that process"
    )
