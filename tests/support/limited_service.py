"""A service behind the limits of ours, which answers with the length of each body."""

from __future__ import annotations

from typing import Any

import httpx
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from grpo_engine.serving.access import AccessControl
from grpo_engine.serving.bodies import BodyLimits

MIB = 1 << 20
CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


async def length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


def app() -> FastAPI:
    return FastAPI(routes=[Route("/", length, methods=["GET", "POST"])])


def limited(token: str | None = None, **settings: int) -> AccessControl:
    limits = BodyLimits(app(), **{"longest_bytes": 100, "num_at_once": 2, **settings})
    return AccessControl(limits, host="127.0.0.1", token=token)


def client_of(limits: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(limits), base_url="http://localhost")
