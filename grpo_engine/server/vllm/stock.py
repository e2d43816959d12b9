"""vLLM's own HTTP application over our engine: `/v1/*`, `/metrics`, `/tokenize`, …, for paths that are not our routes.

Every generation of these routes goes through `VllmEngine.guarded`: it waits while weights change, its cache key is
salted with their version, and it uses the served adapter. Changes of weights or caches without the weight lock are
refused twice: by their path, naming our route, and by the method of vLLM that they call. All other routes except plain
inference answer only the run's owner on this machine, whatever VLLM_SERVER_DEV_MODE is.

Written against vLLM 0.26 to 0.33.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from grpo_engine.errors import DataError, GrpoError
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import WeightsBusy
from grpo_engine.server.http.requests import only_owner, read_bytes, status_of
from grpo_engine.server.prompts import check_listed_prompts
from grpo_engine.server.vllm.flags import frontend_of
from grpo_engine.serving.access import TOKEN_HEADERS, TOKEN_REQUIRED, Token, caller
from grpo_engine.serving.body_queue import replayed
from grpo_engine.serving.connections import SomeWarnings, warning_place
from grpo_engine.wire.codec import fail_fast

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

Generate = Callable[..., AsyncIterator[Any]]
"""Has the signature and the results of `AsyncLLM.generate`."""

_SAMPLED = frozenset(
    {
        *("model", "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
        *("stop_token_ids", "ignore_eos", "include_stop_str_in_output", "bad_words", "logit_bias", "allowed_token_ids"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs", "prompt_logprobs"),
        *("skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens", "return_token_ids"),
        *("return_tokens_as_token_ids", "stream", "stream_options", "response_format", "priority", "user"),
    }
)
_POSTED: dict[str, frozenset[str]] = {
    "/v1/completions": _SAMPLED | {"prompt", "echo", "suffix"},
    "/v1/chat/completions": _SAMPLED
    | {"messages", "top_logprobs", "max_completion_tokens", "add_generation_prompt", "continue_final_message"},
    "/tokenize": frozenset(
        {"model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "return_token_strs"}
    ),
    "/detokenize": frozenset({"model", "tokens"}),
}
"""The fields that requests without the token may have, where the server has one: what common clients send. What else
vLLM takes gave one way after another to hold its event loop or engine, from beams to the search for repetitions."""
_WITHOUT_BODY = frozenset({"/v1/models", "/version", "/metrics", "/ping", "/load"})
_INFERENCE = (
    _WITHOUT_BODY
    | _POSTED.keys()
    | {
        *("/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/completions/render"),
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/inference/v1/generate"),
    }
)
"""Paths that any client with the token may use, from any machine."""
_LISTS = frozenset(path for path in _INFERENCE if path.startswith(("/v1/completions", "/v1/chat/")))
"""Those that take several prompts, whose number vLLM does not limit."""
_RESPONSES = "/v1/responses/"
_OBJECT_LOGPROBS = "/v1/chat/completions"
"""Its answers have an object of vLLM for each log-probability: half a million of one request without the token held the
event loop for 7 s, and eight such requests a run for 87 s."""
_OBJECT_COST = 8
"""Of one, as 13 µs are to the 1.4 of `/generate`."""
_GRAMMARS = ("json", "regex", "choice", "grammar", "structural_tag")
"""Constraints of an answer that vLLM compiles, for any time and into any memory: 22 requests of 2.4 MB at most took 2.8
GB and a core for 40 minutes, and one of 2 kB held all others for 4 s. Any JSON object (`json_object`) is harmless."""
_OURS = {
    "/v1/load_lora_adapter": "/lora/load",
    "/v1/unload_lora_adapter": "/lora/unload",
    "/adapters": "/lora/load",
    "/pause": "/bridge/pause",
    "/resume": "/bridge/resume",
    "/sleep": "/bridge/sleep",
    "/wake_up": "/bridge/wake_up",
    "/release_kv_cache_memory": "/bridge/sleep",
    **dict.fromkeys(
        (
            *("/collective_rpc", "/weight_checker", "/scale_elastic_ep"),
            *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
            *("/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update"),
            *("/update_weight_version", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
        ),
        "/bridge/reload",
    ),
}
"""Routes of vLLM that change weights, adapters or caches → ours. A stock trainer tries the first one, and uses
`/lora/load` when the answer is not 200."""
_CHANGES = frozenset(
    {
        *("add_lora", "remove_lora", "pin_lora", "collective_rpc", "scale_elastic_ep", "handle_fault", "shutdown"),
        *("pause_generation", "resume_generation", "sleep", "wake_up", "release_kv_cache_memory"),
        *("checkpoint_prepare", "checkpoint_restore"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update"),
        *("start_draft_weight_update", "update_weights", "finish_weight_update", "update_weight_version"),
        *("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"),
    }
)
"""Methods of `AsyncLLM` that vLLM's routes must not call."""


class GuardedClient:
    """`AsyncLLM` for vLLM's routes: generation is guarded, and methods that change weights are refused."""

    def __init__(self, llm: AsyncLLM, generate: Generate) -> None:
        self._llm = llm
        self.generate = generate

    def __getattr__(self, name: str) -> Any:
        if name in _CHANGES:
            raise WeightsBusy(f"{name} would change the model without the weight lock: use /bridge/* and /lora/*")
        return getattr(self._llm, name)


def with_grammars_of_owners(generate: Generate) -> Generate:
    """`generate` that takes a grammar only of requests with the token, where there is one.

    Routes and versions of vLLM write a grammar differently; here they are all the same.
    """

    def checked(prompt: Any, sampling_params: Any, *args: Any, **others: Any) -> AsyncIterator[Any]:
        asked = getattr(sampling_params, "structured_outputs", None)
        if caller().token is Token.WRONG and any(getattr(asked, name, None) is not None for name in _GRAMMARS):
            raise HTTPException(401, f"a schema, grammar or choice of answers: {TOKEN_REQUIRED}", TOKEN_HEADERS)
        return generate(prompt, sampling_params, *args, **others)

    return checked


class StockApp:
    """ASGI: vLLM's application with access control."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            HTTPException: the route is only for the run's owner.
        """
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        if (ours := _ours(path)) is not None:
            text = f"{path} would change the model without the weight lock: use {ours}"
            await JSONResponse(_error(text, 404), 404)(scope, receive, send)
            return
        if path not in _INFERENCE and not path.startswith(_RESPONSES):
            only_owner(Request(scope))
        is_known = caller().token is not Token.WRONG
        if not is_known and path not in _POSTED and path not in _WITHOUT_BODY:
            await _needs_token(path)(scope, receive, send)
            return
        if path in _LISTS or (not is_known and path in _POSTED):
            body = await read_bytes(Request(scope, receive))
            try:
                others = await asyncio.to_thread(_checked_body, body, None if is_known else _POSTED[path])
            except DataError as error:
                await JSONResponse(_error(str(error), 400), 400)(scope, receive, send)
                return
            if others:
                await _needs_token(", ".join(name[:40] for name in others[:4]))(scope, receive, send)
                return
            receive = replayed(body, receive)
        if path == _OBJECT_LOGPROBS:
            caller().logprob_cost = _OBJECT_COST
        await self._app(dict(scope), receive, send)

    def endpoints(self) -> dict[str, list[str]]:
        """Path → methods of the available routes; takes up to a second the first time."""
        paths = self._app.openapi()["paths"]
        return {path: [method.upper() for method in paths[path]] for path in paths if _ours(path) is None}


async def stock_app(
    llm: AsyncLLM,
    generate: Generate,
    config: ServerConfig,
    arguments: AsyncEngineArgs,
) -> StockApp:
    """vLLM's application over a running engine.

    Args:
        generate: called for every generation.
        arguments: with which `llm` was created.
    """
    app, init_app_state = await asyncio.to_thread(_build_app, llm, config, arguments)
    await init_app_state(GuardedClient(llm, with_grammars_of_owners(generate)), app.state, app.state.args, _TASKS)
    return StockApp(app)


_TASKS = ("generate",)
"""vLLM's other tasks, such as embedding, would not go through `generate`."""


def _build_app(llm: AsyncLLM, config: ServerConfig, arguments: AsyncEngineArgs) -> tuple[FastAPI, Callable[..., Any]]:
    """vLLM's application without its state, and the function that sets the state."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # vLLM 0.26 to 0.28
        from vllm.entrypoints.openai.api_server import build_app, init_app_state

    parts = (frontend_of(config), arguments)
    values = {field.name: getattr(part, field.name) for part in parts for field in dataclasses.fields(part)}
    _import_plugins(values)
    app = build_app(Namespace(**values), _TASKS, llm.model_config)
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(SomeWarnings(warning_place))
    add_our_errors(app)
    fail_fast_on_bodies(app)
    return app, init_app_state


def _import_plugins(values: dict[str, Any]) -> None:
    if plugin := values["tool_parser_plugin"]:
        from vllm.tool_parsers import ToolParserManager

        ToolParserManager.import_tool_parser(plugin)
    if plugin := values["reasoning_parser_plugin"]:
        from vllm.reasoning import ReasoningParserManager

        ReasoningParserManager.import_reasoning_parser(plugin)


def add_our_errors(app: FastAPI) -> None:
    """Answer our errors with their status, where vLLM would answer 500."""

    @app.exception_handler(GrpoError)
    async def _on_error(_request: Request, error: GrpoError) -> JSONResponse:
        status = status_of(error)
        return JSONResponse(_error(str(error), status), status)


def fail_fast_on_bodies(app: FastAPI) -> None:
    """Have routes validate a body up to the first wrong item of each list and object, as our own messages.

    Each wrong item of a conversation is an error for every kind of message: half a megabyte of numbers took 6 GB, and
    held the event loop for 50 s. FastAPI (0.133 to 0.136) and vLLM have no setting for it.
    """
    for route in app.routes:
        for field in getattr(getattr(route, "dependant", None), "body_params", ()):
            fail_fast(field._type_adapter)


def _checked_body(body: bytes, allowed: frozenset[str] | None) -> list[str]:
    """Fields of a body that are not among the `allowed` ones.

    Raises:
        DataError: it has prompts that vLLM should not get.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # vLLM answers it
        return []
    if not isinstance(fields, dict):
        return []
    check_listed_prompts(fields)
    given = [name for name, value in fields.items() if value is not None]
    return [] if allowed is None else [name for name in given if name not in allowed]


def _needs_token(what: str) -> JSONResponse:
    return JSONResponse(_error(f"{what}: {TOKEN_REQUIRED}", 401), 401, TOKEN_HEADERS)


def _error(text: str, status: int) -> dict[str, Any]:
    """The body in OpenAI's shape, like vLLM's own errors, with the `detail` of our other routes."""
    kind = "NotFoundError" if status == 404 else "BadRequestError" if status < 500 else "ServiceUnavailableError"
    return {"error": {"message": text, "type": kind, "param": None, "code": status}, "detail": text}


def _ours(path: str) -> str | None:
    """Our route that replaces one of vLLM's that changes the model."""
    return _OURS.get("/adapters" if path.startswith("/adapters/") else path)
