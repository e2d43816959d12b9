"""Grammars that constrain an answer of vLLM are compiled only for requests with the token; and what needs none."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from grpo_engine.errors import DataError
from grpo_engine.server.vllm.requests import check_worker_limits
from grpo_engine.server.vllm.stock import _GRAMMARS, _POSTED, StockApp, with_grammars_of_owners
from grpo_engine.serving.access import AccessControl

HARMLESS = {"json_object", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"}
"""Fields that compile nothing of the client's by themselves."""


async def compiled(_prompt: str, sampling_params: Any) -> AsyncIterator[str]:
    """In place of vLLM."""
    yield "compiled" if sampling_params.structured_outputs else "plain"


def client_of(token: str | None, sent: str | None) -> httpx.AsyncClient:
    generate, stock = with_grammars_of_owners(compiled), FastAPI()

    @stock.post("/{path:path}")
    async def completions(request: Request) -> str:
        asked = (await request.json()).get("response_format")
        fields = None if asked is None else SimpleNamespace(**asked)
        return str(await anext(generate("a", SimpleNamespace(structured_outputs=fields))))

    app = AccessControl(StockApp(stock), host="127.0.0.1", token=token)
    headers = {} if sent is None else {"Authorization": f"Bearer {sent}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:9001", headers=headers)


@pytest.mark.parametrize("field", _GRAMMARS)
async def test_a_grammar_is_compiled_only_for_requests_with_the_token_where_there_is_one(field: str) -> None:
    """Compiling 22 of at most 2.4 MB took a core for 40 minutes and 2.8 GB, and one of 2 kB held others for 4 s."""
    for token, sent, status in (("t", None, 401), ("t", "another", 401), ("t", "t", 200), (None, None, 200)):
        async with client_of(token, sent) as client:
            answer = await client.post("/v1/completions", json={"response_format": {field: "a"}})
            assert answer.status_code == status
            if status == 401:
                assert "a schema, grammar or choice of answers: this route requires a token" in answer.text
            assert (await client.post("/v1/completions", json={})).text == '"plain"'
            harmless = await client.post("/v1/completions", json={"response_format": {"json_object": True}})
            assert harmless.text == '"compiled"'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/completions",
            {"use_beam_search": True},
        ),  # one request of 150 bytes for ten beams took 0.5 GB in a minute
        ("/v1/completions", {"repetition_detection": {"min_count": 2}}),  # 3 s at each token of a completion of 16,000
        ("/v1/completions", {"logprob_token_ids": [7] * 128}),  # 169 MB of answer, and /health waited for 29 s
        ("/v1/completions", {"vllm_xargs": {"a": "b"}}),
        ("/v1/chat/completions", {"tools": []}),
        ("/v1/chat/completions", {"chat_template": "{{ 1 }}"}),
        ("/tokenize", {"chat_template": "{{ 1 }}"}),
        ("/v1/chat/completions/batch", {}),
        ("/v1/chat/completions/render", {}),
        ("/v1/messages", {}),
        ("/v1/responses", {}),
        ("/v1/responses/7/cancel", {}),
        ("/inference/v1/generate", {}),
    ],
)
async def test_vllms_routes_take_without_the_token_what_common_clients_send_and_nothing_else(
    path: str, body: dict[str, Any]
) -> None:
    """In one version after another some field or route let any user of the machine hold the run."""
    for sent in (None, "another"):
        async with client_of("t", sent) as client:
            refused = next(iter(body), path)
            answer = await client.post(path, json=body)
            assert answer.status_code == 401
            assert answer.json()["error"]["message"].startswith(f"{refused}: this route requires a token")
            for plain in ({"temperature": 1, "n": 2}, dict.fromkeys(body)):
                if path in ("/v1/completions", "/v1/chat/completions"):
                    assert (await client.post(path, json=plain)).text == '"plain"'
    for token in ("t", None):
        async with client_of(token, token) as client:
            assert (await client.post(path, json=body)).text == '"plain"'


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, once vLLM imports it
def test_the_fields_that_need_no_token_are_fields_of_vllm() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    for path, request in (("/v1/completions", CompletionRequest), ("/v1/chat/completions", ChatCompletionRequest)):
        of_either = CompletionRequest.model_fields.keys() | ChatCompletionRequest.model_fields.keys()
        assert _POSTED[path] <= of_either
        assert {"prompt", "messages"} & request.model_fields.keys() <= _POSTED[path]


@pytest.mark.vllm
def test_vllm_has_no_other_kind_of_grammar() -> None:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    assert "structured_outputs" in SamplingParams.__annotations__
    fields = {each.name for each in dataclasses.fields(StructuredOutputsParams) if not each.name.startswith("_")}
    assert fields - HARMLESS == set(_GRAMMARS)


class Asked(SimpleNamespace):
    """`SamplingParams`, each character of whose bad words is a token."""

    def update_from_tokenizer(self, _tokenizer: None) -> None:
        self.bad_words_token_ids = [list(map(ord, word)) for word in self.bad_words]


@pytest.mark.parametrize(
    ("asked", "message", "is_of_second_runner"),
    [
        (
            {"min_tokens": 1, "stop_token_ids": [5, 1_000_000]},
            "stop_token_ids: 1000000 is not in the vocabulary",
            False,
        ),
        ({"min_tokens": 1, "stop_token_ids": [-1]}, "stop_token_ids: -1 is not in the vocabulary of 2000", False),
        ({"allowed_token_ids": [2000]}, "allowed_token_ids: 2000 is not in the vocabulary of 2000", False),
        (
            {"min_tokens": 1, "stop_token_ids": list(range(128))},
            "stop_token_ids: 128 tokens; vLLM takes at most 127",
            True,
        ),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias: 1025 tokens; vLLM takes at most 1024", True),
        ({"bad_words": ["a"] * 129}, "bad_words: 129 words of 129 tokens", True),
        ({"bad_words": ["a" * 1025]}, "bad_words: 1 words of 1025 tokens", True),
    ],
)
def test_what_ends_a_worker_of_vllm_is_refused(asked: dict[str, Any], message: str, is_of_second_runner: bool) -> None:
    """One request of 100 bytes without the token, `min_tokens` with a stop token of a million, ended vLLM 0.27."""
    with pytest.raises(DataError, match=message):
        check_worker_limits(Asked(**asked), 2000, tokenizer=None, is_second_runner=True)
    if is_of_second_runner:
        check_worker_limits(Asked(**asked), 2000, tokenizer=None, is_second_runner=False)
    check_worker_limits(Asked(stop_token_ids=list(range(1024))), 2000, tokenizer=None, is_second_runner=True)
