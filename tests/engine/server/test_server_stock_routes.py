"""Requests that match none of our routes: access to the engine's own application, and its version header."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from grpo_engine.errors import HalfWritten
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import EngineUnavailable, WeightsBusy
from grpo_engine.server.http.app import Service, create_app
from grpo_engine.server.vllm.stock import GuardedClient, StockApp, add_our_errors

HERE, ELSEWHERE = "127.0.0.1", "10.1.2.3"


class SomeEngine:
    """The part of an engine that stock routes use; `stock` replaces vLLM's application."""

    logprobs_mode = "raw"

    def __init__(self, stock: FastAPI | None) -> None:
        self.version = 0
        self._stock = stock

    def info(self) -> Any:
        return SimpleNamespace(policy_version=self.version)

    def stock_app(self) -> StockApp:
        if self._stock is None:
            raise EngineUnavailable("the model is loading")
        return StockApp(self._stock)


def client_of(engine: SomeEngine, *, peer: str = HERE, **settings: object) -> httpx.AsyncClient:
    config = ServerConfig(model_name="m", **settings)
    app = create_app(Service(engine=engine, config=config, instance="i"))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(peer, 1)), base_url="http://127.0.0.1:9001")


def some_routes() -> FastAPI:
    """A few of vLLM's paths."""
    app = FastAPI()
    add_our_errors(app)

    @app.get("/v1/models")
    @app.get("/server_info")
    @app.post("/v1/load_lora_adapter")
    @app.post("/collective_rpc")
    @app.post("/a_route_of_tomorrow")
    async def answer(request: Request) -> str:
        return request.url.path

    @app.post("/v1/completions")
    async def completions() -> None:
        raise HalfWritten("the weights are half-written")

    return app


async def test_where_sampling_needs_the_token_nothing_but_health_and_metrics_is_answered_without_it() -> None:
    """Other users of the machine found one way after another to hold vLLM by requests of theirs."""
    routes = FastAPI()
    paths = ("/v1/models", "/v1/completions", "/tokenize", "/metrics")
    for path in paths:
        routes.add_api_route(path, lambda: "answered", methods=["GET", "POST"])
    config = ServerConfig(model_name="m", sampling_needs_token=True)
    app = create_app(Service(engine=SomeEngine(routes), config=config, instance="i", token="t"))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, client=(HERE, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9001") as client:
        for headers, status in (({}, 401), ({"Authorization": "Bearer t"}, 200)):
            found = [(await client.get(path, headers=headers)).status_code for path in paths]
            assert found == [status, status, status, 200]
        assert (await client.post("/generate", json={"prompt": "a"})).status_code == 401


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/anything"])
async def test_a_loading_engine_answers_503(path: str) -> None:
    async with client_of(SomeEngine(None)) as client:
        answer = await client.get(path)
    assert answer.status_code == 503
    assert answer.json()["detail"] == "the model is loading"


async def test_an_unexpected_error_is_in_the_answer() -> None:
    class Engine(SomeEngine):
        def check_health(self) -> None:
            raise RuntimeError("CUDA out of memory")

    app = create_app(Service(engine=Engine(None), config=ServerConfig(model_name="m"), instance="i"))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9001") as client:
        answer = await client.post("/generate", json={"prompt": "a"})
    assert answer.status_code == 500
    assert answer.json()["detail"].startswith("RuntimeError: CUDA out of memory; ")


async def test_a_body_that_does_not_end_is_refused_before_it_fills_the_memory() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 20)

    async with client_of(SomeEngine(None)) as client:
        answer = await client.post("/generate", content=endless())
    assert answer.status_code == 413
    assert "longer than 67,108,864 bytes" in answer.json()["detail"]


async def test_inference_is_open_to_all_and_unknown_routes_only_to_this_machine() -> None:
    engine = SomeEngine(some_routes())
    async with client_of(engine) as near, client_of(engine, peer=ELSEWHERE) as far:
        assert [(await client.get("/v1/models")).status_code for client in (near, far)] == [200, 200]
        assert [(await client.get("/server_info")).status_code for client in (near, far)] == [200, 403]
        assert [(await client.post("/a_route_of_tomorrow")).status_code for client in (near, far)] == [200, 403]
        assert (await near.get("/nowhere")).status_code == 404
        proxied = await near.get("/server_info", headers={"X-Forwarded-For": HERE})
    assert proxied.status_code == 403


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/v1/load_lora_adapter", "/lora/load"),
        ("/v1/load_lora_adapter/", "/lora/load"),
        ("/adapters/x", "/lora/load"),
        ("/collective_rpc", "/bridge/reload"),
        ("/update_weights", "/bridge/reload"),
        ("/pause", "/bridge/pause"),
    ],
)
@pytest.mark.parametrize("root_path", [None, "/below"])
async def test_a_route_that_would_change_weights_answers_404_and_names_ours(
    path: str, ours: str, root_path: str | None
) -> None:
    stock = some_routes()
    stock.root_path = root_path or ""
    async with client_of(SomeEngine(stock), root_path=root_path) as client:
        answers = [await client.post(path)]
        if root_path is not None:
            answers.append(await client.post(root_path + path))
    for answer in answers:
        assert answer.status_code == 404
        assert answer.json()["detail"].endswith(f"use {ours}")
        assert answer.json()["error"]["message"] == answer.json()["detail"]


async def test_our_errors_on_vllms_routes_have_their_status_and_openais_shape() -> None:
    async with client_of(SomeEngine(some_routes())) as client:
        answer = await client.post("/v1/completions")
    assert answer.status_code == 503
    assert answer.json()["error"] == {
        "message": "the weights are half-written",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }


async def test_a_stream_has_the_version_of_its_first_chunk() -> None:
    stock, is_waiting, gate = FastAPI(), asyncio.Event(), asyncio.Event()
    engine = SomeEngine(stock)

    @stock.get("/v1/models")
    async def stream() -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            is_waiting.set()  # its headers would have been sent by now
            await gate.wait()
            yield "a"
            engine.version = 9
            yield "b"

        return StreamingResponse(pieces())

    async with client_of(engine) as client:
        asking = asyncio.create_task(client.get("/v1/models"))
        await is_waiting.wait()
        engine.version = 5
        gate.set()
        answer = await asking
    assert (answer.text, answer.headers["X-Policy-Version"]) == ("ab", "5")


async def test_our_routes_take_precedence_over_vllms_and_all_are_listed() -> None:
    stock = some_routes()
    stock.add_api_route("/health", lambda: "vllm's")
    async with client_of(SomeEngine(stock)) as client:
        listed = (await client.get("/bridge/list_endpoints")).json()["endpoints"]
    paths = {entry["path"]: entry["methods"] for entry in listed}
    assert paths["/v1/models"] == ["GET"]
    assert paths["/generate"] == ["POST"]
    assert "/v1/load_lora_adapter" not in paths
    assert len(listed) == len(paths)


def test_vllms_routes_reach_the_engine_but_nothing_that_changes_it() -> None:
    llm = SimpleNamespace(errored=False, add_lora=print, collective_rpc=print, generate=print)
    client = GuardedClient(llm, generate=len)  # type: ignore[arg-type]
    assert client.errored is False
    assert client.generate is len
    for name in ("add_lora", "collective_rpc", "pause_generation"):
        with pytest.raises(WeightsBusy, match=name):
            getattr(client, name)
