"""The inference server's HTTP application: generation, health, and the rooms beside it.

Routes only translate; what they ask for is `grpo_engine.server.engine.Engine`. Assumes one event loop and one engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from grpo_engine.server.answers import generate_answer
from grpo_engine.server.bridge_routes import bridge_routes
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Engine, EngineStalled
from grpo_engine.server.lora_routes import lora_routes
from grpo_engine.server.openai_routes import openai_routes
from grpo_engine.server.requests import (
    RefuseAtTheEnd,
    add_error_answers,
    only_this_machine,
    read_body,
    unless_client_leaves,
)
from grpo_engine.wire.inference import GenerateRequest

VERSION_HEADER = b"x-policy-version"
"""Of answers of the engine's own routes: version of the weights when the answer, or a stream's first piece, left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the routes know: the engine, its settings, and which start of the server this is."""

    engine: Engine
    config: ServerConfig
    instance: str


def create_app(service: Service) -> FastAPI:
    """All routes over one engine; starts and stops nothing."""
    app = FastAPI(
        title="GRPO inference server",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        root_path=service.config.root_path or "",
    )
    add_error_answers(app)
    app.add_middleware(RefuseAtTheEnd)
    engine = service.engine

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        params = await read_body(request, GenerateRequest)
        if params.stream:
            raise HTTPException(400, "stream: answers come whole here; leave it out")
        engine.check_health()
        asked = params.prompt
        prompt = engine.encode(asked) if isinstance(asked, str) else asked.prompt_token_ids
        generation = await unless_client_leaves(request, engine.generate(prompt, params))
        content = generate_answer(
            generation,
            params,
            prompt_text=asked if isinstance(asked, str) else engine.decode(prompt),
            logprobs_mode=engine.logprobs_mode,
            version=engine.info().policy_version,
        )
        return Response(content, media_type="application/json")

    @app.get("/health")
    async def health() -> Response:
        try:
            engine.check_health()
        except EngineStalled as error:  # said for programs too: waiting does not help, as it does while a model loads
            return JSONResponse({"detail": str(error), "engine": "stalled"}, 503)
        return Response()

    @app.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        engine.check_health()
        params = GenerateRequest(prompt="health", max_tokens=1, temperature=0)
        await unless_client_leaves(request, engine.generate(engine.encode("a"), params))
        return Response()

    near = [Depends(only_this_machine)]
    app.include_router(bridge_routes(engine, service.config, service.instance), prefix="/bridge", dependencies=near)
    app.include_router(lora_routes(engine, service.config), prefix="/lora", dependencies=near)
    if service.config.engine == "vllm":
        _serve_below(app, engine)
    else:
        app.include_router(openai_routes(engine, service.config), prefix="/v1")

    @app.get("/bridge/list_endpoints", dependencies=near)
    async def list_endpoints() -> JSONResponse:
        ours = {path: [method.upper() for method in methods] for path, methods in app.openapi()["paths"].items()}
        stock = engine.stock_app()
        paths = ours if stock is None else await asyncio.to_thread(stock.endpoints) | ours
        return JSONResponse({"endpoints": [{"path": path, "methods": paths[path]} for path in sorted(paths)]})

    return app


def _serve_below(app: FastAPI, engine: Engine) -> None:
    """Hand requests that are for none of our routes to the engine's own application."""
    not_found = app.router.default

    async def stock(scope: Scope, receive: Receive, send: Send) -> None:
        stock_app = engine.stock_app()
        if stock_app is None or scope["type"] != "http":  # the only others of vLLM are for speech
            await not_found(scope, receive, send)
        else:
            await stock_app(scope, receive, _telling_version(send, lambda: engine.info().policy_version))

    app.router.default = stock


def _telling_version(send: Send, policy_version: Callable[[], int]) -> Send:
    """Add the version to the head of an answer.

    The head waits for the first piece of the body, which a stream sends once it has passed the gate and has a token.
    """
    head: Message | None = None

    async def tell(message: Message) -> None:
        nonlocal head
        if message["type"] == "http.response.start":
            head = message
            return
        if head is not None:
            version = (VERSION_HEADER, str(policy_version()).encode())
            await send({**head, "headers": [*head.get("headers", ()), version]})
            head = None
        await send(message)

    return tell
