"""Requests that a shutdown cuts off, and clients that disconnect during their request."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from grpo_engine.server.http.requests import RefuseDuringShutdown, add_error_answers, read_body


class Prompt(BaseModel):
    """Body of a request."""

    prompt: str


async def cut_off(*, after_the_head: bool) -> list[Message]:
    """Serve one request that never ends, cancel it as uvicorn does, and return what was sent."""
    sent: list[Message] = []
    is_inside = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        if after_the_head:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        is_inside.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    task = asyncio.create_task(RefuseDuringShutdown(endless)(scope, receive, send))  # type: ignore[arg-type]
    await is_inside.wait()
    task.cancel()
    await task
    return sent


async def test_a_request_that_a_shutdown_cuts_off_is_answered_503() -> None:
    head, body = await cut_off(after_the_head=False)
    assert head["status"] == 503
    assert b"this server is shutting down; retry" in body["body"]


async def test_an_answer_that_has_begun_is_cut_off_and_not_answered_twice() -> None:
    with pytest.raises(asyncio.CancelledError):
        await cut_off(after_the_head=True)


async def test_a_client_that_disconnects_during_its_request_is_no_error_of_the_server() -> None:
    app = FastAPI()
    add_error_answers(app)

    @app.post("/generate")
    async def generate(request: Request) -> None:
        await read_body(request, Prompt)

    parts: list[Message] = [
        {"type": "http.request", "body": b'{"prompt": ', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return parts.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": []}
    await app(scope, receive, send)  # what uvicorn would log with a traceback is raised here
    assert sent[0]["status"] == 499
