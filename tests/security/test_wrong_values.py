"""Bodies and answers in which everything is wrong: how many errors, and how much memory, they make."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from rollout_fakes import api_client
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from grpo_engine.bridges.transport.server_client import _detail
from grpo_engine.config import did_you_mean
from grpo_engine.data.source import RolloutApiSource
from grpo_engine.environments.peers import read
from grpo_engine.environments.tasks.records import read_items, read_records
from grpo_engine.errors import ConfigError, PeerError
from grpo_engine.rollouts.http import app as _rollout_routes  # noqa: F401 (all messages are imported)
from grpo_engine.rollouts.http import bodies as rollout_bodies
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.http.openai_routes import openai_routes
from grpo_engine.server.http.requests import AnswerMaker, add_error_answers, read_body
from grpo_engine.server.vllm.stock import StockApp, fail_fast_on_bodies
from grpo_engine.serving.access import AccessControl
from grpo_engine.serving.bodies import BodyLimits
from grpo_engine.wire.codec import Message, failing_fast, first_fault
from grpo_engine.wire.inference import BridgeInfo, GenerateRequest, GenerateResponse, JoinRequest
from grpo_engine.wire.rollouts import BatchResponse, EvaluationAnswer, IdleTimes

MANY = 20_000
MOST_ERRORS = 20
WRONG_ANSWER = {
    "text": [1] * MANY,
    "prompt": "",
    "finish_reasons": [""] * MANY,
    "logprobs": [[[""] * MANY]],
    "prompt_logprobs": [dict.fromkeys(map(str, range(MANY)), "")],
    "token_ids": [[""]] * MANY,
    "policy_version": 0,
    "policy_versions": [""] * MANY,
    "logprobs_mode": "raw",
}


def kinds(base: type[Message] = Message) -> Iterator[type[Message]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


@pytest.mark.parametrize("kind", sorted(kinds(), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_every_collection_of_every_message_is_validated_up_to_its_first_wrong_item(kind: type[Message]) -> None:
    assert kind.__pydantic_core_schema__ == failing_fast(kind.__pydantic_core_schema__)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (GenerateRequest, {"prompt": {"prompt_token_ids": [""] * MANY}, "stop_token_ids": [""] * MANY}),
        (GenerateResponse, WRONG_ANSWER),
        (JoinRequest, {"layers": [[""] * MANY] * 2}),
        (IdleTimes, {"since_s": 0, "idle_s": dict.fromkeys(map(str, range(MANY)), "")}),
        (IdleTimes, {"since_s": 0, "idle_s": {f"x{number}": 0 for number in range(MANY)}}),
        (EvaluationAnswer, {"env_id": 0, "rewards": [[""]] * MANY, "policy_versions": [[[""] * MANY]]}),
        (BatchResponse, {"batch": [""] * MANY, "environments": dict.fromkeys(map(str, range(MANY)), 1)}),
    ],
)
def test_a_message_of_wrong_values_is_a_few_errors(kind: type[Message], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate_json(json.dumps(wrong))
    assert refused.value.error_count() <= MOST_ERRORS
    assert len(first_fault(refused.value)) < 400


def test_what_a_message_lacks_does_not_multiply_what_else_is_in_it() -> None:
    content = b'{"other":[' + b"[]," * 100_000 + b"[]]}"
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError):
            BridgeInfo.model_validate_json(content)  # which lacks ten keys
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20  # the lists alone have 6.4 MB


def test_a_key_or_text_of_any_length_is_shown_by_its_beginning() -> None:
    with pytest.raises(ValidationError) as refused:
        IdleTimes.model_validate_json(json.dumps({"since_s": 0, "idle_s": {"x" * 1_000_000: 0}}))
    assert len(first_fault(refused.value)) < 400
    assert did_you_mean("prompt" * 100_000, ["prompt"]) == ""
    assert did_you_mean("promt", ["prompt"]) == " (did you mean 'prompt'?)"


# --- services --------------------------------------------------------------------------------------------------------


def inference_routes() -> FastAPI:
    app = FastAPI()
    add_error_answers(app)
    app.include_router(openai_routes(None, ServerConfig(model_name="m"), AnswerMaker()), prefix="/v1")  # type: ignore[arg-type]

    @app.post("/generate")
    async def generate(request: Request) -> str:
        return (await read_body(request, GenerateRequest)).model_dump_json()

    @app.post("/bridge/join")
    async def join(body: JoinRequest) -> str:
        return body.dtype

    return app


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": {"prompt_token_ids": [""] * MANY}}),
        ("/generate", {"prompt": "a", **{f"key{number}": 1 for number in range(MANY)}}),
        ("/generate", {"prompt": "a", "k" * 1_000_000: 1}),
        ("/generate", [""] * MANY),
        ("/v1/completions", {"prompt": [{}] * MANY, "stop": [1] * MANY}),
        ("/v1/completions", {"prompt": [[""]] * MANY}),
        ("/v1/chat/completions", {"messages": [""] * 4096}),
        ("/bridge/join", {"layers": [[""] * MANY]}),
        ("/bridge/join", {"k" * 1_000_000: 1}),
    ],
)
async def test_the_inference_server_names_a_few_of_the_faults_of_a_body(path: str, body: Any) -> None:
    async with client_of(inference_routes()) as client:
        refused = await client.post(path, json=body)
    assert (refused.status_code, len(refused.text) < 3000) == (422, True)


class TheirMessage(BaseModel):
    role: str
    content: str | list[dict[str, str]]


class TheirRequest(BaseModel):
    messages: list[TheirMessage | dict[str, int]]
    logit_bias: dict[str, float] | None = None


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": [1] * MANY},
        {"messages": [{"role": "user", "content": [1] * MANY}]},
        {"messages": [], "logit_bias": dict.fromkeys(map(str, range(MANY)), "")},
    ],
)
async def test_routes_of_vllm_validate_a_body_up_to_its_first_wrong_items(wrong: dict[str, Any]) -> None:
    stock = FastAPI()

    @stock.post("/v1/chat/completions")
    async def complete(request: TheirRequest, raw: Request) -> int:
        return len(request.messages)

    fail_fast_on_bodies(stock)
    async with client_of(StockApp(stock)) as client:
        right = {"messages": [{"role": "user", "content": [{"type": "text"}]}] * 2, "logit_bias": {"1": 2}}
        assert (await client.post("/v1/chat/completions", json=right)).text == "2"
        refused = await client.post("/v1/chat/completions", json=wrong)
    assert (refused.status_code, len(refused.json()["detail"]) <= MOST_ERRORS) == (422, True)


async def test_unknown_keys_of_a_request_are_named_beside_its_wrong_values() -> None:
    async with client_of(inference_routes()) as client:
        refused = await client.post("/generate", json={"prompt": "a", "temperatur": 1, "top_p": 2, "zz": None})
    detail = refused.json()["detail"]
    assert "temperatur: not a parameter here (did you mean 'temperature'?)" in detail
    assert "zz: not a parameter here" in detail
    assert "top_p: Input should be less than or equal to 1" in detail


async def test_a_body_that_is_no_json_is_refused_with_the_place() -> None:
    async with client_of(inference_routes()) as client:
        refused = await client.post("/generate", content=b'{"prompt": ')
    assert (refused.status_code, "body: not JSON: EOF" in refused.text) == (422, True)


async def length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


async def test_a_body_of_more_lists_objects_and_texts_than_any_request_has_is_refused_as_it_arrives() -> None:
    routes = FastAPI(routes=[Route("/", length, methods=["POST"])])
    limits = BodyLimits(routes, longest_bytes=1 << 20, num_at_once=1, most_marks=100)
    async with client_of(AccessControl(limits, host="127.0.0.1", token=None)) as client:
        for right in (b"[" * 100, b'{"[' * 33, b"1," * 10_000):
            assert (await client.post("/", content=right)).text == str(len(right))
        for wrong in (b"[" * 101, b"[],{}," * 51, b'"",' * 51):
            refused = await client.post("/", content=wrong)
            assert (refused.status_code, "more than 100 brackets, braces and quotes" in refused.text) == (413, True)


async def test_the_rollout_api_names_a_few_of_the_faults_of_a_body() -> None:
    bodies: dict[str, Any] = {
        "/evaluations/e/answers": {"env_id": 0, "rewards": [[""] * MANY], "lengths": [[""] * MANY]},
        "/register": {"k" * 1_000_000: 1},
        "/register-env": [""] * MANY,
        "/disconnect-env": {"env_id": [""] * MANY},
        "/scored_data": {"tokens": [[""] * MANY]},
        "/scored_data_list": [""] * 1000,  # more are refused as too many
    }
    async with api_client() as client:
        for path, body in bodies.items():
            refused = await client.post(path, json=body)
            assert (path, refused.status_code, len(refused.text) < 5000) == (path, 422, True)


async def test_the_rollout_api_parses_no_body_of_millions_of_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_bodies, "_MOST_MARKS", 1000)
    right = b'{"tokens": [[1]], "masks": [[1]], "scores": [1], "images": [' + b"1," * 1000 + b"1]}"
    wrong = right.replace(b"1,", b"[],")
    zipped = gzip.compress(wrong)
    async with api_client() as client:
        assert (await client.post("/scored_data", content=right)).status_code == 200
        for content, headers in ((wrong, {}), (zipped, {"Content-Encoding": "gzip"})):
            for path in ("/scored_data", "/register"):
                refused = await client.post(path, content=content, headers=headers)
                assert (refused.status_code, "more than 1,000 brackets" in refused.text) == (413, True)


# --- clients ---------------------------------------------------------------------------------------------------------


def answering(content: bytes) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _: httpx.Response(200, content=content))


def test_an_answer_of_wrong_values_is_an_error_of_a_few_lines() -> None:
    wrong = json.dumps(WRONG_ANSWER).encode()
    answer = httpx.Response(200, content=wrong, request=httpx.Request("POST", "http://there/generate"))
    with pytest.raises(PeerError, match="not a GenerateResponse: text") as refused:
        read(GenerateResponse, answer)
    assert len(str(refused.value)) < 500
    long_key = json.dumps({"batch": [], "environments": {"x" * 1_000_000: ""}}).encode()
    with RolloutApiSource("http://there", transport=answering(long_key)) as source:
        with pytest.raises(PeerError, match="not a batch") as refused:
            source.poll()
        assert len(str(refused.value)) < 500


def test_the_log_has_no_more_than_the_beginning_of_what_an_api_says_of_a_registration(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    run = {"batch_size": 8, "max_token_len": 1, "checkpoint_dir": "", "save_checkpoint_interval": 1}
    content = json.dumps({"uuid": "u" * 100_000, "changes": "c" * 100_000}).encode()
    with RolloutApiSource("http://there", transport=answering(content)) as source:
        source.register(**run, starting_step=0, num_steps=1)  # type: ignore[arg-type]
    assert len(caplog.text) < 2000
    with (
        RolloutApiSource("http://there", transport=answering(b"<html>")) as source,
        pytest.raises(PeerError, match="without a uuid"),
    ):
        source.register(**run, starting_step=0, num_steps=1)  # type: ignore[arg-type]


def test_a_long_refusal_is_shown_and_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    content = b'{"detail": [' + b"[]," * 400_000 + b"[]]}"
    monkeypatch.setattr(httpx.Response, "json", lambda _: pytest.fail("parsed"))
    assert len(_detail(httpx.Response(400, content=content))) < 2000


def test_a_record_of_lists_without_end_is_refused_and_of_others_only_what_is_used_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "a"})[:-1] + ', "more": [' + "[]," * 1_100_000 + "[]]}\n")
    with pytest.raises(ConfigError, match=r"items\.jsonl:1: more than 1,048,576 lists and objects"):
        read_items(path, question_field="question", answer_field="answer", where="task.path", most_lines=1000)
    path.write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    records = read_records(path, where="task.path")
    assert iter(records) is records  # one at a time: before, 60 MB of lists in a field that no task reads took 1.5 GB
    assert [record["answer"] for _, record in records] == ["a"]


def test_a_pipe_in_place_of_a_data_set_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "items.jsonl")
    with pytest.raises(ConfigError, match=r"items\.jsonl cannot be read: not a regular file"):
        next(read_records(tmp_path / "items.jsonl", where="task.path"))


def test_half_a_character_in_a_data_set_is_named_with_its_line(tmp_path: Path) -> None:
    def questions(*texts: str) -> list[str]:
        path = tmp_path / "items.jsonl"
        path.write_text("".join(f'{{"question": "{text}", "answer": "a"}}\n' for text in texts))
        items = read_items(path, question_field="question", answer_field="answer", where="task.path")
        return [item.question for item in items]

    assert questions(r"\ud83d\ude00", r"\\ud83d") == ["\U0001f600", r"\ud83d"]
    with pytest.raises(ConfigError, match=r"items\.jsonl:2: has half a character"):
        questions("q", r"\ud83d")


def test_of_a_record_with_a_million_fields_the_first_are_named(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text(json.dumps({f"f{number}" + "x" * 1000: 1 for number in range(2000)}))
    with pytest.raises(ConfigError, match=r"it has f0x+…, .* and 1992 more$") as raised:
        read_items(tmp_path / "items.jsonl", question_field="question", answer_field="answer", where="task.path")
    assert len(str(raised.value)) < 1000
