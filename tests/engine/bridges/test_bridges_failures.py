"""Trainers and servers that are killed during a weight update."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread

import httpx
import psutil
import pytest
from bridging import PROMPT, Serving, assert_agreement, bridge_to, make_bridge, serving
from forked import run_forked
from serving import our_segments, running_server, save_tiny_model, shift

from grpo_engine.bridges import ON_SHARED_MEMORY, Bridge
from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.bridges.memory.shared_tensors import map_tensors, segments_of, unlink_segments
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.bridges.transport.server_client import ServerClient
from grpo_engine.errors import BridgeError, PeerUnavailable
from grpo_engine.processes import ProcessIdentity

pytestmark = pytest.mark.slow
HALF_WRITTEN_VERSION = 9


@pytest.fixture
def own_server(model_folder: Path, tmp_path: Path) -> Iterator[Serving]:
    """A server that the test may kill."""
    with serving(model_folder, tmp_path, "--shared-weights") as server:
        yield server


def pause_and_die(url: str, bridge_file: Path, is_writing: bool) -> None:
    """A trainer that is killed after its pause, or in the middle of its write."""
    ServerClient(url, patience_s=30).pause(300)
    if is_writing:
        file = read_bridge_file(bridge_file)
        tensors = map_tensors(file.tensors)
        with WeightLock.attach(file.fence_segment).writing(HALF_WRITTEN_VERSION):
            next(iter(tensors.values())).zero_()
            os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def log_of(server: Serving) -> str:
    return server.now.log.read_text(errors="replace")


def test_a_pause_ends_when_its_trainer_exits(server: Serving) -> None:
    before = len(log_of(server))
    assert run_forked(pause_and_die, server.url, server.bridge_file, False) == -signal.SIGKILL
    answer = server.now.generate(prompt={"prompt_token_ids": PROMPT}, max_tokens=2)
    assert answer["policy_version"] == 0
    with server.now.client as client:
        assert client.get("/bridge/is_paused").json() == {"paused": False}
    assert "paused and exited" in log_of(server)[before:]


def test_a_pause_ends_at_its_time_limit_and_holds_requests_until_then(server: Serving) -> None:
    with server.now.client as client:
        asked_at = time.monotonic()
        assert client.post("/bridge/pause", json={"timeout_s": 0.3}).json()["status"] == "paused"
        server.now.generate(prompt="a", max_tokens=1)
        assert time.monotonic() >= asked_at + 0.3
        assert client.post("/bridge/pause", json={"owner_pid": os.getpid()}).status_code == 200
        other = client.post("/bridge/pause", json={"owner_pid": server.now.process.pid})
        assert other.status_code == 409
        assert str(os.getpid()) in other.json()["detail"]
        assert client.post("/bridge/pause", json={"owner_pid": 2**22 + 1}).status_code == 400
        assert client.post("/bridge/resume").json()["status"] == "resumed"


def test_a_weight_update_waits_for_another_clients_pause_and_is_refused_at_the_time_limit(
    server: Serving, bridge: Bridge
) -> None:
    model = bridge.attach().model
    with server.now.client as client:
        client.post("/bridge/pause", json={"timeout_s": 0.5})
        bridge.publish(1, shift(model, 1))
        assert_agreement(server.now, model, 1)
        client.post("/bridge/pause")
        bridge._client._patience_s = 0
        with pytest.raises(BridgeError, match=r"refused with 409: already paused by a client without owner_pid"):
            bridge.publish(2, shift(model, 2))
        client.post("/bridge/resume")
        assert client.get("/bridge/info").json()["policy_version"] == 1


def test_a_version_above_int64_is_refused_and_the_server_continues(server: Serving) -> None:
    with server.now.client as client:
        for path, more in (
            ("/bridge/resume", {}),
            ("/bridge/reload", {"path": str(server.model)}),
            ("/lora/load", {"adapter_path": str(server.model)}),
        ):
            for version in (2**63, -1):
                assert client.post(path, json={"policy_version": version, **more}).status_code == 422
    assert server.now.generate(prompt="a", max_tokens=1)["policy_version"] == 0


def test_half_written_weights_are_never_served_and_reloaded_for_the_next_trainer(
    server: Serving, bridge: Bridge
) -> None:
    assert run_forked(pause_and_die, server.url, server.bridge_file, True) == -signal.SIGKILL
    with server.now.client as client:
        for path in ("/health", "/health_generate"):
            assert client.get(path).status_code == 503
        refused = client.post("/generate", json={"prompt": "a"})
        assert refused.status_code == 503
        assert "half-written" in refused.json()["detail"]
    model = bridge.attach().model
    assert_agreement(server.now, model, 0)
    assert all(float(p.detach().abs().sum()) > 0 for p in model.parameters())
    bridge.publish(1, shift(model, 1))
    assert_agreement(server.now, model, 1)


def test_a_second_training_of_a_process_attaches_to_a_server_that_expects_the_weights_of_the_first(
    server: Serving, bridge: Bridge
) -> None:
    """It waited for its own process."""
    lock = WeightLock.attach(read_bridge_file(server.bridge_file).fence_segment)
    lock.expect(ProcessIdentity.of_this_process())
    lock.close()
    assert_agreement(server.now, bridge.attach().model, 0)


def test_a_trainer_attaches_once_the_server_has_read_the_files_that_it_reads_late(
    server: Serving, tmp_path: Path
) -> None:
    file, me = read_bridge_file(server.bridge_file), ProcessIdentity.of(server.now.process.pid)
    lock, stops = WeightLock.attach(file.fence_segment), Event()
    lock.expect(me)  # as one that was to get its weights from a trainer, which has exited
    with (
        closing(bridge_to(server, "shared_vllm", tmp_path)) as bridge,
        closing(bridge_to(server, "shared_vllm", tmp_path, is_stopping=stops.is_set)) as stopped,
        ThreadPoolExecutor() as threads,
    ):
        attaching, other = threads.submit(bridge.attach), threads.submit(stopped.attach)
        with pytest.raises(TimeoutError):
            attaching.result(timeout=1)
        stops.set()
        with pytest.raises(PeerUnavailable, match="not waiting for the server's weights"):
            other.result()
        lock.expect(None)
        with lock.writing(0):
            pass
        assert_agreement(server.now, attaching.result().model, 0)
        lock.clear_writer()
        lock.close()


def test_weights_that_compute_nan_are_reported_until_valid_ones_follow(server: Serving, bridge: Bridge) -> None:
    model = bridge.attach().model
    good = shift(model, 2)
    bridge.publish(1, lambda: [p.data.fill_(math.nan) for p in model.parameters()])
    with server.now.client as client:
        for path, body in (("/generate", {"prompt": "a"}), ("/v1/completions", {"prompt": "a", "logprobs": 0})):
            answer = client.post(path, json=body)
            assert answer.status_code == 500
            assert "the weights of version 1 compute NaN" in answer.json()["detail"]
        assert client.get("/health_generate").status_code == 500
    bridge.publish(2, good)
    assert_agreement(server.now, model, 2)


def test_a_second_trainer_is_refused_while_the_first_lives_and_writes(server: Serving, tmp_path: Path) -> None:
    trains = (
        "import sys; from grpo_engine.bridges.memory.weight_lock import WeightLock\n"
        "with WeightLock.attach(sys.argv[1]).writing(1): pass\n"
        "print(); sys.stdout.flush(); sys.stdin.read()"
    )
    early, late = (bridge_to(server, "shared_vllm", tmp_path) for _ in range(2))
    model = early.attach().model
    segment = read_bridge_file(server.bridge_file).fence_segment
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with closing(early), closing(late):
        with subprocess.Popen([sys.executable, "-c", trains, segment], **pipes) as other:
            assert other.stdout is not None
            other.stdout.readline()
            message = rf"process {other.pid} already trains the weights"
            with pytest.raises(BridgeError, match=message):
                late.attach()
            with pytest.raises(BridgeError, match=message):
                early.publish(2, shift(model, 1))
            with server.now.client as client:
                assert client.get("/bridge/is_paused").json() == {"paused": False}
        early.publish(2, shift(model, 1))
        assert_agreement(server.now, model, 2)
    assert WeightLock.attach(segment).writer() is None


def test_weights_of_another_model_are_not_trained_though_they_have_its_shape(
    server: Serving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = str(save_tiny_model(tmp_path / "other", seed=5))
    message = r"weights of .*tiny, but the trainer was given .*other: give both"
    for mode in ON_SHARED_MEMORY:
        bridge = bridge_to(server, mode, tmp_path, model_name=other)
        with closing(bridge), pytest.raises(BridgeError, match=message):
            bridge.attach()
    with closing(bridge_to(server, "none", tmp_path, model_name=other)) as bridge:
        bridge.attach()
    assert "keep its own tokenizer" in caplog.text


def test_a_writer_that_does_not_pause_only_costs_the_batch(server: Serving) -> None:
    file = read_bridge_file(server.bridge_file)
    lock, tensors = WeightLock.attach(file.fence_segment), map_tensors(file.tensors)
    body = {"prompt": "abc", "n": 16, "max_tokens": 240, "ignore_eos": True, "logprobs": 0}
    version = 0
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(server.now.generate, **body)
        while not request.done() and "decoding it again" not in log_of(server):
            version += 1
            with lock.writing(version):
                for tensor in tensors.values():
                    tensor.mul_(1.01)
            time.sleep(0.05)  # some batches begin between two writes
        answer = request.result()
    assert "decoding it again" in log_of(server)
    assert {v for versions in answer["policy_versions"] for v in versions} == {version}
    with server.now.client as client:
        assert client.get("/bridge/info").json()["policy_version"] == version
    lock.close()


def test_a_running_servers_bridge_file_is_not_overwritten(server: Serving) -> None:
    second = Serving(server.model, server.folder, "--shared-weights")
    with pytest.raises(AssertionError, match="belongs to a running inference server"):
        second.start()
    assert read_bridge_file(server.bridge_file).pid == server.now.process.pid


def test_a_checkpoint_that_does_not_fit_changes_nothing(server: Serving, tmp_path: Path) -> None:
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 8, "logprobs": 0}
    before = server.now.generate(**body)
    for path, word in ((tmp_path / "nowhere", "nowhere"), (tmp_path, "no config.json"), (Path("here"), "absolute")):
        with server.now.client as client:
            answer = client.post("/bridge/reload", json={"path": str(path), "policy_version": 3})
        assert answer.status_code == 400, answer.text
        assert word in answer.json()["detail"]
    assert server.now.generate(**body) == before


def test_a_restart_in_another_dtype_is_refused_by_name(own_server: Serving, tmp_path: Path) -> None:
    with closing(bridge_to(own_server, "shared_vllm", tmp_path)) as bridge:
        bridge.attach()
        own_server.end()
        own_server.dtype = "bfloat16"
        own_server.start()
        message = "the same in another dtype or on another GPU; restart the trainer"
        with pytest.raises(BridgeError, match=message):
            bridge.prepare_step()


def test_under_a_supervisor_a_restarted_server_keeps_the_newest_weights(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_TUI_RUN", f"test{os.getpid()}")
    server = Serving(model_folder, tmp_path, "--shared-weights")
    segments: set[str] = set()
    try:
        server.start()
        with closing(bridge_to(server, "shared_vllm", tmp_path)) as bridge:
            model = bridge.attach().model.eval()
            bridge.publish(5, shift(model, 1))
            file = read_bridge_file(server.bridge_file)
            segments = {file.fence_segment} | segments_of(file.tensors)
            assert all(name.startswith(f"grpo-test{os.getpid()}-") for name in segments)
            server.end(signal.SIGKILL)
            server.start()
            assert_agreement(server.now, model, 5)
            assert "Adopted the weights of version 5" in log_of(server)
            bridge.prepare_step()
            bridge.publish(6, shift(model, 2))
            assert_agreement(server.now, model, 6)
            now = read_bridge_file(server.bridge_file)
            assert {now.fence_segment} | segments_of(now.tensors) == segments
            server.end()
        assert segments <= our_segments()
    finally:
        server.close()
        unlink_segments(segments)


def test_a_server_without_supervisor_removes_a_killed_ones_files(own_server: Serving, tmp_path: Path) -> None:
    own_server.end(signal.SIGKILL)
    left = read_bridge_file(own_server.bridge_file)
    assert left.fence_segment in our_segments()
    own_server.start()
    assert read_bridge_file(own_server.bridge_file).instance != left.instance
    assert left.fence_segment not in our_segments()
    with closing(bridge_to(own_server, "shared_vllm", tmp_path)) as bridge:
        assert_agreement(own_server.now, bridge.attach().model, 0)


def test_sigterm_ends_a_busy_server_at_once(own_server: Serving) -> None:
    def ask() -> None:
        body = {"prompt": "a", "n": 4096, "max_tokens": 250, "ignore_eos": True}  # minutes of work
        with suppress(httpx.TransportError), own_server.now.client as client:
            client.post("/generate", json=body)

    process = psutil.Process(own_server.now.process.pid)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(ask)
        while sum(connection.status == "ESTABLISHED" for connection in process.net_connections()) < 2:
            time.sleep(0.05)
        assert own_server.end() == 0


@pytest.mark.parametrize(("mode", "flag"), [("shared_vllm", "--shared-weights"), ("lora_only", "--enable-lora")])
def test_a_server_without_what_the_mode_needs_is_refused_with_its_flag(
    plain_url: str, model_folder: Path, tmp_path: Path, mode: str, flag: str
) -> None:
    settings = {"mode": mode, **({"config_path": tmp_path / "bridge.json"} if mode == "shared_vllm" else {})}
    bridge = make_bridge(settings, model_folder, plain_url, tmp_path)
    with closing(bridge), pytest.raises(BridgeError, match=f"start .*with {flag}"):
        bridge.attach()


@pytest.fixture(scope="module")
def plain_url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server without any setting for bridges."""
    with running_server(model_folder, folder=tmp_path_factory.mktemp("plain")) as server:
        yield server.url


def test_a_trainer_without_a_server_says_at_once_what_it_waits_for_and_how_to_start_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = make_bridge({"mode": "none"}, tmp_path, "http://127.0.0.1:9", tmp_path, patience_s=0.1)
    message = r"9/bridge/info.*check the inference server's log.*--handover .*--bridge-restart"
    with closing(bridge), pytest.raises(PeerUnavailable, match=message):
        bridge.attach()
    said_at_once = caplog.records[0].getMessage()
    assert said_at_once.startswith("http://127.0.0.1:9: no inference server answers yet: if none is loading, start it")
    assert "--bridge-restart" in said_at_once


def test_a_port_where_something_else_answers_is_named_with_its_flag() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        Thread(target=other.handle_request, daemon=True).start()
        with pytest.raises(BridgeError, match=r"not our inference server.*`grpo-engine server.*--vllm-port"):
            ServerClient(f"http://127.0.0.1:{other.server_port}", patience_s=5).info()
