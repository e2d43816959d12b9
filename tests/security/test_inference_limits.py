"""What one client can take of an inference server: completions, log-probabilities, texts and lists."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from jinja2 import TemplateError
from limited_service import client_of, length
from pydantic import ValidationError
from serving import running_server, save_tiny_model
from stage import until
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from torch_engines import held_steps

from grpo_engine.errors import DataError
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Completion, Generation
from grpo_engine.server.http.app import Service, create_app
from grpo_engine.server.http.openai_routes import openai_routes
from grpo_engine.server.http.requests import AnswerMaker, add_error_answers
from grpo_engine.server.prompts import PromptCodec, check_listed_prompts, check_num_completions, max_new_tokens
from grpo_engine.server.torch import engine as torch_engine
from grpo_engine.server.torch.engine import TorchEngine
from grpo_engine.server.vllm.generations import Generations
from grpo_engine.server.vllm.stock import StockApp, add_our_errors
from grpo_engine.serving.access import AccessControl, Caller, Token, _caller
from grpo_engine.wire.inference import GenerateRequest


def test_more_completions_than_a_group_could_have_are_refused_with_the_bound() -> None:
    check_num_completions(4096)
    with pytest.raises(DataError, match="n: 100000 completions of one prompt; at most 4096"):
        check_num_completions(100_000)


@pytest.mark.parametrize(
    ("given", "asked", "status"),
    [
        ("no", {"n": 4096, "max_tokens": 60, "logprobs": 20}, 400),
        ("t", {"n": 4096, "max_tokens": 60, "logprobs": 20}, 200),
        ("no", {"n": 4096, "max_tokens": 60, "logprobs": 0}, 200),
        ("no", {"n": 1, "max_tokens": 10**6, "logprobs": 5}, 400),
        ("no", {"n": 1, "max_tokens": 1, "prompt_logprobs": 20, "prompt": {"prompt_token_ids": [1] * 30_000}}, 400),
    ],
)
async def test_a_request_without_the_token_may_ask_for_half_a_million_log_probabilities(
    given: str, asked: dict[str, Any], status: int
) -> None:
    """One for 5 million took 1.2 GB and held the event loop for 6 s, and the run for 22 s."""

    async def generate(request: Request) -> PlainTextResponse:
        params = GenerateRequest.model_validate({"prompt": "a"} | await request.json())
        prompt = [1] if isinstance(params.prompt, str) else params.prompt.prompt_token_ids
        return PlainTextResponse(str(max_new_tokens(prompt, params, max_model_len=10**6, vocabulary=100)))

    ours = FastAPI(routes=[Route("/generate", generate, methods=["POST"])])
    add_error_answers(ours)
    async with client_of(AccessControl(ours, host="127.0.0.1", token="t")) as client:
        answer = await client.post("/generate", json=asked, headers={"Authorization": f"Bearer {given}"})
        assert answer.status_code == status
        if status == 400:
            assert "a request without the token of the run may have 524288" in answer.json()["detail"]


@pytest.mark.parametrize("name", ["stop", "bad_words"])
async def test_half_a_character_is_refused_before_vllm_keeps_the_request(name: str) -> None:
    """It cannot be sent to the engine core, and vLLM forgot none: 5,000 of 70 kB without the token took 1.7 GB."""
    model = SimpleNamespace(hf_text_config=SimpleNamespace(vocab_size=100), max_model_len=100)
    asked = SimpleNamespace(max_tokens=1, **{name: ["a\ud800"]})
    running = Generations(ServerConfig(model_name="m"), "i")
    llm: Any = SimpleNamespace(model_config=model)  # that has no `generate`
    with pytest.raises(DataError, match=f"{name}: half of a surrogate pair"):
        await anext(running.guarded(lambda: llm, {"prompt_token_ids": [1]}, asked, "r", None))


async def test_the_prompts_of_a_list_share_the_log_probabilities_of_a_request_without_the_token() -> None:
    async def completions(request: Request) -> PlainTextResponse:
        asked = GenerateRequest(prompt="", **await request.json())
        for _ in range(4):
            max_new_tokens([1], asked, max_model_len=10**6, vocabulary=100)
        return PlainTextResponse("well")

    ours = FastAPI(routes=[Route("/v1/completions", completions, methods=["POST"])])
    add_error_answers(ours)
    async with client_of(AccessControl(ours, host="127.0.0.1", token="t")) as client:
        for max_tokens, status in ((1 << 17, 200), (1 + (1 << 17), 400)):
            assert (await client.post("/v1/completions", json={"max_tokens": max_tokens})).status_code == status


@pytest.mark.parametrize(
    ("path", "logprobs", "most"),
    [
        ("/v1/completions", 0, 1 << 19),
        ("/v1/chat/completions", 0, 1 << 16),
        ("/v1/chat/completions", None, 1 << 19),
    ],
)
async def test_a_log_probability_counts_eightfold_where_vllm_makes_an_object_of_it(
    path: str, logprobs: int | None, most: int
) -> None:
    """Half a million in one answer of a chat held the event loop for 7 s."""
    stock = FastAPI()
    add_our_errors(stock)

    @stock.post(path)
    async def answered(request: Request) -> str:
        params = GenerateRequest(prompt="", logprobs=logprobs, max_tokens=(await request.json())["max_tokens"])
        return str(max_new_tokens([1], params, max_model_len=10**6, vocabulary=100))

    async with client_of(AccessControl(StockApp(stock), host="127.0.0.1", token="t")) as client:
        assert (await client.post(path, json={"max_tokens": most})).status_code == 200
        answer = await client.post(path, json={"max_tokens": most + 1})
        assert (answer.status_code, f"the run may have {most}:" in answer.text) == (400, True)
        owner = {"Authorization": "Bearer t"}
        assert (await client.post(path, json={"max_tokens": most + 1}, headers=owner)).status_code == 200


class Letters:
    """A tokenizer whose longest token has 3 characters; its encoding of "x" waits until it is let."""

    chat_template = "letters"

    def __init__(self) -> None:
        self.may_encode = threading.Event()

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "aaa": 1}

    def __deepcopy__(self, memo: dict[int, Any]) -> Letters:
        return self

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert text != "x" or self.may_encode.wait(30)
        return [0] * len(text)

    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
        if messages[0].get("role") == "system":
            raise TemplateError("System role not supported")
        return "".join(message["content"] for message in messages)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    codec = PromptCodec("m", Letters(), max_model_len=4)
    assert await codec.encode("a" * 12) == [0] * 12
    with pytest.raises(DataError, match="15000000 characters; with --max-model-len 4 at most 12"):
        await codec.encode("a" * 15_000_000)
    assert await codec.render_chat([{"content": "aa"}, {"content": "a"}]) == [0] * 3
    for messages in ([{"content": "a" * 13}], [{"content": ""}] * 13):
        with pytest.raises(DataError, match="at most 12"):
            await codec.render_chat(messages)
    with pytest.raises(DataError, match="the chat template of m refuses them: System role not supported"):
        await codec.render_chat([{"role": "system", "content": ""}])


async def test_the_event_loop_goes_on_while_a_text_is_encoded() -> None:
    letters = Letters()
    codec = PromptCodec("m", letters, max_model_len=4)
    encoding = [asyncio.create_task(codec.encode("x")), asyncio.create_task(codec.render_chat([{"content": "x"}]))]
    await asyncio.sleep(0)
    letters.may_encode.set()
    assert await asyncio.gather(*encoding) == [[0], [0]]


async def test_a_text_with_the_token_does_not_wait_for_those_without_it() -> None:
    """After 60 texts of 400 kB without it, it was encoded 47 s later."""
    letters = Letters()
    codec = PromptCodec("m", letters, max_model_len=4)

    async def encode(text: str, token: Token) -> list[int]:
        _caller.set(Caller(token=token))
        return await codec.encode(text)

    without = asyncio.create_task(encode("x", Token.WRONG))
    await asyncio.sleep(0.01)
    assert await asyncio.create_task(encode("a", Token.RIGHT)) == [0]
    assert not without.done()
    letters.may_encode.set()
    assert await without == [0]


@pytest.mark.slow
def test_a_batch_without_the_token_is_cut_for_a_request_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of 150 bytes held a run for as long as its 64 completions of 8000 tokens took."""
    config = ServerConfig(model_name=str(save_tiny_model(tmp_path, seed=0)), engine="torch", device="cpu", threads=1)
    monkeypatch.setattr(torch_engine, "_YIELD_AFTER_S", 0.0)
    engine = TorchEngine(config, instance="i", environment={})
    engine.start()
    engine.wait_loaded()

    async def generate(token: Token, num_tokens: int) -> Generation:
        _caller.set(Caller(token=token))
        params = GenerateRequest(prompt="", max_tokens=num_tokens, ignore_eos=True)
        return await engine.generate([1], params)

    async def both() -> tuple[Generation, Generation]:
        with held_steps() as held:
            without = asyncio.create_task(generate(Token.WRONG, 400))
            await held.wait_held()
            own = asyncio.create_task(generate(Token.RIGHT, 4))
            await until(lambda: len(engine._waiting) == 2)
        generations = await without, await own
        await engine.close()
        return generations

    cut, whole = asyncio.run(both())
    assert [each.finish_reason for each in cut.completions] == ["abort"]
    assert 0 < len(cut.completions[0].token_ids) < 400
    assert [len(each.token_ids) for each in whole.completions] == [4]


async def test_generating_health_checks_of_any_number_of_clients_are_one_request_to_the_engine() -> None:
    """They count as requests with the token: 4096 filled the queue of a server that is paused or asleep."""
    engine = OneAtATime()
    config = ServerConfig(model_name="m", engine="torch")
    ours = create_app(Service(engine=engine, config=config, instance="i", token="t"))  # type: ignore[arg-type]
    async with client_of(ours) as client:
        asked = [asyncio.create_task(client.get("/health_generate")) for _ in range(10)]
        await until(lambda: engine.num_asked == 1)
        for _ in range(100):  # in which the others ask too
            await asyncio.sleep(0)
        engine.may_answer.set()
        assert [(await each).status_code for each in asked] == [200] * 10
        assert engine.num_asked == 1
        assert (await client.get("/health_generate")).status_code == 200
        assert engine.num_asked == 2


class OneAtATime:
    """An engine that counts what it is asked for, and answers when it is let."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.may_answer = asyncio.Event()

    def check_health(self) -> None:
        pass

    async def encode(self, text: str) -> list[int]:
        return [0]

    async def generate(self, prompt_token_ids: list[int], params: GenerateRequest) -> None:
        self.num_asked += 1
        await self.may_answer.wait()


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("completions", {"prompt": [1], "logprobs": 1}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1}),
    ],
)
async def test_others_are_answered_while_a_long_answer_to_a_request_without_the_token_is_made(
    path: str, asked: dict[str, Any]
) -> None:
    """With half a million log-probabilities one held the event loop for 7 s, and eight of them a run for a minute."""
    engine = Texts()
    config = ServerConfig(model_name="m", engine="torch")
    ours = create_app(Service(engine=engine, config=config, instance="i", token="t"))  # type: ignore[arg-type]
    async with client_of(ours) as client:
        answering = asyncio.create_task(client.post(f"/v1/{path}", json=asked))
        await until(lambda: bool(engine.asked_for))
        assert (await client.get("/v1/models")).status_code == 200
        engine.may_decode.set()
        assert (await answering).status_code == 200
        assert engine.asked_for == [[7], [8]]  # each token once


class Texts:
    """An engine that answers with a few tokens at once, and whose texts of tokens wait until they are let."""

    logprobs_mode = "raw"

    def __init__(self) -> None:
        self.asked_for: list[list[int]] = []
        self.may_decode = threading.Event()

    async def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [0]

    async def generate(self, prompt_token_ids: list[int], params: GenerateRequest) -> Generation:
        made = Completion(
            token_ids=[7, 7],
            logprobs=[-1.0, -1.0],
            top_logprobs=[[(8, -2.0)], [(8, -2.0)]],
            finish_reason="length",
            policy_versions=[0, 0],
            text="",
        )
        return Generation(prompt_token_ids=[0], prompt_logprobs=None, completions=[made])

    def decode(self, token_ids: list[int]) -> str:
        self.asked_for.append(token_ids)
        assert self.may_decode.wait(30)
        return "a"


def test_a_list_of_prompts_counts_with_their_completions_and_a_prompt_of_tokens_is_one() -> None:
    for body in (
        {"prompt": "a", "n": 4096},
        {"prompt": [1] * 5000, "n": 2},
        {"prompt": ["a"] * 4096},
        {"prompt": [[1]] * 1024, "n": 4},
        {"messages": [{"role": "user", "content": "a"}] * 5000},
        {"prompt": [], "n": "many"},
    ):
        check_listed_prompts(body)
    for body in (
        {"prompt": ["a"] * 4097},
        {"prompt": [[1]] * 1025, "n": 4},
        {"prompt": [1, "a"] * 2049},
        {"prompt_embeds": ["a"] * 4097},
        {"messages": [[{"role": "user", "content": "a"}]] * 2049, "n": 2},
    ):
        with pytest.raises(DataError, match="at most 4096 completions are made"):
            check_listed_prompts(body)


async def test_both_engines_refuse_a_long_list_of_prompts_with_400() -> None:
    ours, vllms = FastAPI(), FastAPI()
    add_error_answers(ours)
    ours.include_router(openai_routes(None, ServerConfig(model_name="m"), AnswerMaker()), prefix="/v1")  # type: ignore[arg-type]
    vllms.router.routes.append(Route("/v1/completions", length, methods=["POST"]))
    for app_of_engine in (ours, StockApp(vllms)):
        async with client_of(app_of_engine) as client:
            refused = await client.post("/v1/completions", json={"prompt": [[1]] * 3_000_0, "n": 2})
            assert (refused.status_code, "30000 prompts" in refused.json()["detail"]) == (400, True)
    async with client_of(StockApp(vllms)) as client:
        body = b'{"prompt": ["a", "b"]}'
        assert (await client.post("/v1/completions", content=body)).text == str(len(body))  # passed on whole
        assert (await client.post("/v1/completions", content=b"[" * 100_000)).text == "100000"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("presence_penalty", 1e308), ("frequency_penalty", -2.1), ("repetition_penalty", 1e-320)),
        *(("repetition_penalty", 1e308), ("temperature", 1e308)),
        *(("stop", ["x"] * 65), ("stop", "x" * 1025), ("stop", ["x" * 1025]), ("stop_token_ids", [1] * 1025)),
    ],
)
def test_numbers_that_overflow_the_logits_and_endless_lists_of_ends_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        GenerateRequest.model_validate({"prompt": "a", field: value})


def logprobs_requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests for log-probabilities of so many tokens at each position."""
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True, "top_logprobs": count}
    return [
        ("/generate", {"prompt": "ab", "max_tokens": 1, "logprobs": count}),
        ("/generate", {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": count}),
        ("/v1/completions", {"prompt": "ab", "max_tokens": 1, "logprobs": count}),
        ("/v1/chat/completions", chat),
    ]


@pytest.mark.parametrize("asked", [{"logprobs": 21}, {"prompt_logprobs": 21}])
def test_log_probabilities_of_more_tokens_than_vllm_answers_are_refused(asked: dict[str, int]) -> None:
    def room(**more: int) -> int:
        return max_new_tokens([1], GenerateRequest(prompt="", **asked), max_model_len=8, vocabulary=50_000, **more)

    with pytest.raises(DataError, match="logprobs: 21, but this server has at most 20 at each token"):
        room()
    with pytest.raises(DataError, match="at most 5"):
        room(max_logprobs=5)
    assert room(max_logprobs=21) == room(max_logprobs=-1) == 7  # set by the operator


@pytest.mark.slow
def test_the_inference_server_refuses_both_with_400(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", seed=0)
    with running_server(model, "--enable-lora", folder=tmp_path) as server, server.client as client:
        long = "/" + "a" * 5000
        requests: list[tuple[str, dict[str, Any]]] = [
            ("/bridge/reload", {"path": long, "policy_version": 1}),
            ("/lora/load", {"adapter_path": long}),
            ("/generate", {"prompt": "a", "n": 10**6}),
            ("/v1/completions", {"prompt": "a", "n": 10**6}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 10**6}),
        ]
        requests += logprobs_requests(21)
        answers = [(path, client.post(path, json=body)) for path, body in requests]
        assert [(path, answer.status_code) for path, answer in answers] == [(path, 400) for path, _ in requests]
        assert all(len(answer.json()["detail"]) < 300 for _, answer in answers)
        for path, body in logprobs_requests(20):
            assert (path, client.post(path, json=body).status_code) == (path, 200)
