"""Checkpoint updates: atomic, and loaded by every server that starts or is restarted."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from bridging import PROMPT, assert_agreement, make_bridge, served_logprobs
from serving import RunningServer, free_port, model_logprobs, python_path, running_server, save_tiny_model, shift
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_engine.bridges.transport import checkpoint_folder, server_control
from grpo_engine.bridges.transport.checkpoint_folder import CheckpointFolder, choose_storage, newest_checkpoint
from grpo_engine.bridges.transport.server_control import LocalServer, is_listening
from grpo_engine.environments.clients import InferenceServer
from grpo_engine.errors import BridgeError, PeerUnavailable
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora
from grpo_engine.models.merged_lora import merged_weights
from grpo_engine.server.config import ServerConfig
from grpo_engine.wire.inference import GenerateRequest, TokenPrompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other processes bring about; the limit is the test's own."""
    while not condition():
        time.sleep(0.02)


# --- the folder --------------------------------------------------------------------------------------------------


def write_checkpoint(checkpoints: CheckpointFolder, version: int, seed: int) -> None:
    with checkpoints.writing(version) as folder:
        save_tiny_model(folder, seed=seed)


def test_current_is_the_newest_checkpoint_and_two_is_the_most_there_ever_are(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "h", tmp_path / "storage", model="m")
    assert newest_checkpoint(tmp_path / "h", "m") is None
    for version in (1, 4, 4, 7):
        with checkpoints.writing(version) as folder:
            save_tiny_model(folder, seed=version)
            before = newest_checkpoint(tmp_path / "h", "m")
            assert len(list((tmp_path / "storage").glob("version-*"))) == (1 if before is None else 2)
        newest = newest_checkpoint(tmp_path / "h", "m")
        assert newest is not None
        assert newest.policy_version == version
        assert newest != before
    checkpoints.remove_older()
    assert [path.name for path in (tmp_path / "storage").iterdir()] == ["version-000007"]
    checkpoints.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_checkpoint_before_it_in_place(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, tmp_path, model="m")
    write_checkpoint(checkpoints, 1, seed=1)
    with (  # noqa: PT012 - the folder is given to the block
        pytest.raises(BridgeError, match=r"No space left on device.*make room"),
        checkpoints.writing(2) as folder,
    ):
        save_tiny_model(folder, seed=2)
        Path("/dev/full").write_text("weights")
    newest = newest_checkpoint(tmp_path, "m")
    assert newest is not None
    assert newest.policy_version == 1
    assert [path.name for path in tmp_path.glob("version-*")] == ["version-000001"]


def test_a_trainer_that_is_killed_while_it_writes_leaves_current_whole_and_the_next_clears_up(tmp_path: Path) -> None:
    killed_trainer(
        "checkpoints = CheckpointFolder(folder, folder, model='m')\n"
        "with checkpoints.writing(1) as path: save_file({'a': np.zeros(9)}, path / 'model.safetensors')\n"
        "with checkpoints.writing(2) as p: (p / 'model.safetensors').write_bytes(b'half'); os.kill(os.getpid(), 9)",
        tmp_path,
    )
    assert (tmp_path / "version-000002").exists()
    newest = newest_checkpoint(tmp_path, "m")
    assert newest is not None
    assert newest.policy_version == 1
    write_checkpoint(CheckpointFolder(tmp_path, tmp_path, model="m"), 3, seed=3)
    assert {path.name for path in tmp_path.glob("version-*")} == {"version-000001", "version-000003"}


def killed_trainer(code: str, folder: Path) -> None:
    """Run code that kills itself; it has `folder`, `module`, `CheckpointFolder`, `save_file`, `np`, and `os`."""
    prelude = (
        "import os, sys; import numpy as np; from pathlib import Path; from safetensors.numpy import save_file\n"
        "from grpo_engine.bridges.transport import checkpoint_folder as module\n"
        "from grpo_engine.bridges.transport.checkpoint_folder import CheckpointFolder\n"
        "folder = Path(sys.argv[1])\n"
    )
    environment = {**os.environ, "PYTHONPATH": python_path()}
    killed = subprocess.run([sys.executable, "-c", prelude + code, str(folder)], check=False, env=environment)
    assert killed.returncode == -signal.SIGKILL


def test_a_folder_behind_a_symlink_keeps_its_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    folder = tmp_path / "home" / "h"
    checkpoints = CheckpointFolder(folder, folder, model="m")
    write_checkpoint(checkpoints, 1, seed=1)
    checkpoints.remove_older()
    newest = newest_checkpoint(folder, "m")
    assert newest is not None
    assert newest.policy_version == 1
    checkpoints.close()


def test_a_second_trainer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first = CheckpointFolder(tmp_path / "h", tmp_path / "h", model="m")
    write_checkpoint(first, 1, seed=1)
    with pytest.raises(BridgeError, match=r"another trainer writes its checkpoints there.*--handover"):
        CheckpointFolder(tmp_path / "h", tmp_path / "h", model="m")
    first.close()
    CheckpointFolder(tmp_path / "h", tmp_path / "h", model="m").close()


def test_other_files_in_the_folder_are_not_removed(tmp_path: Path) -> None:
    for name in ("kept", "version-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").touch()
    checkpoints = CheckpointFolder(tmp_path, tmp_path, model="m")
    write_checkpoint(checkpoints, 1, seed=1)
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["thesis.txt", "thesis.txt"]


def test_a_trainer_with_other_storage_removes_the_previous_trainers_checkpoints(tmp_path: Path) -> None:
    killed_trainer(
        "checkpoints = CheckpointFolder(folder / 'h', folder / 'before', model='m')\n"
        "with checkpoints.writing(1) as path: save_file({'a': np.zeros(9)}, path / 'model.safetensors')\n"
        "checkpoints.kept.mkdir(); (checkpoints.kept / 'frozen').touch(); os.kill(os.getpid(), 9)",
        tmp_path,
    )
    checkpoints = CheckpointFolder(tmp_path / "h", tmp_path / "now", model="m")
    assert newest_checkpoint(tmp_path / "h", "m") is not None
    write_checkpoint(checkpoints, 2, seed=2)
    checkpoints.remove_older()
    assert list((tmp_path / "before").iterdir()) == []
    checkpoints.close()
    assert list(tmp_path.iterdir()) == []


def test_without_a_supervisor_the_next_trainer_removes_a_killed_ones_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_trainer(
        "module.SHARED_MEMORY = folder\n"
        "def choose(name): return module.choose_storage(Path(name), None, num_bytes=9, on_gpu=True, environment={})\n"
        "for name in ('/x/first', '/x/same'):\n"
        "    checkpoints = CheckpointFolder(folder / name[3:], choose(name), model='m')\n"
        "    with checkpoints.writing(1) as path: (path / 'half').touch()\n"
        "os.kill(os.getpid(), 9)",
        tmp_path,
    )
    assert len(list(tmp_path.glob("grpo-hand-handover-*"))) == 2
    monkeypatch.setattr(checkpoint_folder, "SHARED_MEMORY", tmp_path)

    def choose(name: str) -> Path:
        return choose_storage(Path(name), None, num_bytes=9, on_gpu=True, environment={})

    storage = choose("/x/same")
    assert list(tmp_path.glob("grpo-hand-handover-*")) == [storage]  # for a server that starts before the next one
    assert list(storage.iterdir()) != []
    living = CheckpointFolder(tmp_path / "same", storage, model="m")
    choose("/x/other")
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


def test_an_earlier_trainers_checkpoints_count_as_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose() -> Path:
        return choose_storage(
            tmp_path / "h", None, num_bytes=1_000_000, on_gpu=True, environment={"GRPO_TUI_RUN": "r-1"}
        )

    monkeypatch.setattr(checkpoint_folder, "SHARED_MEMORY", tmp_path)
    storage = choose()
    storage.mkdir()
    (storage / "model.safetensors").write_bytes(bytes(2_000_000))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    assert choose() == storage
    (storage / "model.safetensors").unlink()
    assert choose() == tmp_path / "h"


def test_a_checkpoint_of_another_model_or_with_a_file_missing_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = CheckpointFolder(tmp_path, tmp_path, model="m")
    write_checkpoint(checkpoints, 1, seed=1)
    assert newest_checkpoint(tmp_path, "other") is None
    assert "a checkpoint of m, not of other" in caplog.text
    weights = checkpoints.current() / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    assert newest_checkpoint(tmp_path, "m") is None
    assert "not a complete checkpoint" in caplog.text
    weights.unlink()
    assert newest_checkpoint(tmp_path, "m") is None
    assert "has 0 tensors of" in caplog.text


def test_storage_is_shared_memory_beside_a_gpu_with_room_and_the_folder_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(**changes: object) -> Path:
        how = {"num_bytes": 1000, "on_gpu": True, "environment": {}, **changes}
        configured = how.pop("configured", None)
        return choose_storage(tmp_path / "h", configured, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint_folder, "SHARED_MEMORY", tmp_path)
    assert choose().parent == tmp_path
    assert choose().name.startswith("grpo-hand-")
    assert choose() == choose()
    assert choose(environment={"GRPO_TUI_RUN": "r-1"}).name.startswith("grpo-r-1-")
    assert choose(on_gpu=False) == choose(num_bytes=1 << 60) == tmp_path / "h"
    assert choose(configured=tmp_path / "x", on_gpu=False).parent == tmp_path / "x"


# --- servers that come back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "lora_restart"])
def test_the_successor_of_a_crashed_server_serves_the_newest_checkpoint_at_once(
    model_folder: Path, tmp_path: Path, mode: str
) -> None:
    flags = ("--handover", str(tmp_path / "run" / "handover"))
    port = free_port()
    with running_server(model_folder, *flags, folder=tmp_path, port=port) as server:
        bridge = make_bridge({"mode": mode, "every_steps": 2}, model_folder, server.url, tmp_path)
        model = bridge.attach().model.eval()
        assert_agreement(server, model, 0)
        for version in (0, 1, 2):
            bridge.publish(version, shift(model, version))
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    with running_server(model_folder, *flags, folder=tmp_path, port=port) as again:
        assert_agreement(again, model, 2)
        bridge.publish(3, shift(model, 3))
        _, tokens, values = served_logprobs(again)
        assert (model_logprobs(model, PROMPT, tokens) - values).abs().max() > 0.01  # not due before version 4
        bridge.ensure_current()
        with again.client as client:
            assert client.get("/bridge/info").json()["update_count"] == 0  # nothing had to be handed over again
        bridge.publish(4, shift(model, 4))
        assert_agreement(again, model, 4)
        bridge.close()
    assert not (tmp_path / "run" / "handover").exists()


def test_the_tensors_that_no_adapter_changes_are_written_once(model_folder: Path, tmp_path: Path) -> None:
    with running_server(model_folder, folder=tmp_path) as server:
        bridge = make_bridge({"mode": "lora_restart", "every_steps": 1}, model_folder, server.url, tmp_path)
        model = bridge.attach().model.eval()
        current, seen = tmp_path / "run" / "handover" / "current", []
        for version in (1, 2):
            bridge.publish(version, shift(model, version))
            assert_agreement(server, model, version)
            seen.append({path.name: path.stat().st_ino for path in current.glob("*.safetensors")})
        assert seen[0].keys() == seen[1].keys() == {"frozen-00001.safetensors", "merged.safetensors"}
        assert seen[0]["frozen-00001.safetensors"] == seen[1]["frozen-00001.safetensors"]
        assert seen[0]["merged.safetensors"] != seen[1]["merged.safetensors"]
        bridge.close()


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
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "parent" in sys.argv and os.fork() == 0:
    while True: signal.pause()
print("serving as", os.getpid(), flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""
"""Answers every request with 200; deaf to SIGTERM, or with a child, where that is said."""
LATE = """
import os, socket, sys, time
while not os.path.exists(sys.argv[2]): time.sleep(0.01)
socket.create_server(("127.0.0.1", int(sys.argv[1])))
"""
"""Takes its port only once a file is there."""


def local_server(port: int, folder: Path, *words: str, program: str = HEALTHY, **settings: object) -> LocalServer:
    return LocalServer(
        [sys.executable, "-I", "-S", "-c", program, str(port), *words],
        url=f"http://127.0.0.1:{port}",
        log=folder / "server.log",
        environment=os.environ,
        **{"patience_s": 60, **settings},  # type: ignore[arg-type]
    )


def group_of(server: LocalServer) -> list[psutil.Process]:
    assert server._process is not None
    leader = psutil.Process(server._process.pid)
    return [leader, *leader.children(recursive=True)]


def test_a_restart_kills_the_whole_process_group_and_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_control, "_GRACE_S", 0.3)
    port, other_port = free_port(), free_port()
    other_server = local_server(other_port, tmp_path / "other")
    other_server.attach()
    server = local_server(port, tmp_path, "deaf", "parent")
    server.attach()
    before = group_of(server)
    assert len(before) == 2
    server.restart()
    assert psutil.wait_procs(before, timeout=10)[1] == []
    after = group_of(server)
    server.close()
    assert psutil.wait_procs(after, timeout=10)[1] == []
    assert not is_listening(f"http://127.0.0.1:{port}")
    assert all(process.is_running() for process in group_of(other_server))
    other_server.close()


def test_a_server_that_does_not_become_healthy_is_reported_with_its_last_log_lines(tmp_path: Path) -> None:
    server = local_server(free_port(), tmp_path, program="import sys; print('no GPU here'); sys.exit(3)")
    with pytest.raises(BridgeError, match=r"ended with exit code 3; its log, .*server.log, ends with:\n  no GPU here"):
        server.attach()
    server.close()
    mute = local_server(free_port(), tmp_path, program="import signal; signal.pause()", patience_s=0.3)
    with pytest.raises(BridgeError, match=r"is not healthy after 0.3 s"):
        mute.attach()
    mute.close()


def test_a_port_of_another_process_is_not_taken(tmp_path: Path) -> None:
    port = free_port()
    other_server = local_server(port, tmp_path)
    other_server.attach()
    with pytest.raises(BridgeError, match=r"in use already \(pid \d+, .*\).*--vllm-port"):
        local_server(port, tmp_path).attach()
    assert is_listening(f"http://127.0.0.1:{port}")
    other_server.close()


def test_a_process_that_takes_the_port_during_a_start_is_not_mistaken_for_the_server(tmp_path: Path) -> None:
    port = free_port()
    gate = tmp_path / "go"
    late = local_server(port, tmp_path, str(gate), program=LATE)
    late._start()
    other_server = local_server(port, tmp_path / "other")
    other_server.attach()
    gate.touch()
    with pytest.raises(BridgeError, match=r"(?s)another process answers at .* \(pid \d+, .*\); its log.*\n.*in use"):
        late._wait_healthy()
    late.close()
    assert is_listening(f"http://127.0.0.1:{port}")
    other_server.close()


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    bridge = make_bridge({"mode": "lora_restart"}, tmp_path, "http://127.0.0.1:9", tmp_path)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=64, tie_word_embeddings=True, num_hidden_layers=1))
    placement = bridge._placement
    placement._model = add_lora(model, LoraSettings(target_modules=("q_proj",)))
    merged = sum(weight.nbytes for _, weight in merged_weights(placement._model))
    bare = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    assert placement.max_bytes() >= bare + merged
    bridge.close()


def test_a_server_that_exits_is_restarted_if_it_had_been_healthy(tmp_path: Path) -> None:
    port = free_port()
    server = local_server(port, tmp_path)
    server.attach()
    (first,) = group_of(server)
    first.kill()
    until(lambda: not is_listening(f"http://127.0.0.1:{port}"))
    while group_of(server) == [first]:
        server.restart_if_exited()
    until(lambda: is_listening(f"http://127.0.0.1:{port}"))
    server.restart_if_exited()
    server.close()
    fails = local_server(port, tmp_path, program="raise SystemExit(5)")
    fails._start()
    with pytest.raises(BridgeError, match="exit code 5"):
        until(lambda: fails.restart_if_exited() is not None)  # type: ignore[func-returns-value]
    fails.close()


def test_a_wait_for_a_server_ends_when_training_is_to_stop(tmp_path: Path) -> None:
    mute = local_server(
        free_port(), tmp_path, program="import signal; signal.pause()", is_stopping=(tmp_path / "stop").exists
    )
    (tmp_path / "stop").touch()
    with pytest.raises(PeerUnavailable, match="training is stopping"):
        mute.attach()
    mute.close()


def test_a_killed_trainer_leaves_no_server(tmp_path: Path) -> None:
    port = free_port()
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from grpo_engine.bridges.transport.server_control import LocalServer\n"
        "port, folder, *argv = sys.argv[1:]\n"
        "server = LocalServer(argv, url=f'http://127.0.0.1:{port}', log=Path(folder, 'server.log'), "
        "environment=os.environ, patience_s=60)\n"
        "server.attach(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    argv = [sys.executable, "-I", "-S", "-c", HEALTHY, str(port)]
    killed = subprocess.run(
        [sys.executable, "-c", code, str(port), str(tmp_path), *argv],
        check=False,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert killed.returncode == -signal.SIGKILL
    pid = int((tmp_path / "server.log").read_text().split()[-1])
    until(lambda: not psutil.pid_exists(pid))
    assert not is_listening(f"http://127.0.0.1:{port}")


@pytest.fixture
def own_server_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Settings of a bridge whose trainer starts the server itself, as a torch engine on this CPU."""
    monkeypatch.delenv("GRPO_TUI_RUN_FOLDER", raising=False)
    monkeypatch.setenv("PYTHONPATH", python_path())
    config = tmp_path / "server.toml"
    config.write_text('engine = "torch"\ndevice = "cpu"\nthreads = 1\ndtype = "float32"\nmax_model_len = 256\n')
    return {"restart": True, "server_config": config, "every_steps": 1}


def test_a_trainer_without_supervisor_owns_its_server_and_requests_wait_while_it_restarts(
    model_folder: Path, tmp_path: Path, own_server_settings: dict[str, object]
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = {"mode": "lora_restart", **own_server_settings}
    flags = ("--model-name", str(model_folder), "--port", str(port))
    bridge = make_bridge(settings, model_folder, url, tmp_path, server_flags=flags)
    try:
        model = bridge.attach().model.eval()
        server = Reached(url)
        bridge.publish(0, shift(model, 0))  # in place: the server has just started
        assert_agreement(server, model, 0)
        first = server.instance()
        versions = Asking(url)
        bridge.publish(1, shift(model, 1))
        assert server.instance() != first
        assert_agreement(server, model, 1)
        assert {0, 1} <= versions.stop()
        second = server.instance()
        process = bridge._control._process  # type: ignore[union-attr]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its port is closed a little before it has ended
        bridge.poll_server()
        bridge.ensure_current()
        assert server.instance() not in (first, second)
        assert_agreement(server, model, 1)
    finally:
        bridge.close()
    assert not is_listening(url)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["server.log"]


class Reached(RunningServer):
    """A server that the trainer has not started."""

    def __init__(self, url: str) -> None:
        self.url = url

    def instance(self) -> str:
        with self.client as client:
            return str(client.get("/bridge/info").json()["instance"])


class Asking:
    """Asks a server for completions again and again, as an environment does; each must be answered."""

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
            server = InferenceServer(http, timeout_s=60)
            is_last = False
            while not is_last:
                is_last = self._is_over.is_set()
                answer = await server.generate(request)
                self._versions |= {version for row in answer.policy_versions or [] for version in row}
                self._has_asked.set()
