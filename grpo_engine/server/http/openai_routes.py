"""`/v1/*` in OpenAI's shapes, for environments and tools that use only this API.

Without streaming, tools and images. Answers have the policy version beside the standard keys.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field, ValidationError

from grpo_engine.errors import DataError
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Completion, Engine, Generation
from grpo_engine.server.http.requests import AnswerMaker, read_body, unless_disconnected
from grpo_engine.server.prompts import check_num_completions
from grpo_engine.wire.codec import Message, first_fault
from grpo_engine.wire.inference import (
    MAX_TEMPERATURE,
    GenerateRequest,
    Penalty,
    RepetitionPenalty,
    Stop,
    StopTokens,
)

MAX_MESSAGES = 4096
"""Of a conversation: each is validated on the event loop."""
_DEFAULT_CHAT_TOKENS = 1024
"""Default of `max_tokens` in a chat request; OpenAI's own default is the rest of the model's context."""


class SamplingFields(Message):
    """Fields of both kinds of request; unknown keys are ignored, because clients send many without a meaning here."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    n: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = None
    stop: Stop = None
    stop_token_ids: StopTokens = None
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    skip_special_tokens: bool = True
    stream: bool = False

    def sampling(self, *, max_tokens: int, logprobs: int | None) -> GenerateRequest:
        """The fields as an engine's request, without the prompt.

        Raises:
            DataError: a number is out of range.
        """
        shared = self.model_dump(exclude={"model", "stream"}, include=set(SamplingFields.model_fields))
        try:
            return GenerateRequest(prompt="", max_tokens=max_tokens, logprobs=logprobs, **shared)
        except ValidationError as error:
            raise DataError(first_fault(error)) from None


class CompletionRequest(SamplingFields):
    """Body of `POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0)
    echo: bool = False


class ChatMessage(Message):
    """One message with text content."""

    role: str
    content: str


class ChatRequest(SamplingFields):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0)


class TokenTexts(dict[int, str]):
    """Texts of single tokens, each decoded once: an answer may have half a million, and each takes microseconds."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def __missing__(self, token: int) -> str:
        text = self[token] = self._engine.decode([token])
        return text


def openai_routes(engine: Engine, config: ServerConfig, answers: AnswerMaker) -> APIRouter:
    """The routes below `/v1`."""
    router = APIRouter()
    texts = TokenTexts(engine)
    model_name = config.served_model_name or config.model_name
    started_at = int(time.time())

    @router.get("/models")
    async def models() -> dict[str, Any]:
        entry = {
            "id": model_name,
            "object": "model",
            "created": started_at,
            "owned_by": "grpo",
            "root": config.model_name,
        }
        return {"object": "list", "data": [entry | {"max_model_len": config.max_model_len}]}

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        _refuse_streaming(body)
        if body.echo:
            raise DataError("echo: not supported; request prompt_logprobs from /generate")
        params = body.sampling(max_tokens=body.max_tokens, logprobs=body.logprobs)
        generations = [
            await unless_disconnected(request, engine.generate(prompt, params))
            for prompt in await _prompts(body, engine)
        ]

        def make() -> bytes:
            made = ((generation, each) for generation in generations for each in generation.completions)
            choices = [
                {
                    "index": index,
                    "text": completion.text,
                    "finish_reason": completion.finish_reason,
                    "logprobs": None if body.logprobs is None else _completion_logprobs(completion, texts),
                    "token_ids": completion.token_ids,
                    "prompt_token_ids": generation.prompt_token_ids,
                    "policy_versions": completion.policy_versions,
                }
                for index, (generation, completion) in enumerate(made)
            ]
            return _json(_answer("cmpl", "text_completion", model_name, choices, generations, engine))

        return await answers.answer(make)

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        _refuse_streaming(body)
        prompt = await engine.render_chat([{"role": m.role, "content": m.content} for m in body.messages])
        params = body.sampling(
            max_tokens=body.max_completion_tokens or body.max_tokens or _DEFAULT_CHAT_TOKENS,
            logprobs=body.top_logprobs if body.logprobs else None,
        )
        generation = await unless_disconnected(request, engine.generate(prompt, params))

        def make() -> bytes:
            choices = [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": completion.text},
                    "finish_reason": completion.finish_reason,
                    "logprobs": {"content": _chat_logprobs(completion, texts)} if body.logprobs else None,
                    "token_ids": completion.token_ids,
                    "policy_versions": completion.policy_versions,
                }
                for index, completion in enumerate(generation.completions)
            ]
            answer = _answer("chatcmpl", "chat.completion", model_name, choices, [generation], engine)
            return _json(answer | {"prompt_token_ids": prompt})

        return await answers.answer(make)

    return router


def _answer(
    prefix: str, kind: str, model: str, choices: list[dict[str, Any]], generations: list[Generation], engine: Engine
) -> dict[str, Any]:
    num_prompt = sum(len(generation.prompt_token_ids) for generation in generations)
    num_new = sum(len(completion.token_ids) for generation in generations for completion in generation.completions)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new},
        "policy_version": max((v for choice in choices for v in choice["policy_versions"][-1:]), default=0),
        "logprobs_mode": engine.logprobs_mode,
    }


def _json(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def _prompts(body: CompletionRequest, engine: Engine) -> list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await engine.encode(prompt)]
    if not prompt or isinstance(prompt[0], int):  # then all are
        return [prompt]  # type: ignore[list-item]
    check_num_completions(body.n, num_prompts=len(prompt))
    return [await engine.encode(each) if isinstance(each, str) else list(each) for each in prompt]


def _refuse_streaming(body: SamplingFields) -> None:
    if body.stream:
        raise HTTPException(400, "stream: streaming is not supported here; leave it out")


def _completion_logprobs(completion: Completion, texts: TokenTexts) -> dict[str, Any]:
    tokens = [texts[token] for token in completion.token_ids]
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    tops = completion.top_logprobs
    return {
        "tokens": tokens,
        "token_logprobs": completion.logprobs,
        "top_logprobs": None if tops is None else [{texts[i]: v for i, v in top} for top in tops],
        "text_offset": offsets,
    }


def _chat_logprobs(completion: Completion, texts: TokenTexts) -> list[dict[str, Any]]:
    tops = completion.top_logprobs or [[] for _ in completion.token_ids]
    return [
        _token_entry(token, value, texts) | {"top_logprobs": [_token_entry(i, v, texts) for i, v in top]}
        for token, value, top in zip(completion.token_ids, completion.logprobs, tops, strict=True)
    ]


def _token_entry(token: int, value: float, texts: TokenTexts) -> dict[str, Any]:
    text = texts[token]
    return {"token": text, "logprob": value, "bytes": list(text.encode())}
