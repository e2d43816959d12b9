"""Trainers and servers that are killed during a weight update."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest
import torch
from bridging import PROMPT, assert_agreement, make_bridge
from serving import RunningServer, our_segments, running_server, save_tiny_model, shift, wait_healthy

from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.bridges.memory.shared_tensors import map_tensors, segments_of, unlink_segments
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.bridges.transport.server_client import ServerClient
from grpo_engine.errors import BridgeError, PeerUnavailable

pytestmark = pytest.mark.slow
_TRAINER = """
import os, sys
from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.bridges.transport.server_client import ServerClient
from grpo_engine.bridges.memory.shared_tensors import map_tensors
from pathlib import Path
url, path, how = sys.argv[1:]
ServerClient(url, patience_s=30).pause(300)
if how == "mid-write":
    file = read_bridge_file(Path(path))
    tensors = map_tensors(file.tensors)
    with WeightLock.attach(file.fence_segment).writing(9):
        next(iter(tensors.values())).zero_()
        os.kill(os.getpid(), 9)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    torch.set_num_threads(1)
    before = our_segments()
    yield
    assert our_segments() == before


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def sharing(model: Path, tmp_path: Path, **more: object) -> RunningServer:
    flags = ("--shared-weights", "--bridge-file", str(tmp_path / "bridge.json"))
    return running_server(model, *flags, folder=tmp_path, **more)


def attach(model: Path, server: RunningServer, tmp_path: Path):
    settings = {"mode": "shared_vllm", "config_path": tmp_path / "bridge.json"}
    return make_bridge(settings, model, server.url, tmp_path)


def kill_a_trainer(server: RunningServer, tmp_path: Path, how: str) -> None:
    code = subprocess.run(
        [sys.executable, "-c", _TRAINER, server.url, str(tmp_path / "bridge.json"), how], check=False, timeout=60
    ).returncode
    assert code == -signal.SIGKILL


def test_a_pause_ends_when_its_trainer_exits(model_folder: Path, tmp_path: Path) -> None:
    with sharing(model_folder, tmp_path) as server:
        kill_a_trainer(server, tmp_path, "paused")
        answer = server.generate(prompt={"prompt_token_ids": PROMPT}, max_tokens=2)
        assert answer["policy_version"] == 0
        with server.client as client:
            assert client.get("/bridge/is_paused").json() == {"paused": False}
        assert "paused and exited" in server.log.read_text(errors="replace")


def test_a_pause_ends_at_its_time_limit_and_holds_requests_until_then(model_folder: Path, tmp_path: Path) -> None:
    with sharing(model_folder, tmp_path) as server, server.client as client:
        asked_at = time.monotonic()
        assert client.post("/bridge/pause", json={"timeout_s": 1.0}).json()["status"] == "paused"
        server.generate(prompt="a", max_tokens=1)
        assert time.monotonic() >= asked_at + 1.0
        assert client.post("/bridge/pause", json={"owner_pid": os.getpid()}).status_code == 200
        other = client.post("/bridge/pause", json={"owner_pid": server.process.pid})
        assert other.status_code == 409
        assert str(os.getpid()) in other.json()["detail"]
        assert client.post("/bridge/pause", json={"owner_pid": 2**22 + 1}).status_code == 400
        assert client.post("/bridge/resume").json()["status"] == "resumed"


def test_a_weight_update_waits_for_another_clients_pause_and_is_refused_at_the_time_limit(
    model_folder: Path, tmp_path: Path
) -> None:
    with sharing(model_folder, tmp_path) as server, server.client as client:
        bridge = attach(model_folder, server, tmp_path)
        model = bridge.attach().model
        client.post("/bridge/pause", json={"timeout_s": 0.5})
        bridge.publish(1, shift(model, 1))
        assert_agreement(server, model, 1)
        client.post("/bridge/pause")
        bridge._client._patience_s = 0
        with pytest.raises(BridgeError, match=r"refused with 409: already paused by a client without owner_pid"):
            bridge.publish(2, shift(model, 2))
        client.post("/bridge/resume")
        assert client.get("/bridge/info").json()["policy_version"] == 1
        bridge.close()


def test_a_version_above_int64_is_refused_and_the_server_continues(model_folder: Path, tmp_path: Path) -> None:
    with running_server(model_folder, folder=tmp_path) as server, server.client as client:
        for path, more in (
            ("/bridge/resume", {}),
            ("/bridge/reload", {"path": str(model_folder)}),
            ("/lora/load", {"adapter_path": str(model_folder)}),
        ):
            for version in (2**63, -1):
                assert client.post(path, json={"policy_version": version, **more}).status_code == 422
        assert server.generate(prompt="a", max_tokens=1)["policy_version"] == 0


def test_half_written_weights_are_never_served_and_reloaded_for_the_next_trainer(
    model_folder: Path, tmp_path: Path
) -> None:
    with sharing(model_folder, tmp_path) as server:
        kill_a_trainer(server, tmp_path, "mid-write")
        with server.client as client:
            for path in ("/health", "/health_generate"):
                assert client.get(path).status_code == 503
            refused = client.post("/generate", json={"prompt": "a"})
            assert refused.status_code == 503
            assert "half-written" in refused.json()["detail"]
        bridge = attach(model_folder, server, tmp_path)
        model = bridge.attach().model
        assert_agreement(server, model, 0)
        assert all(float(p.detach().abs().sum()) > 0 for p in model.parameters())
        bridge.publish(1, shift(model, 1))
        assert_agreement(server, model, 1)
        bridge.close()


def test_weights_that_compute_nan_are_reported_until_valid_ones_follow(model_folder: Path, tmp_path: Path) -> None:
    with sharing(model_folder, tmp_path) as server, server.client as client:
        bridge = attach(model_folder, server, tmp_path)
        model = bridge.attach().model
        good = shift(model, 2)
        bridge.publish(1, lambda: [p.data.fill_(math.nan) for p in model.parameters()])
        for path, body in (("/generate", {"prompt": "a"}), ("/v1/completions", {"prompt": "a", "logprobs": 0})):
            answer = client.post(path, json=body)
            assert answer.status_code == 500
            assert "the weights of version 1 compute NaN" in answer.json()["detail"]
        assert client.get("/health_generate").status_code == 500
        bridge.publish(2, good)
        assert_agreement(server, model, 2)
        bridge.close()


def test_a_second_trainer_is_refused_while_the_first_lives_and_writes(model_folder: Path, tmp_path: Path) -> None:
    trains = (
        "import sys; from grpo_engine.bridges.memory.weight_lock import WeightLock\n"
        "with WeightLock.attach(sys.argv[1]).writing(1): pass\n"
        "print(); sys.stdout.flush(); sys.stdin.read()"
    )
    with sharing(model_folder, tmp_path) as server:
        early = attach(model_folder, server, tmp_path)
        model = early.attach().model
        segment = read_bridge_file(tmp_path / "bridge.json").fence_segment
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", trains, segment], **pipes) as other:
            assert other.stdout is not None
            other.stdout.readline()
            late, words = attach(model_folder, server, tmp_path), rf"process {other.pid} already trains the weights"
            with pytest.raises(BridgeError, match=words):
                late.attach()
            with pytest.raises(BridgeError, match=words):
                early.publish(2, shift(model, 1))
            with server.client as client:
                assert client.get("/bridge/is_paused").json() == {"paused": False}
        early.publish(2, shift(model, 1))
        assert_agreement(server, model, 2)
        early.close()
        late.close()
        assert WeightLock.attach(segment).writer() is None


def test_weights_of_another_model_are_not_trained_though_they_have_its_shape(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = save_tiny_model(tmp_path / "other", seed=5)
    with sharing(model_folder, tmp_path) as server:
        stranger = attach(other, server, tmp_path)
        with (
            closing(stranger),
            pytest.raises(BridgeError, match=r"weights of .*tiny, but the trainer was given .*other"),
        ):
            stranger.attach()
        with closing(make_bridge({"mode": "none"}, other, server.url, tmp_path)) as writer:
            writer.attach()
        assert "keep its own tokenizer" in caplog.text


def test_a_restart_in_another_dtype_is_refused_by_name(model_folder: Path, tmp_path: Path) -> None:
    with sharing(model_folder, tmp_path) as server:
        bridge = attach(model_folder, server, tmp_path)
        bridge.attach()
    flags = ("--shared-weights", "--bridge-file", str(tmp_path / "bridge.json"), "--dtype", "bfloat16")
    port = int(server.url.rpartition(":")[2])
    words = "the same in another dtype or on another GPU; restart the trainer"
    restarted = running_server(model_folder, *flags, folder=tmp_path, port=port)
    with restarted, closing(bridge), pytest.raises(BridgeError, match=words):
        bridge.ensure_current()


def test_a_writer_that_does_not_pause_only_costs_the_batch(model_folder: Path, tmp_path: Path) -> None:
    with sharing(model_folder, tmp_path) as server:
        file = read_bridge_file(tmp_path / "bridge.json")
        lock, tensors = WeightLock.attach(file.fence_segment), map_tensors(file.tensors)
        with ExitStack() as stack, server.client as client:
            request = subprocess.Popen(
                [
                    *(sys.executable, "-c"),
                    "import sys, httpx; print(httpx.post(sys.argv[1] + '/generate', timeout=120, trust_env=False, json="
                    "{'prompt': 'abc', 'n': 64, 'max_tokens': 240, 'ignore_eos': True, 'logprobs': 0}).text)",
                    server.url,
                ],
                stdout=subprocess.PIPE,
            )
            stack.callback(request.wait)
            version = 0
            while request.poll() is None and "decoding it again" not in server.log.read_text(errors="replace"):
                version += 1
                with lock.writing(version):
                    for tensor in tensors.values():
                        tensor.mul_(1.01)
                time.sleep(0.05)  # some batches begin between two writes
            output, _ = request.communicate(timeout=120)
            answer = json.loads(output)
            assert "decoding it again" in server.log.read_text(errors="replace")
            assert {v for versions in answer["policy_versions"] for v in versions} == {version}
            assert client.get("/bridge/info").json()["policy_version"] == version
        lock.close()


def test_under_a_supervisor_a_restarted_server_keeps_the_newest_weights(model_folder: Path, tmp_path: Path) -> None:
    environment = {"GRPO_TUI_RUN": f"test{os.getpid()}"}
    segments: set[str] = set()
    try:
        with sharing(model_folder, tmp_path, environment=environment) as server:
            bridge = attach(model_folder, server, tmp_path)
            model = bridge.attach().model.eval()
            bridge.publish(5, shift(model, 1))
            file = read_bridge_file(tmp_path / "bridge.json")
            segments = {file.fence_segment} | segments_of(file.tensors)
            assert all(name.startswith(f"grpo-test{os.getpid()}-") for name in segments)
            server.stop(signal.SIGKILL)
        with sharing(model_folder, tmp_path, environment=environment, port=int(server.url[-5:].lstrip(":"))) as again:
            assert_agreement(again, model, 5)
            assert "Adopted the weights of version 5" in again.log.read_text(errors="replace")
            bridge.ensure_current()
            bridge.publish(6, shift(model, 2))
            assert_agreement(again, model, 6)
            now = read_bridge_file(tmp_path / "bridge.json")
            assert {now.fence_segment} | segments_of(now.tensors) == segments
        bridge.close()
        assert segments <= our_segments()
    finally:
        unlink_segments(segments)


def test_a_server_without_supervisor_removes_a_killed_ones_files(model_folder: Path, tmp_path: Path) -> None:
    with sharing(model_folder, tmp_path) as server:
        server.stop(signal.SIGKILL)
    left = read_bridge_file(tmp_path / "bridge.json")
    assert left.fence_segment in our_segments()
    with sharing(model_folder, tmp_path) as again:
        now = read_bridge_file(tmp_path / "bridge.json")
        assert now.instance != left.instance
        assert left.fence_segment not in our_segments()
        bridge = attach(model_folder, again, tmp_path)
        assert_agreement(again, bridge.attach().model, 0)
        bridge.close()
    assert not (tmp_path / "bridge.json").exists()


def test_a_running_servers_bridge_file_is_not_overwritten(model_folder: Path, tmp_path: Path) -> None:
    with sharing(model_folder, tmp_path):
        with pytest.raises(AssertionError, match="belongs to a running inference server"):
            sharing(model_folder, tmp_path).__enter__()
        assert read_bridge_file(tmp_path / "bridge.json")


def test_a_trainer_says_what_is_missing(model_folder: Path, tmp_path: Path) -> None:
    with running_server(model_folder, folder=tmp_path) as server:
        bridge = attach(model_folder, server, tmp_path)
        with pytest.raises(BridgeError, match=r"does not share its weights; start it with --shared-weights"):
            bridge.attach()
        bridge.close()
    lonely = make_bridge({"mode": "none"}, model_folder, "http://127.0.0.1:9", tmp_path)
    lonely._client._patience_s = 0.5
    with pytest.raises(
        PeerUnavailable, match=r"9/bridge/info.*check the inference server's log.*--handover .*--bridge-restart"
    ):
        lonely.attach()
    lonely.close()


def test_a_checkpoint_that_does_not_fit_changes_nothing(model_folder: Path, tmp_path: Path) -> None:
    with running_server(model_folder, folder=tmp_path) as server, server.client as client:
        wait_healthy(server)
        before = server.generate(prompt="abc", temperature=0, max_tokens=8, logprobs=0)
        for path, word in (
            (tmp_path / "nowhere", "nowhere"),
            (tmp_path, "no config.json"),
            (Path("here"), "absolute"),
        ):
            answer = client.post("/bridge/reload", json={"path": str(path), "policy_version": 3})
            assert answer.status_code == 400, answer.text
            assert word in answer.json()["detail"]
        assert server.generate(prompt="abc", temperature=0, max_tokens=8, logprobs=0) == before


def test_sigterm_ends_a_busy_server_at_once(model_folder: Path, tmp_path: Path) -> None:
    with sharing(model_folder, tmp_path) as server:
        body = "{'prompt': 'a', 'n': 4096, 'max_tokens': 250, 'ignore_eos': True}"  # minutes of work
        code = f"import sys, httpx; httpx.post(sys.argv[1] + '/generate', timeout=120, trust_env=False, json={body})"
        asks = [subprocess.Popen([sys.executable, "-c", code, server.url], stderr=subprocess.DEVNULL) for _ in range(2)]
        process = psutil.Process(server.process.pid)
        while sum(connection.status == "ESTABLISHED" for connection in process.net_connections()) < len(asks):
            time.sleep(0.05)
        assert server.stop() == 0
        for ask in asks:
            ask.wait(60)
    assert not (tmp_path / "bridge.json").exists()


def test_a_port_where_something_else_answers_is_named_with_its_flag() -> None:
    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

    with HTTPServer(("127.0.0.1", 0), Stranger) as other:
        Thread(target=other.handle_request, daemon=True).start()
        with pytest.raises(BridgeError, match="not an inference server of grpo-engine: correct --vllm-port"):
            ServerClient(f"http://127.0.0.1:{other.server_port}", patience_s=5).info()
