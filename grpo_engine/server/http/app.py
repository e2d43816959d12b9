"""The inference server's HTTP application: generation and health; the other routes are in the modules beside it.

Routes only translate between HTTP and `grpo_engine.server.engine.Engine`. Assumes one event loop and one engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Completion, Engine, EngineStalled, Generation
from grpo_engine.server.http.bridge_routes import bridge_routes
from grpo_engine.server.http.lora_routes import lora_routes
from grpo_engine.server.http.openai_routes import openai_routes
from grpo_engine.server.http.requests import (
    MAX_BODY_BYTES,
    MAX_BODY_BYTES_WITHOUT_TOKEN,
    MAX_BODY_MARKS,
    AnswerMaker,
    RefuseDuringShutdown,
    add_error_answers,
    only_owner,
    read_body,
    unless_disconnected,
)
from grpo_engine.server.http.sleep_routes import sleep_routes
from grpo_engine.serving.access import AccessControl, Token, caller
from grpo_engine.serving.bodies import BodyLimits
from grpo_engine.serving.body_queue import BodyQueue
from grpo_engine.wire.inference import GenerateRequest, LogprobsMode

BODIES_AT_ONCE = 4
"""Of the longest that are accepted; more wait, so that unfinished ones do not add up in memory."""
OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Answered without the token also where sampling needs it."""
VERSION_HEADER = b"x-policy-version"
"""Policy version in answers of the engine's own routes, when the answer, or the first chunk of a stream, was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the routes use: the engine, its settings, the id of this start of the server, and the token, if any."""

    engine: Engine
    config: ServerConfig
    instance: str
    token: str | None = None


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
    app.add_middleware(BodyQueue)
    app.add_middleware(RefuseDuringShutdown)
    app.add_middleware(
        BodyLimits,
        longest_bytes=MAX_BODY_BYTES,
        num_at_once=BODIES_AT_ONCE,
        longest_without_token_bytes=MAX_BODY_BYTES_WITHOUT_TOKEN,
        most_marks=MAX_BODY_MARKS,
    )
    # `only_owner` asks for the token too, but runs after the body was read.
    app.add_middleware(
        AccessControl,
        host=service.config.host,
        token=service.token,
        needs_token=lambda path: (
            path not in OPEN_PATHS if service.config.sampling_needs_token else path.startswith(("/bridge/", "/lora/"))
        ),
        allowed_origins=lambda: _allowed_origins(service.config),
    )
    engine, answers = service.engine, AnswerMaker()

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        params = await read_body(request, GenerateRequest)
        if params.stream:
            raise HTTPException(400, "stream: streaming is not supported here; leave it out")
        engine.check_health()
        text_or_tokens = params.prompt
        if isinstance(text_or_tokens, str):
            prompt = await engine.encode(text_or_tokens)
        else:
            prompt = text_or_tokens.prompt_token_ids
        generation = await unless_disconnected(request, engine.generate(prompt, params))
        make = partial(
            generate_answer,
            generation,
            params,
            prompt_text=text_or_tokens if isinstance(text_or_tokens, str) else engine.decode(prompt),
            logprobs_mode=engine.logprobs_mode,
            version=engine.info().policy_version,
        )
        return await answers.answer(make)

    @app.get("/health")
    async def health() -> Response:
        try:
            engine.check_health()
        except EngineStalled as error:  # typed, because waiting does not help, unlike during loading
            return JSONResponse({"detail": str(error), "engine": "stalled"}, 503)
        if (words := engine.info().sleep_words) is not None:  # healthy: requests are answered later
            return JSONResponse({"detail": words, "engine": "asleep"})
        return Response()

    probe: asyncio.Task[Generation] | None = None

    async def generate_one_token() -> Generation:
        caller().token = Token.RIGHT  # probes have none, and would wait as long as the run has requests
        return await engine.generate(
            await engine.encode("a"), GenerateRequest(prompt="health", max_tokens=1, temperature=0)
        )

    @app.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        nonlocal probe
        engine.check_health()
        if probe is None or probe.done():  # one at a time, whoever asks
            probe = asyncio.create_task(generate_one_token())
            probe.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # also where nobody waits
        await unless_disconnected(request, asyncio.shield(probe))
        return Response()

    owner = [Depends(only_owner)]
    app.include_router(bridge_routes(engine, service.config, service.instance), prefix="/bridge", dependencies=owner)
    app.include_router(sleep_routes(engine, service.config, service.instance), prefix="/bridge", dependencies=owner)
    app.include_router(lora_routes(engine, service.config, service.instance), prefix="/lora", dependencies=owner)
    if service.config.engine == "vllm":
        _serve_stock_routes(app, engine)
    else:
        app.include_router(openai_routes(engine, service.config, answers), prefix="/v1")

    @app.get("/bridge/list_endpoints", dependencies=owner)
    async def list_endpoints() -> JSONResponse:
        ours = {path: [method.upper() for method in methods] for path, methods in app.openapi()["paths"].items()}
        stock = engine.stock_app()
        paths = ours if stock is None else await asyncio.to_thread(stock.endpoints) | ours
        return JSONResponse({"endpoints": [{"path": path, "methods": paths[path]} for path in sorted(paths)]})

    return app


def _allowed_origins(config: ServerConfig) -> Collection[str]:
    """Origins whose web pages may use the server, by vLLM's argument of this name."""
    if "allowed_origins" not in config.vllm:
        return ()
    from grpo_engine.server.vllm.flags import frontend_of

    allowed: list[str] = frontend_of(config).allowed_origins
    return allowed


def _serve_stock_routes(app: FastAPI, engine: Engine) -> None:
    """Pass requests that match none of our routes to the engine's own application."""
    not_found = app.router.default

    async def stock(scope: Scope, receive: Receive, send: Send) -> None:
        stock_app = engine.stock_app()
        if stock_app is None or scope["type"] != "http":  # vLLM uses others only for speech
            await not_found(scope, receive, send)
        else:
            await stock_app(scope, receive, _with_version_header(send, lambda: engine.info().policy_version))

    app.router.default = stock


def _with_version_header(send: Send, policy_version: Callable[[], int]) -> Send:
    """Add the version to the headers of an answer.

    They are sent with the first chunk of the body, which a stream produces once it passed the gate and has a token.
    """
    head: Message | None = None

    async def send_with_version(message: Message) -> None:
        nonlocal head
        if message["type"] == "http.response.start":
            head = message
            return
        if head is not None:
            version = (VERSION_HEADER, str(policy_version()).encode())
            await send({**head, "headers": [*head.get("headers", ()), version]})
            head = None
        await send(message)

    return send_with_version


def generate_answer(
    generation: Generation, params: GenerateRequest, *, prompt_text: str, logprobs_mode: LogprobsMode, version: int
) -> bytes:
    """The body of one answer as JSON, in the stock server's shape; `version` is reported where nothing was generated.

    Dictionaries rather than `wire.inference.GenerateResponse`: a batch has thousands of one-entry dictionaries, and
    validating each costs more than sampling it. The tests check every answer against the wire type.
    """
    completions = generation.completions
    body: dict[str, Any] = {
        "text": [completion.text for completion in completions],
        "prompt": prompt_text,
        "finish_reasons": [completion.finish_reason for completion in completions],
        "policy_version": max((c.policy_versions[-1] for c in completions if c.policy_versions), default=version),
        "logprobs_mode": logprobs_mode,
    }
    if params.logprobs is not None:
        body["logprobs"] = [logprob_entries(completion) for completion in completions]
        body["prompt_token_ids"] = generation.prompt_token_ids
        body["token_ids"] = [completion.token_ids for completion in completions]
        body["policy_versions"] = [completion.policy_versions for completion in completions]
    if generation.prompt_logprobs is not None:
        body["prompt_logprobs"] = [
            None if entry is None else {str(token): value for token, value in entry}
            for entry in generation.prompt_logprobs
        ]
    return json.dumps(body, allow_nan=False).encode()


def logprob_entries(completion: Completion) -> list[list[dict[str, float]]]:
    """`[position] -> [{"token id": logprob}]`; the sampled token is always the first key."""
    own = zip(completion.token_ids, completion.logprobs, strict=True)
    if completion.top_logprobs is None:
        return [[{str(token): value}] for token, value in own]
    return [
        [{str(token): value} | {str(i): v for i, v in top if i != token}]
        for (token, value), top in zip(own, completion.top_logprobs, strict=True)
    ]
