"""What bodies of requests without the token can take of an inference server once they are received."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from limited_service import client_of
from stage import until
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from grpo_engine.server.config import ServerConfig
from grpo_engine.server.http import requests as server_requests
from grpo_engine.server.http.app import Service, create_app
from grpo_engine.server.vllm.stock import StockApp
from grpo_engine.serving import bodies, body_queue
from grpo_engine.serving.access import AccessControl, Token, caller
from grpo_engine.serving.bodies import BodyLimits
from grpo_engine.serving.body_queue import BodyQueue
from grpo_engine.wire.inference import GenerateRequest

OURS = {"Authorization": "Bearer t"}


class Waiting:
    """An engine whose requests wait until they are let; those of its own application too."""

    logprobs_mode = "raw"

    def __init__(self) -> None:
        self.num_asked = self.num_asked_with_token = 0
        self.may_answer = asyncio.Event()
        self._stock = FastAPI()
        self._stock.add_api_route("/tokenize", self._tokenize, methods=["POST"])

    def check_health(self) -> None:
        pass

    def info(self) -> Any:
        return SimpleNamespace(sleep_words=None, policy_version=0)

    def stock_app(self) -> StockApp:
        return StockApp(self._stock)

    async def generate(self, prompt_token_ids: list[int], params: GenerateRequest) -> None:
        await self._wait()

    async def _tokenize(self, request: Request) -> None:
        await request.body()
        await self._wait()

    async def _wait(self) -> None:
        if caller().token is Token.RIGHT:
            self.num_asked_with_token += 1
        else:
            self.num_asked += 1
        await self.may_answer.wait()
        raise server_requests.HTTPException(418)


@pytest.mark.parametrize(
    ("engine", "path", "body"),
    [
        ("torch", "/v1/completions", {"prompt": [5] * 150}),
        ("torch", "/generate", {"prompt": {"prompt_token_ids": [5] * 150}}),
        ("vllm", "/generate", {"prompt": {"prompt_token_ids": [5] * 150}}),
        ("vllm", "/tokenize", {"prompt": "a" * 300}),
    ],
)
async def test_few_bodies_without_the_token_are_parsed_before_those_before_them_are_answered(
    monkeypatch: pytest.MonkeyPatch, engine: str, path: str, body: dict[str, Any]
) -> None:
    """300 of 745 kB held `/health` of the torch engine for 10 s, and 1,000 took 5 GB."""
    monkeypatch.setattr(body_queue, "ROUTES_BYTES", 1000, raising=False)
    waiting = Waiting()
    config = ServerConfig(model_name="m", engine=engine)
    ours = create_app(Service(engine=waiting, config=config, instance="i", token="t"))  # type: ignore[arg-type]
    async with client_of(ours) as client, asyncio.timeout(60):
        posts = [asyncio.create_task(client.post(path, json=body)) for _ in range(9)]
        await until(lambda: waiting.num_asked > 0)
        await asyncio.sleep(0.02)
        assert 1 <= waiting.num_asked <= 3
        posts.append(asyncio.create_task(client.post(path, json=body, headers=OURS)))
        await until(lambda: waiting.num_asked_with_token == 1)
        assert (await client.get("/health")).status_code == 200
        assert 1 <= waiting.num_asked <= 3
        waiting.may_answer.set()
        assert [(await post).status_code for post in posts] == [418] * 10


class Route:
    """Answers with the length of each body; POSTs wait until they are let, in the middle of their answer."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body()
        self.lengths.append(len(body))

        async def parts() -> Any:
            yield str(len(body))
            if scope["method"] == "POST":
                await self.may_end.wait()

        await StreamingResponse(parts())(scope, receive, send)


def queued(route: Route, token: str | None = "t") -> AccessControl:
    limits = BodyLimits(BodyQueue(route), longest_bytes=2000, num_at_once=4, longest_without_token_bytes=1000)
    return AccessControl(limits, host="127.0.0.1", token=token)


class Client:
    """A connection as a server has it: its body comes in parts, and it may be closed at any time."""

    def __init__(self, app: AccessControl, length: int = 600, *, is_complete: bool = True) -> None:
        self.may_go_on, self.is_gone = asyncio.Event(), asyncio.Event()
        if is_complete:
            self.may_go_on.set()
        self._parts = [b"a" * (length - 1), b"a"]
        self.status: int | None = None
        scope = {
            **{"type": "http", "method": "POST", "path": "/", "query_string": b""},
            "headers": [(b"host", b"localhost"), (b"transfer-encoding", b"chunked")],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if not self._parts:
            await self.is_gone.wait()
            return {"type": "http.disconnect"}
        if len(self._parts) == 1:
            await self.may_go_on.wait()
        return {"type": "http.request", "body": self._parts.pop(0), "more_body": bool(self._parts)}

    async def _send(self, message: Message) -> None:
        self.status = message.get("status", self.status)


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_queue, "ROUTES_BYTES", 1000, raising=False)


async def seen(route: Route, *lengths: int) -> bool:
    """Whether a route gets bodies of these lengths, and no other one soon."""
    await until(lambda: len(route.lengths) >= len(lengths))
    await asyncio.sleep(0.02)
    return route.lengths == list(lengths)


async def test_a_client_that_is_gone_while_it_waits_is_not_parsed_and_gives_its_place_back() -> None:
    """1,500 posts that were aborted held `/health` of the torch engine for 64 s."""
    route = Route()
    app = queued(route)
    first = Client(app)
    assert await seen(route, 600)
    gone, last = Client(app, 700), Client(app, 400)
    assert await seen(route, 600)  # in their order
    gone.is_gone.set()
    assert await seen(route, 600, 400)
    route.may_end.set()
    await asyncio.gather(first.task, gone.task, last.task)
    assert (first.status, gone.status, last.status) == (200, None, 200)
    already = Client(app)
    already.is_gone.set()
    await already.task
    assert await seen(route, 600, 400)


async def test_a_streaming_answer_holds_its_place_until_its_end() -> None:
    route = Route()
    app = queued(route)
    first, second = Client(app), Client(app)
    await until(lambda: first.status == 200)
    assert await seen(route, 600)
    route.may_end.set()
    await asyncio.gather(first.task, second.task)
    assert (route.lengths, second.status) == ([600, 600], 200)


async def test_a_body_that_comes_slowly_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BEHIND_S", 0.1)
    route = Route()
    app = queued(route)
    route.may_end.set()
    slow = [Client(app, is_complete=False) for _ in range(4)]
    quick = Client(app, 900)
    await quick.task
    assert (route.lengths, quick.status) == ([900], 200)
    await asyncio.gather(*(each.task for each in slow))
    assert [each.status for each in slow] == [408] * 4


async def test_where_many_bytes_wait_one_more_is_refused_to_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_queue, "WAITING_BYTES", 1500)
    route = Route()
    app = queued(route)
    async with client_of(app) as client:
        waiting = [Client(app) for _ in range(3)]
        assert await seen(route, 600)
        refused = await client.post("/", content=b"a" * 600)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        assert "are waiting" in refused.json()["detail"]
        assert (await client.get("/")).text == "0"
        route.may_end.set()
        for each in waiting:
            await each.task
        assert (await client.post("/", content=b"a" * 600)).text == "600"


async def test_a_service_without_a_token_has_no_queue() -> None:
    route = Route()
    app = queued(route, token=None)
    all_at_once = [Client(app) for _ in range(4)]
    assert await seen(route, *[600] * 4)
    route.may_end.set()
    await asyncio.gather(*(each.task for each in all_at_once))


@pytest.mark.parametrize(("num", "length"), [(200, 3000), (64, 50_000)])
async def test_short_requests_of_environments_without_a_token_are_all_with_the_engine_at_once(
    monkeypatch: pytest.MonkeyPatch, num: int, length: int
) -> None:
    monkeypatch.undo()
    route = Route()
    limits = BodyLimits(BodyQueue(route), longest_bytes=64 << 20, num_at_once=4)
    app = AccessControl(limits, host="127.0.0.1", token="t")
    clients = [Client(app, length) for _ in range(num)]
    await until(lambda: len(route.lengths) == num)
    route.may_end.set()
    await asyncio.gather(*(each.task for each in clients))
    assert {each.status for each in clients} == {200}


async def test_a_body_of_very_many_lists_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 340,000 without the token held the event loop for 2 s."""
    monkeypatch.setattr(body_queue, "MAX_MARKS", 10)
    route = Route()
    route.may_end.set()
    async with client_of(queued(route)) as client:
        for content, status in ((b"[" * 11, 413), (b"[" * 10, 200)):
            assert (await client.post("/", content=content)).status_code == status
    assert route.lengths == [10]
