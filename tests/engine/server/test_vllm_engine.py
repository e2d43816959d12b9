"""A real vLLM on one copy of the weights with the trainer: what it generates, whose weights it reads, and who ends it.

The tests share one server: they run in the order in which they stand here, and the last of them kills it.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from serving import EOS, save_tiny_model, shift
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from vllm_serving import (
    HAS_GPU,
    LONG_PROMPT,
    NUM_PROCESSES,
    PROMPT,
    VERSION_HEADER,
    Stack,
    assert_agreement,
    assert_close,
    counter_of,
    load,
    logits_of,
    logprobs_of,
    processes_below,
    segments_now,
    serving_vllm,
    wait_gone,
)

from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.bridges.memory.shared_tensors import SEGMENT_PREFIX, unlink_segments
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.environments.inference_servers import InferenceServers
from grpo_engine.environments.sampling.groups import Completions
from grpo_engine.server.engine import LOWEST_LOGPROB
from grpo_engine.wire.environment_variables import SPEEDS_VARIABLE
from grpo_engine.wire.inference import GenerateRequest, GenerateResponse
from grpo_engine.wire.server_speed import ServerSpeeds

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

VOCABULARY = 101
"""Not a multiple of 64: vLLM pads it."""
LETTER_E = 4 + ord("e") - 32
RUN = f"vllmtest{os.getpid()}"
SPEEDS = "vllm.speeds.json"


def save_tiny_qwen2(folder: Path) -> Path:
    """A random Qwen2: fused biases, grouped heads, an end token that is sampled often."""
    save_tiny_model(folder, seed=1)
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return folder


FLAGS = ("--logprobs-mode", "processed")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Single copy, log-probs as sampled, owned by a run."""
    folder = tmp_path_factory.mktemp("shared")
    model = save_tiny_qwen2(folder / "model")
    environment = {"GRPO_TUI_RUN": RUN, SPEEDS_VARIABLE: str(folder / SPEEDS)}
    try:
        with serving_vllm(model, folder, *FLAGS, "--receives-weights", environment=environment) as stack:
            yield stack
    finally:
        unlink_segments(name for name in segments_now() if name.startswith(f"{SEGMENT_PREFIX}{RUN}-"))


def test_no_request_is_answered_until_vllm_serves(shared: Stack) -> None:
    assert shared.statuses == [200]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_processed_logprobs_are_those_of_the_tempered_model(shared: Stack, temperature: float) -> None:
    model = load(shared.model)
    answer = assert_agreement(shared, model, version=0, temperature=temperature, n=32, max_tokens=48, seed=5)
    assert len(answer.text) == 32
    assert answer.logprobs_mode == "processed"
    assert answer.token_ids is not None
    ended = [tokens for tokens, why in zip(answer.token_ids, answer.finish_reasons, strict=True) if why == "stop"]
    assert ended
    assert all(tokens[-1] == EOS and EOS not in tokens[:-1] for tokens in ended)
    cut = [tokens for tokens, why in zip(answer.token_ids, answer.finish_reasons, strict=True) if why == "length"]
    assert all(len(tokens) == 48 for tokens in cut)


def test_a_seed_repeats_a_completion_and_members_of_a_group_differ(shared: Stack) -> None:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "n": 4, "max_tokens": 16, "logprobs": 0, "ignore_eos": True}
    first, again = (shared.server.generate(**body, seed=11)["token_ids"] for _ in range(2))
    assert first == again
    assert len(set(map(tuple, first))) == 4


def test_prompt_and_top_logprobs_are_the_models(shared: Stack) -> None:
    model = load(shared.model)
    answer = shared.server.generate(
        prompt={"prompt_token_ids": LONG_PROMPT}, logprobs=3, prompt_logprobs=2, max_tokens=2, ignore_eos=True
    )
    rows = torch.log_softmax(logits_of(model, LONG_PROMPT), -1)
    own = [next(iter(entry.items())) for entry in answer["prompt_logprobs"][1:]]
    assert answer["prompt_logprobs"][0] is None
    assert [int(token) for token, _ in own] == LONG_PROMPT[1:]
    expected = [rows[position, token].item() for position, token in enumerate(LONG_PROMPT[1:])]
    assert_close(torch.tensor([value for _, value in own]), torch.tensor(expected))
    first = answer["logprobs"][0][0][0]
    assert next(iter(first)) == str(answer["token_ids"][0][0])
    assert_close(torch.tensor(list(first.values())), rows[-1, [int(token) for token in first]])
    if not HAS_GPU:  # in bfloat16 near ties may swap ranks
        assert set(map(int, first)) >= set(rows[-1].topk(3).indices.tolist())
        for position, entry in enumerate(answer["prompt_logprobs"][1:]):
            assert set(map(int, entry)) >= set(rows[position].topk(2).indices.tolist())


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "a", "best_of": 2}, 422, "best_of"),
        ({"prompt": {"prompt_token_ids": [VOCABULARY]}}, 400, "101"),
        ({"prompt": {"prompt_token_ids": [5] * 256}}, 400, "256"),
    ],
    ids=["unknown setting", "token outside the vocabulary", "long prompt"],
)
def test_an_invalid_request_is_refused_by_name(shared: Stack, body: dict, status: int, message: str) -> None:
    with shared.server.client as client:
        answer = client.post("/generate", json=body)
    assert answer.status_code == status
    assert message in answer.json()["detail"]


def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_tokens(shared: Stack) -> None:
    body = {"prompt": "hello", "max_tokens": 120, "logprobs": 0, "n": 4, "ignore_eos": True}
    answer = shared.server.generate(**body, stop=["e"], seed=3)
    stopped = [i for i, why in enumerate(answer["finish_reasons"]) if why == "stop"]
    assert stopped
    for index in stopped:
        assert "e" not in answer["text"][index]
        tokens = answer["token_ids"][index]
        assert tokens.index(LETTER_E) == len(tokens) - 1
        assert len(answer["logprobs"][index]) == len(tokens)


@pytest.mark.parametrize("changes", [{}, {"stop_token_ids": [LETTER_E]}, {"skip_special_tokens": False}], ids=str)
def test_the_text_is_that_of_vllms_own_detokenizer(shared: Stack, changes: dict[str, Any]) -> None:
    body = {"prompt": "hello", "max_tokens": 60, "n": 4, "seed": 5, "ignore_eos": True, **changes}
    ours = shared.server.generate(**body)
    theirs = shared.server.generate(**body, stop=["a text that never comes"])  # for which vLLM decodes every token
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["text"] == theirs["text"]
    assert any(ours["text"])


def test_the_bridge_file_has_transformers_names_and_shapes(shared: Stack) -> None:
    model = AutoModelForCausalLM.from_pretrained(shared.model)
    file = read_bridge_file(shared.bridge_file)
    assert {name: entry.shape for name, entry in file.tensors.items()} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert file.tensors["model.embed_tokens.weight"].shape[0] == VOCABULARY
    assert psutil.Process(file.pid).ppid() == shared.server.process.pid  # the fork server


def test_published_weights_are_served_at_once_and_no_cached_prefix_outlives_them(shared: Stack) -> None:
    bridge = shared.bridge({"mode": "shared_vllm"})
    model = bridge.attach().model.eval()
    assert_agreement(shared, model, version=0, prompt=LONG_PROMPT)
    for version in (1, 2, 3):
        bridge.publish(version, shift(model, version))
        assert_agreement(shared, model, version=version, prompt=LONG_PROMPT, n=2)
        assert_agreement(shared, model, version=version, temperature=0.7, n=8)
    with shared.server.client as client:
        info = client.get("/bridge/info").json()
    assert (info["policy_version"], info["update_count"], info["paused"]) == (3, 3, False)
    bridge.close()


def test_every_token_comes_from_its_reported_version(shared: Stack) -> None:
    bridge = shared.bridge({"mode": "shared_vllm"})
    model = bridge.attach().model.eval()
    writers = [shift(model, 20), shift(model, 21)]
    expected: dict[int, dict[tuple[int, ...], torch.Tensor]] = {}
    answers: list[dict] = []
    is_over = threading.Event()

    def send_requests() -> None:
        body = {"n": 2, "max_tokens": 100, "ignore_eos": True, "logprobs": 0}
        while not is_over.is_set():
            answers.append(shared.server.generate(prompt={"prompt_token_ids": LONG_PROMPT}, **body))

    threads = [threading.Thread(target=send_requests) for _ in range(3)]
    bridge.publish(4, writers[0])
    for thread in threads:
        thread.start()
    try:
        for version in range(5, 15):
            bridge.publish(version, writers[version % 2])
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    completions = [
        completion
        for answer in answers
        for completion in zip(answer["token_ids"], answer["logprobs"], answer["policy_versions"], strict=True)
    ]
    assert any(len(set(versions)) > 1 for _, _, versions in completions)  # frozen and continued
    assert counter_of(shared, "vllm:num_preemptions_total") > 0  # with keys and values computed again
    for which in (0, 1):
        bridge.publish(16 + which, writers[which])
        expected[which] = {tuple(tokens): logprobs_of(model, LONG_PROMPT, tokens, 1.0) for tokens, _, _ in completions}
    for tokens, entries, versions in completions:
        values = torch.tensor([next(iter(position[0].values())) for position in entries])
        by_version = torch.stack([expected[which][tuple(tokens)] for which in (0, 1)])
        assert_close(values, by_version[torch.tensor(versions) % 2, torch.arange(len(tokens))])
        assert versions == sorted(versions)
    bridge.close()


@pytest.mark.extended("tests/engine/server/test_server_generate.py, with the torch engine")
def test_a_weight_update_ends_what_may_be_interrupted_and_it_is_sampled_again_in_one_version(shared: Stack) -> None:
    bridge = shared.bridge({"mode": "shared_vllm"})
    writers = [shift(bridge.attach().model.eval(), 20 + index) for index in range(2)]
    bridge.publish(30, writers[0])
    body = {"prompt": {"prompt_token_ids": LONG_PROMPT}, "n": 4, "max_tokens": 50, "ignore_eos": True, "logprobs": 0}
    is_over = threading.Event()
    raw: list[GenerateResponse] = []
    whole: list[Completions] = []

    async def sample_whole() -> int:
        async with (
            httpx.AsyncClient(base_url=shared.server.url, timeout=60, trust_env=False) as client,
            InferenceServers([client], timeout_s=60) as servers,
        ):
            while not is_over.is_set():
                whole.append(await servers.generate(GenerateRequest.model_validate({**body, "interrupt": True})))
            return servers.num_cut

    def sample_raw() -> None:
        while not is_over.is_set():
            raw.append(GenerateResponse.model_validate(shared.server.generate(**body, interrupt=True)))

    with ThreadPoolExecutor(2) as pool:
        num_cut, done = pool.submit(lambda: asyncio.run(sample_whole())), pool.submit(sample_raw)
        version = 30
        try:
            while len(whole) < 3 or not any("abort" in answer.finish_reasons for answer in raw):
                for _ in range(5):
                    version += 1
                    bridge.publish(version, writers[version % 2])
                before = len(whole)
                while len(whole) == before:  # what is cut off at every update never ends
                    assert not done.done()
        finally:
            is_over.set()
        done.result()
        assert num_cut.result() > 0
    for answer in [*raw, *whole]:
        assert answer.token_ids is not None
        assert answer.policy_versions is not None
        for tokens, versions, reason in zip(
            answer.token_ids, answer.policy_versions, answer.finish_reasons, strict=True
        ):
            assert len(set(versions)) <= 1
            assert len(versions) == len(tokens)
            assert (reason, len(tokens)) == ("length", 50) or (reason == "abort" and len(tokens) < 50)
    assert all(answer.finish_reasons == ["length"] * 4 for answer in whole)
    bridge.close()


def test_adapters_are_merged_into_the_weights_that_vllm_reads(shared: Stack) -> None:
    bridge = shared.bridge({"mode": "lora_merged"})
    attached = bridge.attach()  # earlier tests changed the weights
    model, version = attached.model.eval(), attached.policy_version
    assert_agreement(shared, load(shared.model), version=version)
    answer = assert_agreement(shared, model, version=version, prompt=LONG_PROMPT)
    for seed in (1, 2):
        version += 1
        bridge.publish(version, shift(model, seed))
        assert_agreement(shared, model, version=version, prompt=LONG_PROMPT, n=2)
    tokens = answer.token_ids[0]
    with model.disable_adapter():
        base = logprobs_of(model, LONG_PROMPT, tokens, 1.0)
    assert (logprobs_of(model, LONG_PROMPT, tokens, 1.0) - base).abs().max() > 0.1
    bridge.close()


def test_weights_that_are_sent_are_served_at_once(shared: Stack) -> None:
    bridge = shared.bridge({"mode": "broadcast"})
    attached = bridge.attach()
    model, version = attached.model.eval(), attached.policy_version
    for seed in (1, 2):
        version += 1
        bridge.publish(version, shift(model, seed))
        assert_agreement(shared, model, version=version, prompt=LONG_PROMPT, n=2)
        bridge.prepare_step()
    bridge.close()


def test_a_checkpoint_is_reloaded_in_place_and_one_that_does_not_fit_changes_nothing(shared: Stack) -> None:
    bridge = shared.bridge({"mode": "shared_vllm"})
    model = bridge.attach().model.eval()
    original = load(shared.model)
    with shared.server.client as client:
        answer = client.post("/bridge/reload", json={"path": str(shared.model), "policy_version": 30})
        assert answer.json()["policy_version"] == 30
        assert_agreement(shared, original, version=30, prompt=LONG_PROMPT)
        for mine, theirs in zip(model.parameters(), original.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        other = save_tiny_model(shared.folder / "other", seed=9)
        refused = client.post("/bridge/reload", json={"path": str(other), "policy_version": 31})
        weights = shared.model / "model.safetensors"
        broken = shared.folder / "broken"
        broken.mkdir()
        (broken / weights.name).write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        cut = client.post("/bridge/reload", json={"path": str(broken), "policy_version": 31})
    assert (refused.status_code, cut.status_code) == (400, 400)
    assert "does not fit the served model" in refused.json()["detail"]
    assert "model.safetensors" in cut.json()["detail"]
    assert_agreement(shared, original, version=30)
    bridge.close()


def test_a_checkpoint_with_an_adapter_merged_into_some_of_its_tensors_is_read_in_place(shared: Stack) -> None:
    bridge = shared.bridge({"mode": "lora_restart", "every_steps": 1})
    model = bridge.attach().model.eval()
    for version in (32, 33):
        bridge.publish(version, shift(model, version))
        assert_agreement(shared, model, version=version, prompt=LONG_PROMPT)
    with model.disable_adapter():
        base = logprobs_of(model, PROMPT, [40, 50, 60], 1.0)
    assert (logprobs_of(model, PROMPT, [40, 50, 60], 1.0) - base).abs().max() > 0.1
    bridge.close()
    with shared.server.client as client:
        client.post("/bridge/reload", json={"path": str(shared.model), "policy_version": 34}).raise_for_status()


def test_vllms_own_routes_answer_as_generate_does(shared: Stack) -> None:
    body = {"max_tokens": 16, "temperature": 0.7, "seed": 8, "ignore_eos": True, "logprobs": 0}
    ours = shared.server.generate(prompt={"prompt_token_ids": PROMPT}, n=2, **body)
    with shared.server.client as client:
        answer = client.post("/v1/completions", json={"prompt": PROMPT, "n": 2, "return_token_ids": True, **body})
        version = client.get("/bridge/info").json()["policy_version"]
    choices = answer.json()["choices"]
    assert [choice["token_ids"] for choice in choices] == ours["token_ids"]
    for choice, entries in zip(choices, ours["logprobs"], strict=True):
        expected = [next(iter(position[0].values())) for position in entries]
        assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), torch.tensor(expected))
    assert int(answer.headers[VERSION_HEADER]) == version


def test_a_chat_is_streamed(shared: Stack) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 4, "ignore_eos": True}
    with shared.server.client as client:
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            pieces = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert answer.headers[VERSION_HEADER].isdigit()
    assert pieces.pop() == "[DONE]"
    deltas = [json.loads(piece)["choices"][0]["delta"] for piece in pieces]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole
    assert len(deltas) > 2


def test_vllms_counters_count_and_its_tokenizer_answers(shared: Stack) -> None:
    before = counter_of(shared, "vllm:generation_tokens_total")
    shared.server.generate(prompt="hello", max_tokens=7, n=3, ignore_eos=True)
    with shared.server.client as client:
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5, "ignore_eos": True}).raise_for_status()
        tokens = client.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
        text = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        metrics = client.get("/metrics").text
    assert counter_of(shared, "vllm:generation_tokens_total") - before == 3 * 7 + 5
    assert (tokens, text) == ([4 + ord(letter) - 32 for letter in "hello"], "hello")
    assert metrics.count("# TYPE vllm:generation_tokens_total ") == 1


def test_a_request_to_vllms_routes_waits_while_weights_change(shared: Stack) -> None:
    def version_of_answer(client: httpx.Client) -> str:
        body = {"prompt": PROMPT, "max_tokens": 4, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.read()
        return answer.headers[VERSION_HEADER]

    with shared.server.client as client, shared.server.client as trainer, ThreadPoolExecutor(1) as pool:
        version = trainer.post("/bridge/pause", json={"owner_pid": os.getpid()}).json()["policy_version"] + 1
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"prompt": PROMPT}, timeout=0.5)
        answered_by = pool.submit(version_of_answer, client)
        trainer.post("/bridge/resume", json={"policy_version": version}).raise_for_status()
        assert answered_by.result() == str(version)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/v1/completions", {"prompt": "a", "stop": [1] * 20_000}),
        ("/v1/completions", {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(20_000)), "")}),
        ("/v1/chat/completions", {"messages": [1] * 4000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [1] * 20_000}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [1] * 20_000}]}),
        ("/v1/responses", {"input": [1] * 20_000}),
        ("/tokenize", {"messages": [1] * 20_000}),
        ("/detokenize", {"tokens": [0.5] * 20_000}),
    ],
)
def test_a_body_of_wrong_values_is_a_few_errors_on_every_route_of_vllm(
    shared: Stack, path: str, wrong: dict[str, object]
) -> None:
    with shared.server.client as client:
        refused = client.post(path, json={"model": str(shared.model), **wrong})
    assert refused.status_code == 400
    count = re.match(r"(\d+) validation error", refused.json()["error"]["message"])
    assert count is not None
    assert int(count[1]) <= 100


def test_log_probabilities_of_more_than_20_tokens_are_refused_on_every_route(shared: Stack) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 21, "max_tokens": 1}
    requests: list[tuple[str, dict[str, object]]] = [
        ("/generate", {"prompt": "a", "logprobs": 21}),
        ("/generate", {"prompt": "a", "prompt_logprobs": 21}),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 21}),
        ("/v1/chat/completions", chat),
    ]
    with shared.server.client as client:
        assert [client.post(path, json=body).status_code for path, body in requests] == [400] * len(requests)
        assert client.post("/generate", json={"prompt": "a", "logprobs": 20, "max_tokens": 1}).status_code == 200


def test_the_speed_of_steps_and_what_an_update_cost_are_in_a_file_of_the_run(shared: Stack) -> None:
    path = shared.folder / SPEEDS
    while not (path.exists() and ServerSpeeds.model_validate_json(path.read_bytes()).recomputed_tokens):
        time.sleep(0.1)  # it is written every ten seconds
    points = ServerSpeeds.model_validate_json(path.read_bytes()).points
    assert [point.sequences for point in points] == sorted(point.sequences for point in points)
    assert points[0].sequences == 1
    assert all(point.tokens_per_s > 0 for point in points)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_disconnected_client_aborts_its_completions(shared: Stack, path: str) -> None:
    prompt = {"prompt_token_ids": PROMPT} if path == "/generate" else PROMPT
    body = {"prompt": prompt, "n": 64, "max_tokens": 240, "ignore_eos": True}
    before = counter_of(shared, "vllm:generation_tokens_total")
    connection = http.client.HTTPConnection(shared.server.url.removeprefix("http://"))
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    while counter_of(shared, "vllm:generation_tokens_total") == before:
        pass
    connection.close()
    with shared.server.client as client:
        while True:  # the gauge moves with the next step
            client.post("/generate", json={"prompt": "a", "max_tokens": 1}).raise_for_status()
            if counter_of(shared, "vllm:num_requests_running") == 0:
                break
    assert counter_of(shared, "vllm:generation_tokens_total") - before < 64 * 240


def test_every_logprob_is_finite_and_a_group_may_be_larger_than_a_batch(shared: Stack) -> None:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 5, "top_k": 2, "max_tokens": 2, "n": 300}
    answer = GenerateResponse.model_validate(shared.server.generate(**body))
    assert answer.logprobs is not None
    assert len(answer.text) == len(answer.logprobs) == 300
    assert min(value for position in answer.logprobs[0] for value in position[0].values()) == LOWEST_LOGPROB


def test_routes_of_stock_clients_are_answered(shared: Stack) -> None:
    with shared.server.client as client:
        assert client.get("/health_generate").status_code == 200
        assert client.get("/bridge/state_dict_info").json()["shared_weights_enabled"] is True
        assert client.get("/bridge/is_sleeping").json() == {"sleeping": False}
        assert client.get("/bridge/debug").json()["engine_type"].startswith("vllm ")
        listed = {entry["path"] for entry in client.get("/bridge/list_endpoints").json()["endpoints"]}
        assert {"/generate", "/bridge/pause", "/lora/load", "/v1/chat/completions", "/metrics"} <= listed
        assert client.get("/v1/models").json()["data"][0]["id"] == str(shared.model)


def test_half_written_weights_are_not_served_until_they_are_replaced(shared: Stack) -> None:
    lock = WeightLock.attach(read_bridge_file(shared.bridge_file).fence_segment)
    with pytest.raises(RuntimeError), lock.writing(40):
        raise RuntimeError("the trainer fails in the middle")
    with shared.server.client as client:
        assert client.get("/health").status_code == 503
        refused = client.post("/generate", json={"prompt": "a"})
        assert refused.status_code == 503
        assert "half-written" in refused.json()["detail"]
        client.post("/bridge/reload", json={"path": str(shared.model), "policy_version": 41}).raise_for_status()
        assert client.get("/health").status_code == 200
    assert_agreement(shared, load(shared.model), version=41)
    lock.close()


def test_connections_to_the_ports_of_vllms_process_groups_take_none_of_its_descriptors(shared: Stack) -> None:
    """Any user of the machine had it abort within 3 s, with 20,000 of them one after another."""
    own = {listening.laddr.port for listening in psutil.Process(shared.server.process.pid).net_connections("tcp")}
    below = [psutil.Process(identity.pid) for identity in processes_below(shared.server.process.pid)]
    ports = {one.laddr for each in below for one in each.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    ports = {each for each in ports if each.port not in own}
    assert ports
    before = sum(each.num_fds() for each in below)
    with ExitStack() as strangers:
        for address in 10 * list(ports):
            stranger = strangers.enter_context(socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            stranger.connect_ex(address)
        time.sleep(0.2)  # in which it would accept them
        assert sum(each.num_fds() for each in below) < before + len(ports)
    assert shared.server.generate(prompt={"prompt_token_ids": PROMPT}, max_tokens=2)


def test_a_pause_ends_with_its_owner(shared: Stack) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with shared.server.client as client:
        client.post("/bridge/pause", json={"owner_pid": owner.pid}).raise_for_status()
        assert client.get("/bridge/is_paused").json() == {"paused": True}
        assert client.post("/bridge/pause", json={"owner_pid": os.getpid()}).status_code == 409
        with pytest.raises(httpx.ReadTimeout):
            client.post("/generate", json={"prompt": "a"}, timeout=0.5)
        owner.communicate(b"\n")
        client.post("/generate", json={"prompt": "a"}).raise_for_status()
        assert client.get("/bridge/is_paused").json() == {"paused": False}


def test_a_killed_server_leaves_no_process(shared: Stack) -> None:
    below = processes_below(shared.server.process.pid)
    assert len(below) >= NUM_PROCESSES
    assert shared.server.stop(signal.SIGKILL) == -signal.SIGKILL
    wait_gone(below, within_s=60)
