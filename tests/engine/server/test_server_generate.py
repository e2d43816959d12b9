"""The torch engine over HTTP: answers of `/generate` and the other routes."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from serving import EOS, VOCABULARY, RunningServer, model_logprobs, running_server
from stage import until
from torch_engines import held_steps, served_engine
from transformers import AutoModelForCausalLM

from grpo_engine.server.torch.engine import TorchEngine
from grpo_engine.wire.inference import BridgeInfo, GenerateResponse

pytestmark = pytest.mark.slow
PROMPT = [10, 20, 30, 40]
GREEDY = {"prompt": "abc", "temperature": 0, "max_tokens": 20, "logprobs": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(model_folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(model_folder, folder=tmp_path_factory.mktemp("server")) as running:
        yield running


def sampled(answer: dict, completion: int) -> tuple[list[int], torch.Tensor]:
    """Tokens and log-probabilities of an answer that has no others beside them."""
    entries = answer["logprobs"][completion]
    assert all(len(position) == 1 for position in entries)
    pairs = [next(iter(position[0].items())) for position in entries]
    return [int(token) for token, _ in pairs], torch.tensor([value for _, value in pairs])


def assert_logprobs(answer: dict, model: torch.nn.Module, prompt: list[int]) -> None:
    """The answer has the model's log-probabilities of its tokens."""
    for index, tokens in enumerate(answer["token_ids"]):
        named, logprobs = sampled(answer, index)
        assert named == tokens
        torch.testing.assert_close(logprobs, model_logprobs(model, prompt, tokens), atol=1e-4, rtol=0)


def test_an_answer_has_the_wire_shape_and_the_models_logprobs(server: RunningServer, model: torch.nn.Module) -> None:
    answer = server.generate(
        prompt={"prompt_token_ids": PROMPT}, logprobs=0, n=3, max_tokens=9, temperature=0.7, top_p=0.9
    )
    GenerateResponse.model_validate(answer, extra="forbid")
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["policy_versions"] == [[0] * len(tokens) for tokens in answer["token_ids"]]
    assert len(answer["token_ids"]) == 3
    assert_logprobs(answer, model, PROMPT)
    ends = ["stop" if tokens[-1] == EOS else "length" for tokens in answer["token_ids"]]
    assert answer["finish_reasons"] == ends


def test_a_request_that_asks_for_nothing_more_has_logprobs(server: RunningServer, model: torch.nn.Module) -> None:
    """The command of Atropos's FAQ: `curl … -d '{"prompt": "Hello", "max_tokens": 5}'`."""
    answer = server.generate(prompt="Hello", max_tokens=5)
    assert_logprobs(answer, model, answer["prompt_token_ids"])
    assert server.generate(prompt="Hello", max_tokens=5, logprobs=True)["logprobs"]


@pytest.mark.parametrize(
    ("prompts", "lengths", "n", "ignore_eos"),
    [
        ([[5 + i] * (1 + 7 * i) for i in range(6)], [4, 6, 3, 5, 7, 4], 5, False),
        ([PROMPT * 4, PROMPT * 3, PROMPT, PROMPT * 3], [3, 150, 40, 90], 2, True),
    ],
    ids=["prompts of different lengths", "long rows after short ones are dropped"],
)
def test_requests_share_a_batch_independently(
    server: RunningServer,
    model: torch.nn.Module,
    prompts: list[list[int]],
    lengths: list[int],
    n: int,
    ignore_eos: bool,
) -> None:
    def generate(prompt: list[int], length: int) -> dict:
        body = {"logprobs": 0, "n": n, "max_tokens": length, "ignore_eos": ignore_eos}
        return server.generate(prompt={"prompt_token_ids": prompt}, **body)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(generate, prompts, lengths))
    for prompt, length, answer in zip(prompts, lengths, answers, strict=True):
        assert len(answer["token_ids"]) == n
        assert not ignore_eos or all(len(tokens) == length for tokens in answer["token_ids"])
        assert_logprobs(answer, model, prompt)


def test_greedy_text_is_what_the_model_ranks_first(server: RunningServer, model: torch.nn.Module) -> None:
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(6):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    answer = server.generate(**GREEDY | {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 6})
    assert answer["token_ids"] == [tokens[4:]]
    assert answer["finish_reasons"] == ["length"]


def test_the_sampled_token_comes_first_and_the_extra_ones_follow(server: RunningServer) -> None:
    answer = server.generate(prompt="hello", logprobs=4, max_tokens=5, n=2, seed=3)
    assert answer["prompt"] == "hello"
    for tokens, positions in zip(answer["token_ids"], answer["logprobs"], strict=True):
        for token, position in zip(tokens, positions, strict=True):
            keys, others = list(position[0]), list(position[0].values())[1:]
            assert keys[0] == str(token)
            assert len(keys) in (4, 5)
            assert others == sorted(others, reverse=True)


def test_without_logprobs_the_answer_has_none(server: RunningServer) -> None:
    answer = server.generate(prompt="hello", logprobs=None)
    assert not {"logprobs", "token_ids", "prompt_token_ids"} & set(answer)


def test_equal_seeds_give_equal_tokens_in_any_batch(server: RunningServer) -> None:
    body = {"prompt": "abc", "seed": 11, "n": 3, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}
    alone = server.generate(**body)
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(server.generate, prompt="xy", n=4, max_tokens=30) for _ in range(3)]
        together = server.generate(**body)
        assert all(other.result() for other in others)
    assert alone["token_ids"] == together["token_ids"]
    assert len({tuple(tokens) for tokens in alone["token_ids"]}) == 3


def test_sampling_follows_the_models_distribution(server: RunningServer, model: torch.nn.Module) -> None:
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([PROMPT])).logits[0, -1] / 2.0, -1)
    counts = torch.zeros(VOCABULARY)
    for seed in range(10):
        answer = server.generate(
            prompt={"prompt_token_ids": PROMPT}, n=256, max_tokens=1, temperature=2.0, logprobs=0, seed=1000 * seed
        )
        for tokens in answer["token_ids"]:
            counts[tokens[0]] += 1
    deviation = (counts / counts.sum() - expected).abs().sum() / 2
    assert deviation < 0.1  # 2560 draws of 128 tokens: 0.06 expected


def test_top_k_and_min_p_exclude_the_other_tokens(server: RunningServer, model: torch.nn.Module) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    best = set(logits.topk(3).indices.tolist())
    answer = server.generate(
        prompt={"prompt_token_ids": PROMPT}, n=64, max_tokens=1, top_k=3, temperature=5.0, logprobs=0
    )
    assert {tokens[0] for tokens in answer["token_ids"]} <= best
    answer = server.generate(prompt={"prompt_token_ids": PROMPT}, n=64, max_tokens=1, min_p=1.0, logprobs=0)
    assert {tokens[0] for tokens in answer["token_ids"]} == {int(logits.argmax())}


def test_generation_ends_with_the_token_that_completes_a_stop_string(server: RunningServer) -> None:
    free = server.generate(**GREEDY)
    text = free["text"][0]
    cut = server.generate(**GREEDY, stop=text[4:6])
    assert cut["finish_reasons"] == ["stop"]
    assert cut["text"] == [text[: text.index(text[4:6])]]
    assert cut["token_ids"][0] == free["token_ids"][0][: len(cut["token_ids"][0])]
    assert len(cut["logprobs"][0]) == len(cut["token_ids"][0])


def test_stop_tokens_end_a_row_but_not_before_min_tokens(server: RunningServer) -> None:
    free = server.generate(**GREEDY)["token_ids"][0]
    stopped = server.generate(**GREEDY, stop_token_ids=[free[2]])
    assert stopped["token_ids"][0] == free[: free.index(free[2]) + 1]
    assert stopped["finish_reasons"] == ["stop"]
    longer = server.generate(**GREEDY, stop_token_ids=[free[2]], min_tokens=8)
    assert free[2] not in longer["token_ids"][0][:7]


def test_prompt_logprobs_are_returned(server: RunningServer, model: torch.nn.Module) -> None:
    answer = server.generate(prompt={"prompt_token_ids": PROMPT}, prompt_logprobs=0, max_tokens=1)
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert [int(next(iter(entry))) for entry in rest] == PROMPT[1:]
    values = torch.tensor([next(iter(entry.values())) for entry in rest])
    torch.testing.assert_close(values, model_logprobs(model, PROMPT[:1], PROMPT[1:]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "a", "top_q": 1}, 422, "top_q"),
        ({"prompt": "a", "temprature": 1}, 422, "did you mean 'temperature'"),
        ({}, 422, "prompt"),
        ({"prompt": {"prompt_token_ids": [5] * 300}}, 400, "300"),
        ({"prompt": {"prompt_token_ids": [5000]}}, 400, "5000"),
        ({"prompt": {"prompt_token_ids": [2**40]}}, 400, "is not in the vocabulary"),
        ({"prompt": "a", "top_k": 10**30}, 422, "top_k: Input should be less than"),
        ({"prompt": ""}, 400, "no tokens"),
        ({"prompt": "a", "stream": True}, 400, "stream"),
    ],
)
def test_bad_input_is_refused_by_name(server: RunningServer, body: dict, status: int, message: str) -> None:
    with server.client as client:
        answer = client.post("/generate", json=body)
    assert answer.status_code == status
    assert message in answer.json()["detail"]


def test_a_number_out_of_range_is_refused_by_openais_routes_too(server: RunningServer) -> None:
    with server.client as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "seed": 2**70})
    assert answer.status_code == 400
    assert "seed: Input should be less than" in answer.json()["detail"]


def test_completions_stop_at_max_model_len(server: RunningServer) -> None:
    answer = server.generate(**GREEDY | {"prompt": {"prompt_token_ids": [5] * 250}, "max_tokens": 500})
    assert len(answer["token_ids"][0]) == 6
    assert answer["finish_reasons"] == ["length"]


def test_a_client_that_disconnects_frees_its_rows(server: RunningServer) -> None:
    async def disconnect_and_ask_again() -> int:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as client:
            body = {"prompt": "a", "n": 256, "max_tokens": 250, "ignore_eos": True}
            disconnected = [asyncio.create_task(client.post("/generate", json=body)) for _ in range(30)]
            await asyncio.sleep(0.3)
            for task in disconnected:
                task.cancel()
            await asyncio.gather(*disconnected, return_exceptions=True)
            async with asyncio.timeout(60):  # thirty such batches take minutes
                return (await client.post("/generate", json={"prompt": "a", "max_tokens": 2})).status_code

    assert asyncio.run(disconnect_and_ask_again()) == 200


def test_the_routes_of_openai_honour_n(server: RunningServer) -> None:
    with server.client as client:
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 256
        text = client.post(
            "/v1/completions", json={"prompt": ["ab", "cd"], "n": 2, "max_tokens": 4, "logprobs": 1}
        ).json()
        assert [choice["index"] for choice in text["choices"]] == [0, 1, 2, 3]
        for choice in text["choices"]:
            assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
        body = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 4, "logprobs": True}
        chat = client.post("/v1/chat/completions", json=body).json()
        assert len(chat["choices"]) == 3
        assert chat["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in chat["choices"])
        assert all(math.isfinite(entry["logprob"]) for entry in chat["choices"][0]["logprobs"]["content"])


def test_the_stock_routes_answer(server: RunningServer) -> None:
    with server.client as client:
        info = BridgeInfo.model_validate(client.get("/bridge/info").json())
        assert (info.policy_version, info.update_count, info.paused, info.enabled) == (0, 0, False, False)
        assert client.get("/health_generate").status_code == 200
        assert client.get("/bridge/is_sleeping").json() == {"sleeping": False}
        assert client.get("/lora/status").json()["lora_available"] is False
        paths = {entry["path"] for entry in client.get("/bridge/list_endpoints").json()["endpoints"]}
        assert {"/generate", "/health", "/bridge/pause", "/lora/load"} <= paths
        assert client.post("/lora/load", json={"adapter_path": "/nowhere"}).status_code == 400


def test_processed_logprobs_are_of_the_sampled_distribution(
    model_folder: Path, model: torch.nn.Module, tmp_path: Path
) -> None:
    with running_server(model_folder, "--logprobs-mode", "processed", folder=tmp_path) as server:
        answer = server.generate(prompt={"prompt_token_ids": PROMPT}, n=4, max_tokens=6, temperature=0.5, logprobs=0)
        assert answer["logprobs_mode"] == "processed"
        for index, tokens in enumerate(answer["token_ids"]):
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1] / 0.5
            expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            torch.testing.assert_close(sampled(answer, index)[1], expected, atol=1e-4, rtol=0)
        assert server.stop(signal.SIGTERM) == 0


def test_a_server_that_cannot_start_says_why_in_its_last_line_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(AssertionError), running_server(tmp_path / "missing", folder=tmp_path):
        pass
    [log] = tmp_path.glob("server-*.log")
    lines = log.read_text().splitlines()
    assert lines[-1].startswith("grpo-engine server: model ")
    assert "missing" in lines[-1]
    assert "Traceback" not in log.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named_in_the_last_line(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(AssertionError), running_server(model_folder, "--device", "cuda", folder=tmp_path):
        pass
    [log] = tmp_path.glob("server-*.log")
    assert "finds 0 GPUs here" in log.read_text().splitlines()[-1]


async def test_a_weight_update_ends_what_may_be_interrupted_and_the_rest_goes_on(model_folder: Path) -> None:
    """Both requests are half sampled, in one batch, when the server is paused."""
    body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 20, "ignore_eos": True, "n": 2}
    async with served_engine(model_folder) as (engine, trainer):
        with held_steps(after=4) as held:
            (await trainer.post("/bridge/pause")).raise_for_status()
            asked = [
                asyncio.create_task(trainer.post("/generate", json={**body, "interrupt": interrupt}))
                for interrupt in (True, False)
            ]
            await until(lambda: len(engine._waiting) == 2)
            (await trainer.post("/bridge/resume")).raise_for_status()
            await held.wait_held()
            pausing = asyncio.create_task(trainer.post("/bridge/pause", json={"timeout_s": 60}))
            await until(lambda: bool(engine._commands))
        (await pausing).raise_for_status()
        version = (await trainer.get("/bridge/info")).json()["policy_version"] + 1
        (await trainer.post("/bridge/resume", json={"policy_version": version})).raise_for_status()
        cut, kept = [GenerateResponse.model_validate((await each).json()) for each in asked]
        assert kept.finish_reasons == ["length"] * 2
        assert kept.policy_versions == [[version - 1] * 20] * 2
        assert cut.finish_reasons == ["abort"] * 2
        # The tokens of the prompt's step, of the next four, and of the one that was held.
        assert cut.policy_versions == [[version - 1] * 6] * 2
        assert [len(tokens) for tokens in cut.token_ids or ()] == [6] * 2
        answer = await trainer.post("/generate", json={**body, "max_tokens": 3, "interrupt": True})
        again = GenerateResponse.model_validate(answer.json())
        assert again.finish_reasons == ["length"] * 2
        assert again.policy_versions == [[version] * 3] * 2


async def test_a_weight_update_that_arrives_as_a_batch_is_gathered_comes_before_it(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for the whole batch, though that may be interrupted."""
    gathers, is_gathered = threading.Event(), threading.Event()

    def gather(_engine: TorchEngine) -> None:
        gathers.set()
        assert is_gathered.wait(60)

    monkeypatch.setattr(TorchEngine, "_gather", gather)
    async with served_engine(model_folder) as (engine, trainer):
        body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True, "interrupt": True}
        asked = asyncio.create_task(trainer.post("/generate", json=body))
        assert await asyncio.to_thread(gathers.wait, 60)
        pausing = asyncio.create_task(trainer.post("/bridge/pause"))
        await until(lambda: bool(engine._commands))
        is_gathered.set()
        version = (await pausing).json()["policy_version"] + 1
        (await trainer.post("/bridge/resume", json={"policy_version": version})).raise_for_status()
        assert (await asked).json()["policy_versions"] == [[version] * 3]
