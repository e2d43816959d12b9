"""Checkpoint updates: atomic, and loaded by every server that starts or is restarted."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from bridging import PROMPT, Serving, assert_agreement, bridge_to, make_bridge, served_logprobs, serving
from forked import run_forked
from serving import RunningServer, free_port, model_logprobs, python_path, save_tiny_model, shift
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_engine.bridges.transport import checkpoint_folder, server_control
from grpo_engine.bridges.transport.checkpoint_folder import CheckpointFolder, choose_storage, newest_checkpoint
from grpo_engine.bridges.transport.server_control import LocalServer, is_listening
from grpo_engine.environments.inference_servers import InferenceServers
from grpo_engine.errors import BridgeError, PeerUnavailable
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora
from grpo_engine.models.merged_lora import merged_weights
from grpo_engine.server.config import ServerConfig
from grpo_engine.wire.inference import GenerateRequest, TokenPrompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def settings() -> dict[str, object]:
    return {"mode": "none"}


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other processes bring about; the limit is the test's own."""
    while not condition():
        time.sleep(0.02)


# --- the folder --------------------------------------------------------------------------------------------------


def write_checkpoint(checkpoints: CheckpointFolder, version: int) -> None:
    with checkpoints.writing(version) as folder:
        save_tiny_model(folder, seed=version)


def newest_version(folder: Path) -> int | None:
    newest = newest_checkpoint(folder, "m")
    return None if newest is None else newest.policy_version


def test_current_is_the_newest_checkpoint_and_there_are_never_more_than_two(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "h", tmp_path / "storage", model="m")
    assert newest_checkpoint(tmp_path / "h", "m") is None
    for version in (1, 4, 4, 7):
        with checkpoints.writing(version) as folder:
            save_tiny_model(folder, seed=version)
            before = newest_checkpoint(tmp_path / "h", "m")
            assert len(list((tmp_path / "storage").glob("version-*"))) == (1 if before is None else 2)
        assert newest_version(tmp_path / "h") == version
        assert newest_checkpoint(tmp_path / "h", "m") != before
    checkpoints.remove_older()
    assert [path.name for path in (tmp_path / "storage").iterdir()] == ["version-000007"]
    checkpoints.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_checkpoint_before_it_in_place(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, tmp_path, model="m")
    write_checkpoint(checkpoints, 1)
    with (  # noqa: PT012 - the folder is given to the block
        pytest.raises(BridgeError, match=r"No space left on device.*make room"),
        checkpoints.writing(2) as folder,
    ):
        save_tiny_model(folder, seed=2)
        Path("/dev/full").write_text("weights")
    assert newest_version(tmp_path) == 1
    assert [path.name for path in tmp_path.glob("version-*")] == ["version-000001"]


def write_and_die(folder: Path, storage: Path, *, is_second_half_written: bool = False) -> None:
    """A trainer that is killed after its first checkpoint, or while it writes the second."""
    checkpoints = CheckpointFolder(folder, storage, model="m")
    write_checkpoint(checkpoints, 1)
    if is_second_half_written:
        with checkpoints.writing(2) as second:
            (second / "model.safetensors").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.kept.mkdir()
    (checkpoints.kept / "frozen").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_trainer_killed_while_it_writes_leaves_current_whole_and_the_next_removes_the_rest(tmp_path: Path) -> None:
    killed = partial(write_and_die, is_second_half_written=True)
    assert run_forked(killed, tmp_path, tmp_path) == -signal.SIGKILL
    assert (tmp_path / "version-000002").exists()
    assert newest_version(tmp_path) == 1
    write_checkpoint(CheckpointFolder(tmp_path, tmp_path, model="m"), 3)
    assert {path.name for path in tmp_path.glob("version-*")} == {"version-000001", "version-000003"}


def test_a_folder_behind_a_symlink_keeps_its_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    folder = tmp_path / "home" / "h"
    checkpoints = CheckpointFolder(folder, folder, model="m")
    write_checkpoint(checkpoints, 1)
    checkpoints.remove_older()
    assert newest_version(folder) == 1
    checkpoints.close()


def test_a_second_trainer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first = CheckpointFolder(tmp_path / "h", tmp_path / "h", model="m")
    with pytest.raises(BridgeError, match=r"another trainer writes its checkpoints there.*--handover"):
        CheckpointFolder(tmp_path / "h", tmp_path / "h", model="m")
    first.close()
    CheckpointFolder(tmp_path / "h", tmp_path / "h", model="m").close()


def test_other_files_in_the_folder_are_not_removed(tmp_path: Path) -> None:
    for name in ("kept", "version-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").touch()
    checkpoints = CheckpointFolder(tmp_path, tmp_path, model="m")
    write_checkpoint(checkpoints, 1)
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["thesis.txt", "thesis.txt"]


def test_a_trainer_with_other_storage_removes_the_previous_trainers_checkpoints(tmp_path: Path) -> None:
    assert run_forked(write_and_die, tmp_path / "h", tmp_path / "before") == -signal.SIGKILL
    checkpoints = CheckpointFolder(tmp_path / "h", tmp_path / "now", model="m")
    assert newest_version(tmp_path / "h") == 1
    write_checkpoint(checkpoints, 2)
    checkpoints.remove_older()
    assert list((tmp_path / "before").iterdir()) == []
    checkpoints.close()
    assert list(tmp_path.iterdir()) == []


def chosen_storage(folder: Path | str, configured: Path | None = None, **changes: object) -> Path:
    """Where the checkpoints of 1000 bytes go, beside a GPU and without a supervisor unless `changes` say otherwise."""
    settings: dict[str, Any] = {"num_bytes": 1000, "on_gpu": True, "environment": {}, **changes}
    return choose_storage(Path(folder), configured, **settings)


def fill_shared_memory_and_die(shared_memory: Path) -> None:
    """A trainer that is killed and leaves checkpoints of two runs."""
    checkpoint_folder.SHARED_MEMORY = shared_memory
    for name in ("first", "same"):
        checkpoints = CheckpointFolder(shared_memory / name, chosen_storage(f"/x/{name}"), model="m")
        with checkpoints.writing(1) as folder:
            (folder / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_without_a_supervisor_the_next_trainer_removes_a_killed_ones_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_forked(fill_shared_memory_and_die, tmp_path) == -signal.SIGKILL
    assert len(list(tmp_path.glob("grpo-hand-handover-*"))) == 2
    monkeypatch.setattr(checkpoint_folder, "SHARED_MEMORY", tmp_path)
    storage = chosen_storage("/x/same")
    assert list(tmp_path.glob("grpo-hand-handover-*")) == [storage]  # for a server that starts before the next one
    assert list(storage.iterdir()) != []
    living = CheckpointFolder(tmp_path / "same", storage, model="m")
    chosen_storage("/x/other")
    assert storage.exists()
    living.close()
    assert list(tmp_path.glob("grpo-*")) == []


def test_checkpoints_in_shared_memory_are_private_and_never_in_another_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_folder, "SHARED_MEMORY", tmp_path)
    checkpoints = CheckpointFolder(tmp_path / "h", tmp_path / "storage", model="m")
    assert (tmp_path / "storage").stat().st_mode & 0o777 == 0o700
    checkpoints.close()
    (tmp_path / "foreign").symlink_to(tmp_path)
    with pytest.raises(BridgeError, match="owned by another user or no folder"):
        CheckpointFolder(tmp_path / "h", tmp_path / "foreign", model="m")


def test_storage_is_shared_memory_beside_a_gpu_with_room_and_the_folder_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "h"
    monkeypatch.setattr(checkpoint_folder, "SHARED_MEMORY", tmp_path)
    storage = chosen_storage(folder)
    assert storage.parent == tmp_path
    assert storage.name.startswith("grpo-hand-")
    assert chosen_storage(folder) == storage
    assert chosen_storage(folder, environment={"GRPO_TUI_RUN": "r-1"}).name.startswith("grpo-r-1-")
    assert chosen_storage(folder, on_gpu=False) == chosen_storage(folder, num_bytes=1 << 60) == folder
    assert chosen_storage(folder, tmp_path / "x", on_gpu=False).parent == tmp_path / "x"


def test_an_earlier_trainers_checkpoints_count_as_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "SHARED_MEMORY", tmp_path)
    settings = {"num_bytes": 1_000_000, "environment": {"GRPO_TUI_RUN": "r-1"}}
    storage = chosen_storage(tmp_path / "h", **settings)
    storage.mkdir()
    (storage / "model.safetensors").write_bytes(bytes(2_000_000))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    assert chosen_storage(tmp_path / "h", **settings) == storage
    (storage / "model.safetensors").unlink()
    assert chosen_storage(tmp_path / "h", **settings) == tmp_path / "h"


def test_a_checkpoint_of_another_model_or_with_a_file_missing_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = CheckpointFolder(tmp_path, tmp_path, model="m")
    write_checkpoint(checkpoints, 1)
    assert newest_checkpoint(tmp_path, "other") is None
    assert "a checkpoint of m, not of other" in caplog.text
    weights = checkpoints.current() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert newest_version(tmp_path) is None
    assert "not a complete checkpoint" in caplog.text
    weights.unlink()
    assert newest_version(tmp_path) is None
    assert "has 0 tensors of" in caplog.text


# --- servers that come back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "lora_restart"])
def test_the_successor_of_a_crashed_server_serves_the_newest_checkpoint_at_once(
    model_folder: Path, tmp_path: Path, mode: str
) -> None:
    with serving(model_folder, tmp_path, "--handover", str(tmp_path / "run" / "handover")) as server:
        with closing(bridge_to(server, {"mode": mode, "every_steps": 2}, tmp_path)) as bridge:
            model = bridge.attach().model.eval()
            assert_agreement(server.now, model, 0)
            for version in (0, 1, 2):
                bridge.publish(version, shift(model, version))
            assert server.end(signal.SIGKILL) == -signal.SIGKILL
            server.start()
            assert_agreement(server.now, model, 2)
            bridge.publish(3, shift(model, 3))
            _, tokens, values = served_logprobs(server.now)
            assert (model_logprobs(model, PROMPT, tokens) - values).abs().max() > 0.01  # not due before version 4
            bridge.prepare_step()
            with server.now.client as client:
                assert client.get("/bridge/info").json()["update_count"] == 0  # nothing had to be handed over again
            bridge.publish(4, shift(model, 4))
            assert_agreement(server.now, model, 4)
        assert not (tmp_path / "run" / "handover").exists()


def test_a_checkpoint_is_sent_every_few_steps_only(server: Serving, tmp_path: Path) -> None:
    with closing(bridge_to(server, {"mode": "none", "every_steps": 3}, tmp_path)) as bridge:
        model = bridge.attach().model.eval()
        served = []
        for version in range(5):
            bridge.publish(version, shift(model, version))
            served.append(served_logprobs(server.now)[0]["policy_version"])
            bridge.prepare_step()
        assert served == [0, 0, 0, 3, 3]
        assert sorted(path.name for path in (tmp_path / "run" / "handover").iterdir()) == ["current", "version-000003"]
    assert not (tmp_path / "run" / "handover").exists()


def test_the_tensors_that_no_adapter_changes_are_written_once(server: Serving, tmp_path: Path) -> None:
    with closing(bridge_to(server, {"mode": "lora_restart", "every_steps": 1}, tmp_path)) as bridge:
        model = bridge.attach().model.eval()
        seen = []
        for version in (1, 2):
            bridge.publish(version, shift(model, version))
            assert_agreement(server.now, model, version)
            files = (tmp_path / "run" / "handover" / "current").glob("*.safetensors")
            seen.append({path.name: path.stat().st_ino for path in files})
        assert seen[0].keys() == seen[1].keys() == {"frozen-00001.safetensors", "merged.safetensors"}
        assert seen[0]["frozen-00001.safetensors"] == seen[1]["frozen-00001.safetensors"]
        assert seen[0]["merged.safetensors"] != seen[1]["merged.safetensors"]


def test_shared_weights_and_a_checkpoint_folder_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        ServerConfig(model_name="m", shared_weights=True, handover=Path("h"))


# --- a server of the trainer's own -----------------------------------------------------------------------------------


HEALTHY = """
import http.server, os, signal, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
if "ignore-sigterm" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "parent" in sys.argv and os.fork() == 0:
    while True: signal.pause()
print("serving as", os.getpid(), flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""
"""Answers every request with 200; ignores SIGTERM, or has a child, where the arguments say so."""
WITHOUT_PORT = "import signal; signal.pause()"
LATE = """
import os, socket, sys, time
while not os.path.exists(sys.argv[2]): time.sleep(0.01)
socket.create_server(("127.0.0.1", int(sys.argv[1])))
"""
"""Takes its port only once a file is there."""


@pytest.fixture
def port() -> int:
    return free_port()


@contextmanager
def local_server(
    port: int, folder: Path, *words: str, program: str = HEALTHY, **settings: object
) -> Iterator[LocalServer]:
    server = LocalServer(
        [sys.executable, "-I", "-S", "-c", program, str(port), *words],
        url=f"http://127.0.0.1:{port}",
        log=folder / "server.log",
        environment=os.environ,
        **{"patience_s": 60, **settings},  # type: ignore[arg-type]
    )
    with closing(server):
        yield server


@pytest.fixture
def other_server(tmp_path: Path) -> Iterator[LocalServer]:
    """A healthy server of somebody else."""
    with local_server(free_port(), tmp_path / "other") as server:
        server.attach()
        yield server


def group_of(server: LocalServer) -> list[psutil.Process]:
    assert server._process is not None
    leader = psutil.Process(server._process.pid)
    return [leader, *leader.children(recursive=True)]


def test_a_restart_kills_the_whole_process_group_and_no_other_process(
    port: int, tmp_path: Path, other_server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_control, "_GRACE_S", 0.3)
    with local_server(port, tmp_path, "ignore-sigterm", "parent") as server:
        server.attach()
        before = group_of(server)
        assert len(before) == 2
        server.restart()
        assert psutil.wait_procs(before, timeout=60)[1] == []
        after = group_of(server)
    assert psutil.wait_procs(after, timeout=60)[1] == []
    assert not is_listening(f"http://127.0.0.1:{port}")
    assert all(process.is_running() for process in group_of(other_server))


@pytest.mark.parametrize(
    ("program", "settings", "error", "message"),
    [
        (
            "import sys; print('no GPU here'); sys.exit(3)",
            {},
            BridgeError,
            r"ended with exit code 3; its log, .*server.log, ends with:\n  no GPU here",
        ),
        (WITHOUT_PORT, {"patience_s": 0.3}, BridgeError, r"is not healthy after 0.3 s"),
        (WITHOUT_PORT, {"is_stopping": lambda: True}, PeerUnavailable, "training is stopping"),
    ],
    ids=["exits", "times out", "training stops"],
)
def test_a_server_that_does_not_become_healthy_is_an_error(
    port: int, tmp_path: Path, program: str, settings: dict[str, object], error: type[Exception], message: str
) -> None:
    with local_server(port, tmp_path, program=program, **settings) as server, pytest.raises(error, match=message):
        server.attach()


def test_a_port_of_another_process_is_not_taken(tmp_path: Path, other_server: LocalServer) -> None:
    port = int(other_server._url.rpartition(":")[2])
    message = r"in use already \(pid \d+, .*\).*--vllm-port"
    with local_server(port, tmp_path) as server, pytest.raises(BridgeError, match=message):
        server.attach()
    assert is_listening(other_server._url)


def test_a_process_that_takes_the_port_during_a_start_is_not_mistaken_for_the_server(port: int, tmp_path: Path) -> None:
    gate = tmp_path / "go"
    with (
        local_server(port, tmp_path, str(gate), program=LATE) as late,
        local_server(port, tmp_path / "other") as other,
    ):
        late._start()
        other.attach()
        gate.touch()
        message = r"(?s)another process answers at .* \(pid \d+, .*\); its log.*\n.*in use"
        with pytest.raises(BridgeError, match=message):
            late._wait_healthy()
        late.close()
        assert is_listening(f"http://127.0.0.1:{port}")


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=64, tie_word_embeddings=True, num_hidden_layers=1))
    with closing(make_bridge({"mode": "lora_restart"}, tmp_path, "http://127.0.0.1:9", tmp_path)) as bridge:
        placement = bridge._placement
        placement._model = add_lora(model, LoraSettings(target_modules=("q_proj",)))
        merged = sum(weight.nbytes for _, weight in merged_weights(placement._model))
        bare = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
        assert placement.max_bytes() >= bare + merged


def test_a_server_that_exits_is_restarted_if_it_had_been_healthy(port: int, tmp_path: Path) -> None:
    with local_server(port, tmp_path) as server:
        server.attach()
        (first,) = group_of(server)
        first.kill()
        until(lambda: not is_listening(server._url))
        while group_of(server) == [first]:
            server.restart_if_exited()
        until(lambda: is_listening(server._url))
        server.restart_if_exited()
    with local_server(port, tmp_path, program="raise SystemExit(5)") as fails:
        fails._start()
        with pytest.raises(BridgeError, match="exit code 5"):
            until(lambda: fails.restart_if_exited() is not None)  # type: ignore[func-returns-value]


def start_server_and_die(port: int, folder: Path) -> None:
    with local_server(port, folder) as server:
        server.attach()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_trainer_leaves_no_server(port: int, tmp_path: Path) -> None:
    assert run_forked(start_server_and_die, port, tmp_path) == -signal.SIGKILL
    pid = int((tmp_path / "server.log").read_text().split()[-1])
    until(lambda: not psutil.pid_exists(pid))
    assert not is_listening(f"http://127.0.0.1:{port}")


@pytest.mark.extended("test_bridge_restart, under the supervisor")
def test_a_trainer_without_supervisor_owns_its_server_and_requests_wait_while_it_restarts(
    port: int, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPO_TUI_RUN_FOLDER", raising=False)
    monkeypatch.setenv("PYTHONPATH", python_path())
    config = tmp_path / "server.toml"
    config.write_text('engine = "torch"\ndevice = "cpu"\nthreads = 1\ndtype = "float32"\nmax_model_len = 256\n')
    url = f"http://127.0.0.1:{port}"
    settings = {"mode": "lora_restart", "restart": True, "server_config": config, "every_steps": 1}
    flags = ("--model-name", str(model_folder), "--port", str(port))
    with closing(make_bridge(settings, model_folder, url, tmp_path, server_flags=flags)) as bridge:
        model = bridge.attach().model.eval()
        server = OtherServer(url)
        bridge.publish(0, shift(model, 0))  # in place: the server has just started
        assert_agreement(server, model, 0)
        first = server.instance()
        requests = RepeatedRequests(url)
        bridge.publish(1, shift(model, 1))
        assert server.instance() != first
        assert_agreement(server, model, 1)
        assert {0, 1} <= requests.stop()
        second = server.instance()
        process = bridge._control._process  # type: ignore[union-attr]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its port is closed a little before it has ended
        bridge.poll_server()
        bridge.prepare_step()
        assert server.instance() not in (first, second)
        assert_agreement(server, model, 1)
    assert not is_listening(url)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["server.log"]


class OtherServer(RunningServer):
    """A server that this test has not started."""

    def __init__(self, url: str) -> None:
        self.url = url

    def instance(self) -> str:
        with self.client as client:
            return str(client.get("/bridge/info").json()["instance"])


class RepeatedRequests:
    """Requests completions again and again, as an environment does; each must be answered."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._versions: set[int] = set()
        self._is_over = threading.Event()
        self._has_asked = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()))
        self._thread.start()
        self._has_asked.wait()

    def stop(self) -> set[int]:
        """The versions that answered, one request after this call included."""
        self._is_over.set()
        self._thread.join()
        return self._versions

    async def _ask(self) -> None:
        request = GenerateRequest(prompt=TokenPrompt(prompt_token_ids=PROMPT), max_tokens=4, logprobs=0)
        async with httpx.AsyncClient(base_url=self._url, trust_env=False) as http:
            server = InferenceServers([http], timeout_s=60)
            is_last = False
            while not is_last:
                is_last = self._is_over.is_set()
                answer = await server.generate(request)
                self._versions |= {version for row in answer.policy_versions or [] for version in row}
                self._has_asked.set()
