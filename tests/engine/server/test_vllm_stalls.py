"""`/health` of a real vLLM whose engine processes hang or are killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from serving import RunningServer, model_logprobs, save_tiny_model
from transformers import AutoModelForCausalLM
from vllm_serving import processes_below, serving_vllm, wait_gone

from grpo_engine.bridges.transport.checkpoint_folder import CheckpointFolder

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [
    pytest.mark.extended(
        "test_vllm_pauses.py has a core that hangs or exits, test_server_stalls.py a server on torch that hangs"
    ),
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with the checkpoint of version 7 that a trainer has written."""
    folder = tmp_path_factory.mktemp("stalls")
    handover = folder / "handover"
    with CheckpointFolder(handover, handover, model=str(model_folder)).writing(7) as newest:
        save_tiny_model(newest, seed=2)
    flags = ("--enforce-eager", "--stalled-after-s", "2", "--handover", str(handover))
    with serving_vllm(model_folder, folder, *flags, is_sharing=False) as stack:
        yield stack.server
        for process in engine_processes(stack.server):
            process.resume()


def engine_processes(server: RunningServer) -> list[psutil.Process]:
    """vLLM's engine core, and its worker where that is a separate process."""
    with suppress(psutil.NoSuchProcess):
        (serving,) = psutil.Process(server.process.pid).children()  # forked from its fork server
        below = serving.children(recursive=True)
        return [each for each in below if not any("resource_tracker" in part for part in each.cmdline())]
    return []


def health(server: RunningServer) -> httpx.Response:
    with server.client as client:
        return client.get("/health")


def wait_status(server: RunningServer, status: int) -> httpx.Response:
    while (answer := health(server)).status_code != status:
        time.sleep(0.1)  # the interval of a probe, whose limit is the test's own
    return answer


def test_a_started_server_loads_the_newest_checkpoint_of_a_trainer(server: RunningServer) -> None:
    answer = server.generate(prompt={"prompt_token_ids": [10, 20, 30]}, max_tokens=8, ignore_eos=True, logprobs=0)
    assert answer["policy_version"] == 7
    newest = AutoModelForCausalLM.from_pretrained(server.log.parent / "handover" / "current", dtype=torch.float32)
    expected = model_logprobs(newest, [10, 20, 30], answer["token_ids"][0])
    served = torch.tensor([next(iter(position[0].values())) for position in answer["logprobs"][0]])
    assert (served - expected).abs().mean() < 0.05  # 5 for the model that it was started with
    with server.client as client:
        assert client.get("/bridge/info").json()["policy_version"] == 7


@pytest.mark.parametrize("which", [0, -1], ids=["engine core", "worker"])
def test_health_reports_a_hanging_process_of_the_engine_until_it_continues(server: RunningServer, which: int) -> None:
    hanging = engine_processes(server)[which]
    server.generate(prompt="abc", max_tokens=4, ignore_eos=True)
    hanging.suspend()
    try:
        assert health(server).status_code == 200  # idle
        with server.client as client, pytest.raises(httpx.ReadTimeout):
            client.post("/generate", json={"prompt": "abc", "max_tokens": 64}, timeout=4)
        stalled = wait_status(server, 503)  # also after the only client has timed out
        assert stalled.json()["engine"] == "stalled"
        assert "has produced nothing for" in stalled.json()["detail"]
        with server.client as client:
            assert client.post("/generate", json={"prompt": "abc"}).status_code == 503
    finally:
        hanging.resume()
    wait_status(server, 200)  # without any request
    assert server.generate(prompt="abc", max_tokens=4, ignore_eos=True)["finish_reasons"] == ["length"]


def test_health_reports_an_engine_that_hangs_in_a_weight_update(server: RunningServer) -> None:
    core = engine_processes(server)[0]
    core.suspend()
    try:
        with ThreadPoolExecutor(1) as pool, server.client as client:
            pausing = pool.submit(client.post, "/bridge/pause", json={}, timeout=60)
            assert wait_status(server, 503).json()["engine"] == "stalled"
            core.resume()
            assert pausing.result().status_code == 200
            wait_status(server, 200)
            assert client.post("/bridge/resume", json={}).status_code == 200
    finally:
        core.resume()
    assert server.generate(prompt="abc", max_tokens=4, ignore_eos=True)["finish_reasons"] == ["length"]


def test_a_killed_engine_core_fails_waiting_requests_and_ends_the_server(server: RunningServer) -> None:
    core, below = engine_processes(server)[0], processes_below(server.process.pid)
    core.suspend()
    with ThreadPoolExecutor(1) as pool, server.client as client:
        asking = pool.submit(client.post, "/generate", json={"prompt": "abc"})
        wait_status(server, 503)
        core.kill()
        answer = asking.result()
    assert (answer.status_code, "engine has exited" in answer.json()["detail"]) == (503, True)
    assert server.process.wait(60) == 1
    wait_gone(below, within_s=60)
    assert "engine has exited" in server.log.read_text(errors="replace")
