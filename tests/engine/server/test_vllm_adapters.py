"""A real vLLM that serves adapters beside shared, tied weights: each one swapped in or refused, and a clean exit.

The tests share one server: they run in the order in which they stand here, and the last of them ends it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from serving import save_tiny_model, shift, wait_healthy
from transformers import AutoModelForCausalLM
from vllm_serving import (
    LONG_PROMPT,
    NUM_PROCESSES,
    PROMPT,
    VERSION_HEADER,
    Stack,
    assert_agreement,
    assert_close,
    counter_of,
    load,
    logprobs_of,
    named_sockets,
    processes_below,
    segments_now,
    serving_vllm,
    wait_gone,
)

from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.bridges.memory.shared_tensors import segments_of
from grpo_engine.bridges.memory.weight_lock import SHARED_MEMORY
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import adapter_tensors, add_lora, save_adapter
from grpo_engine.server.vllm.checkpoint import can_reload_below_adapters
from grpo_engine.wire.fork_server import RESTART_SIGNAL
from grpo_engine.wire.log_lines import FORK_SERVER_RESTARTS

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [
    pytest.mark.extended(
        "test_check_vllm.py changes an adapter of a real vLLM, test_adapter_updates.py has every case"
    ),
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Tied embeddings, adapters on all but `down_proj` beside shared weights, raw log-probs, vLLM's development routes,
    started by hand."""
    folder = tmp_path_factory.mktemp("adapted")
    model = save_tiny_model(folder / "model", seed=2, tied=True)
    opened = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    flags = ("--enable-lora", "--max-lora-rank", "8")
    flags += (
        "--enable-request-id-headers",
        "--lora-target-modules",
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
    )  # vLLM's own
    with serving_vllm(model, folder, *flags, environment=opened) as stack:
        yield stack


def test_raw_logprobs_are_those_before_the_temperature(adapted: Stack) -> None:
    model = load(adapted.model)
    answer = assert_agreement(adapted, model, version=0, temperature=0.7, divided_by=1.0, n=4)
    assert answer.logprobs_mode == "raw"


def test_tied_embeddings_are_shared_as_one_tensor_also_with_adapters(adapted: Stack) -> None:
    file = read_bridge_file(adapted.bridge_file)
    assert file.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    bridge = adapted.bridge({"mode": "shared_vllm"})
    model = bridge.attach().model.eval()
    untrained = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    bridge.publish(1, shift(model, 1))
    assert_agreement(adapted, model, version=1, prompt=LONG_PROMPT)
    with adapted.server.client as client:  # the adapters' trainer below starts from the checkpoint
        answer = client.post("/bridge/reload", json={"path": str(adapted.model), "policy_version": 2})
    if can_reload_below_adapters():
        answer.raise_for_status()
    else:
        assert answer.status_code == 400
        assert "without --enable-lora" in answer.json()["detail"]

        def restore() -> None:
            for name, parameter in model.named_parameters():
                parameter.data.copy_(untrained[name])

        bridge.publish(2, restore)
    bridge.close()


def test_adapters_are_swapped_while_requests_run(adapted: Stack) -> None:
    bridge = adapted.bridge({"mode": "lora_only"})
    model = bridge.attach().model.eval()
    is_over = threading.Event()
    answers: list[dict] = []

    def send_requests() -> None:
        while not is_over.is_set():
            answers.append(adapted.server.generate(prompt={"prompt_token_ids": PROMPT}, max_tokens=64, logprobs=0))

    thread = threading.Thread(target=send_requests)
    thread.start()
    try:
        for version in range(3, 8):
            bridge.publish(version, shift(model, version))
            assert_agreement(adapted, model, version=version, prompt=LONG_PROMPT, n=2)
    finally:
        is_over.set()
        thread.join()
    assert all(len(set(answer["policy_versions"][0])) == 1 for answer in answers)
    with adapted.server.client as client:
        status = client.get("/lora/status").json()
        assert (status["active_adapter_name"], status["load_count"]) == ("policy@000007", 5)
    assert_agreement(adapted, model, version=7)
    with adapted.server.client as client:
        assert client.post("/lora/unload").json()["previous_name"] == "policy@000007"
    with model.disable_adapter():
        assert_agreement(adapted, model, version=8)
    bridge.close()


def test_vllms_routes_use_the_adapter_that_is_served(adapted: Stack) -> None:
    bridge = adapted.bridge({"mode": "lora_only"})
    model = bridge.attach().model.eval()
    bridge.publish(9, shift(model, 9))
    body = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 0, "return_token_ids": True}
    with adapted.server.client as client:
        answer = client.post("/v1/completions", json=body)
        client.post("/lora/unload").raise_for_status()
    [choice] = answer.json()["choices"]
    expected = logprobs_of(model, PROMPT, choice["token_ids"], 1.0)
    assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), expected)
    assert answer.headers[VERSION_HEADER] == "9"
    assert "X-Request-Id" in answer.headers
    bridge.close()


def test_vllms_development_routes_change_nothing(adapted: Stack) -> None:
    with adapted.server.client as client:
        assert client.get("/server_info").status_code == 200  # the routes exist
        before = client.get("/lora/status").json()
        loading = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": str(adapted.folder)})
        others = [client.post(path, json={}) for path in ("/pause", "/collective_rpc", "/sleep", "/update_weights")]
        assert {answer.status_code for answer in (loading, *others)} == {404}
        assert loading.json()["detail"].endswith("use /lora/load")
        assert client.get("/lora/status").json() == before
        assert client.get("/server_info", headers={"X-Forwarded-For": "10.1.2.3"}).status_code == 403
    assert_agreement(adapted, load(adapted.model), version=10)


def save_adapter_for(stack: Stack, folder: Path, targets: tuple[str, ...] = ("q_proj", "v_proj")) -> Path:
    """An adapter of rank 4 on the served model, with random factors."""
    torch.manual_seed(0)
    adapted = add_lora(AutoModelForCausalLM.from_pretrained(stack.model), LoraSettings(rank=4, target_modules=targets))
    for _, factor in adapter_tensors(adapted).items():
        factor.data.normal_(std=0.05)
    save_adapter(adapted, folder)
    return folder


def test_an_adapter_that_vllm_refuses_leaves_the_old_one_served(adapted: Stack, tmp_path: Path) -> None:
    good, other = (save_adapter_for(adapted, tmp_path / name) for name in ("good", "other"))
    file = other / "adapter_model.safetensors"
    save_file({name: -each if "lora_B" in name else each for name, each in load_file(file).items()}, file)
    settings = other / "adapter_config.json"
    whole = settings.read_text()
    model = load(adapted.model)
    with adapted.server.client as client:

        def serve(folder: Path, version: int) -> httpx.Response:
            return client.post("/lora/load", json={"adapter_path": str(folder), "policy_version": version})

        serve(good, 20).raise_for_status()
        settings.write_text(json.dumps(json.loads(whole) | {"lora_alpha": "much"}))  # only vLLM checks that
        refused = serve(other, 21)
        assert refused.status_code == 400
        assert "not an adapter for this model" in refused.json()["detail"]
        assert_agreement(adapted, PeftModel.from_pretrained(load(adapted.model), good), version=20)
        settings.write_text(whole)
        serve(other, 22).raise_for_status()
        assert_agreement(adapted, PeftModel.from_pretrained(model, other), version=22)
        patches = client.get("/bridge/debug").json()["patches_applied"]
        assert patches["watch_server"]
        assert patches["close_ports"]
        assert patches["hear_outputs"]


def test_an_adapter_without_a_matching_layer_is_refused_by_name(adapted: Stack, tmp_path: Path) -> None:
    partly = save_adapter_for(adapted, tmp_path / "partly", ("q_proj", "down_proj"))
    with adapted.server.client as client:
        served = client.get("/lora/status").json()["active_adapter_path"]
        refused = client.post("/lora/load", json={"adapter_path": str(partly)})
        assert refused.status_code == 400
        assert "has no layer for model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj" in refused.json()["detail"]
        assert client.get("/lora/status").json()["active_adapter_path"] == served


def test_hundreds_of_swaps_leave_nothing_behind(adapted: Stack, tmp_path: Path) -> None:
    folders = [save_adapter_for(adapted, tmp_path / str(n), ("q_proj", "v_proj", "o_proj", "up_proj")) for n in (0, 1)]
    processes = [psutil.Process(identity.pid) for identity in processes_below(adapted.server.process.pid)]
    processes.append(psutil.Process(adapted.server.process.pid))

    def swap(count: int) -> int:
        with adapted.server.client as client:
            for number in range(count):
                client.post("/lora/load", json={"adapter_path": str(folders[number % 2])}).raise_for_status()
        return sum(process.memory_info().rss for process in processes)

    before = swap(50)
    assert swap(200) - before < 200 * folder_bytes(folders[0]) // 4


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_restart_in_place_serves_from_new_processes_and_leaves_none_of_the_old(
    adapted: Stack,
) -> None:
    before, below = read_bridge_file(adapted.bridge_file), processes_below(adapted.server.process.pid)
    body = {"prompt": {"prompt_token_ids": PROMPT}, "n": 16, "max_tokens": 250, "ignore_eos": True}
    with ThreadPoolExecutor(20) as pool, adapted.server.client as client:
        requests = [pool.submit(client.post, "/generate", json=body) for _ in range(20)]
        while not counter_of(adapted, "vllm:num_requests_running"):
            pass
        adapted.server.process.send_signal(RESTART_SIGNAL)
        while FORK_SERVER_RESTARTS.text not in adapted.server.log.read_text(errors="replace"):
            assert adapted.server.process.poll() is None
            time.sleep(0.05)  # the interval of a probe, whose limit is the test's own
        answers = [request.result() for request in requests]
    refused = [one for one in answers if one.status_code != 200]
    assert {reason for one in answers if one.status_code == 200 for reason in one.json()["finish_reasons"]} <= {
        "length"
    }
    assert {one.status_code for one in refused} == {503}
    assert {one.json()["detail"] for one in refused} == {"the server is shutting down"}  # none was cut off by uvicorn
    assert not any(identity.is_alive() for identity in below)
    assert not {before.fence_segment, *segments_of(before.tensors)} & segments_now()
    wait_healthy(adapted.server)
    after = read_bridge_file(adapted.bridge_file)
    assert psutil.Process(after.pid).ppid() == adapted.server.process.pid
    assert after.instance != before.instance
    assert_agreement(adapted, load(adapted.model), version=0)


def mapped_segments(pid: int) -> set[str]:
    """Segments of shared memory that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().split()
    return {Path(path).name for path in maps if path.startswith(f"{SHARED_MEMORY}/")}


def test_a_terminated_server_leaves_nothing(adapted: Stack) -> None:
    file = read_bridge_file(adapted.bridge_file)
    segments = {file.fence_segment, *segments_of(file.tensors)}
    assert segments <= segments_now()
    below = processes_below(adapted.server.process.pid)
    assert len(below) >= NUM_PROCESSES
    queues = set().union(*(mapped_segments(identity.pid) for identity in below))
    assert queues
    sockets = set().union(*(named_sockets(identity.pid) for identity in below))
    assert sockets
    assert adapted.server.stop() == 0
    wait_gone(below, within_s=60)
    assert not (segments | queues) & {path.name for path in SHARED_MEMORY.iterdir()}
    assert not [path for path in sockets if path.parent.exists()]
    assert not adapted.bridge_file.exists()
