"""The port while a server starts, requests that a shutdown cuts off, and clients that disconnect during theirs."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import EngineInfo, EngineUnavailable
from grpo_engine.server.http.requests import RefuseDuringShutdown, add_error_answers, read_body
from grpo_engine.server.main import _Server
from grpo_engine.serving.listening import take_port


class Prompt(BaseModel):
    """Body of a request."""

    prompt: str


class LoadingEngine:
    """An engine that is loaded when the test says so; what a server asks of one beside its routes."""

    def __init__(self) -> None:
        self.may_load = threading.Event()
        self.is_ready = asyncio.Event()
        self.is_closed = asyncio.Event()
        self.failure: Exception | None = None

    def start(self) -> None:
        """Nothing to start."""

    def wait_loaded(self) -> None:
        """Block until `may_load`."""
        self.may_load.wait()
        if self.failure is not None:
            raise self.failure

    def info(self) -> str:
        """For the log, when the server listens."""
        self.is_ready.set()
        return "an engine"

    async def wait_failed(self) -> None:
        """It never fails."""
        await self.is_closed.wait()

    async def close(self) -> None:
        """Ends its loading too."""
        self.may_load.set()
        self.is_closed.set()


async def answer_health(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


class Loading:
    """A server on a free port, with an engine that loads."""

    def __init__(self) -> None:
        self.listener = take_port("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/health"
        self.engine = LoadingEngine()
        config = ServerConfig(model_name="m", engine="torch")
        self.server = _Server(answer_health, config, self.engine, self.listener)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self.server.serve(sockets=[self.listener]))

    async def end(self) -> None:
        """Wait until it has exited."""
        await self.task
        self.listener.close()

    async def status(self) -> int:
        """What `curl` gets; raises where the connection is refused."""
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(self.url)).status_code


async def test_the_port_is_closed_and_no_line_says_that_it_runs_until_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loading = Loading()
    await asyncio.sleep(0)
    with pytest.raises(httpx.ConnectError):  # `while ! curl -s …/health` goes on
        await loading.status()
    assert "Uvicorn running on" not in capsys.readouterr().err
    loading.engine.may_load.set()
    await loading.engine.is_ready.wait()
    assert await loading.status() == 200
    assert "Uvicorn running on http://127.0.0.1:" in capsys.readouterr().err
    loading.server.should_exit = True
    await loading.end()
    assert loading.engine.is_closed.is_set()


async def test_a_server_that_is_stopped_while_it_loads_closes_its_engine_and_never_listens() -> None:
    loading = Loading()
    await asyncio.sleep(0)
    loading.server.should_exit = True
    await loading.end()
    assert loading.engine.is_closed.is_set()
    assert not loading.server.started


async def test_a_server_that_cannot_load_never_listens() -> None:
    loading = Loading()
    loading.engine.failure = EngineUnavailable("no room")
    loading.engine.may_load.set()
    await loading.end()
    assert loading.server._failure is loading.engine.failure
    assert not loading.server.started


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


def test_the_log_says_in_words_what_serves() -> None:
    info = EngineInfo(
        engine="torch 2.13.0", device="cpu", dtype="float32", policy_version=3, update_count=1, last_update_time=0.0,
        is_paused=False, is_sharing=True,
    )  # fmt: skip
    assert str(info) == "torch 2.13.0 on cpu, float32, policy version 3, shares its weights"
    split = replace(info, is_sharing=False, num_ranks=2, patches={"sleep": True, "pause": False})
    assert str(split) == "torch 2.13.0 on cpu, float32, policy version 3, 2 ranks, patches that are not in place: pause"
