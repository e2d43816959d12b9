"""A fork server and the inference servers that it forks: real processes, with the torch engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serving import RunningServer, free_port, python_path, save_tiny_model, wait_healthy

from grpo_engine.server.fork_server import has_cuda, why_unforkable
from grpo_engine.server.vllm.arguments import store_cache_bytes, stored_cache_bytes
from grpo_engine.wire.environment_variables import RESTARTS_VARIABLE
from grpo_engine.wire.fork_server import RESTART_SIGNAL, Restarts

RESTARTS = "restarts.json"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("fork") / "model", seed=1)


@contextmanager
def fork_server(model: Path, folder: Path, **environment: str) -> Iterator[RunningServer]:
    """A fork server whose first inference server need not be healthy yet; killed at the end, if it runs."""
    port, log = free_port(), folder / "server.log"
    restarts = {RESTARTS_VARIABLE: str(folder / RESTARTS)}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "grpo_engine", "server", "--engine", "torch", "--standby", "--device", "cpu"),
                *("--model-name", str(model), "--dtype", "float32", "--port", str(port), "--threads", "1"),
                *("--max-model-len", "64"),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", **restarts, **environment},
            start_new_session=True,  # as a keeper does, so that SIGHUP is not taken for a lost terminal
        )
    try:
        yield RunningServer(process, f"http://127.0.0.1:{port}", log)
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that other processes make true; the limit is the test's timeout."""
    while not condition():
        time.sleep(0.02)


def serving_process(server: RunningServer) -> psutil.Process:
    """The inference server, which is the fork server's only child."""
    (child,) = psutil.Process(server.process.pid).children()
    return child


def instance_of(server: RunningServer) -> str | None:
    """The id of the start of the server that answers; None while none does."""
    with suppress(httpx.TransportError), server.client as client:
        answer = client.get("/bridge/info")
        return str(answer.json()["instance"]) if answer.status_code == 200 else None
    return None


def num_restarts(server: RunningServer) -> int:
    """How many restarts the fork server has counted."""
    try:
        restarts = Restarts.model_validate_json((server.log.parent / RESTARTS).read_bytes())
    except FileNotFoundError:
        return 0
    assert restarts.pid == server.process.pid
    return restarts.num_restarts


def test_a_restart_serves_from_another_process_of_the_same_parent_and_is_counted(model: Path, tmp_path: Path) -> None:
    with fork_server(model, tmp_path) as server:
        wait_healthy(server)
        before, first = instance_of(server), serving_process(server)
        server.process.send_signal(RESTART_SIGNAL)
        until(lambda: instance_of(server) not in (None, before))
        after = serving_process(server)
        assert after.pid != first.pid
        assert not first.is_running()
        assert num_restarts(server) == 1
        assert server.generate(prompt="abc", max_tokens=4, ignore_eos=True)["finish_reasons"] == ["length"]
        assert server.stop(signal.SIGTERM) == 0
        assert not after.is_running()


def test_a_restart_asked_for_twice_and_while_it_imports_ends_in_one_healthy_server(model: Path, tmp_path: Path) -> None:
    with fork_server(model, tmp_path) as server:
        until(lambda: _handles(server.process.pid, RESTART_SIGNAL))
        server.process.send_signal(RESTART_SIGNAL)  # while it imports
        until(lambda: num_restarts(server) == 1)
        wait_healthy(server)
        for _ in range(2):
            server.process.send_signal(RESTART_SIGNAL)
        until(lambda: num_restarts(server) >= 2)
        wait_healthy(server)
        assert len(psutil.Process(server.process.pid).children()) == 1
        server.process.send_signal(RESTART_SIGNAL)
        server.process.send_signal(signal.SIGTERM)  # in the middle of it
        server.process.wait(30)
        assert instance_of(server) is None


def test_a_killed_fork_server_takes_its_server_along(model: Path, tmp_path: Path) -> None:
    with fork_server(model, tmp_path) as server:
        wait_healthy(server)
        child = serving_process(server)
        server.process.kill()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        assert instance_of(server) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_server_killed_by_a_signal_ends_its_fork_server_by_the_same_signal(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with fork_server(model, tmp_path) as server:
        wait_healthy(server)
        serving_process(server).send_signal(number)
        assert server.process.wait(30) == -number


def test_a_missing_model_ends_the_fork_server_before_it_serves(tmp_path: Path) -> None:
    with fork_server(tmp_path / "nothing", tmp_path) as server:
        assert server.process.wait(60) == 1
        assert "neither a folder that exists" in server.log.read_text(errors="replace")


def test_a_fork_server_with_a_thread_starts_its_server_as_a_program(model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if '--no-standby' not in sys.argv: threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
    )
    path = os.pathsep.join([str(tmp_path), python_path()])
    with fork_server(model, tmp_path, PYTHONPATH=path) as server:
        wait_healthy(server)
        assert "threads behind" in server.log.read_text(errors="replace")
        first = serving_process(server)
        assert "--no-standby" in first.cmdline()
        server.process.send_signal(RESTART_SIGNAL)
        until(lambda: num_restarts(server) == 1)
        wait_healthy(server)
        assert serving_process(server).pid != first.pid
        child = serving_process(server)
        server.process.kill()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_the_cache_size_that_a_server_measured_is_stored_for_the_next_one() -> None:
    assert stored_cache_bytes() is None
    pid = os.fork()
    if pid == 0:
        store_cache_bytes(1 << 40)
        os._exit(0)
    os.waitpid(pid, 0)
    assert stored_cache_bytes() == 1 << 40
    store_cache_bytes(0)


def test_a_process_with_one_thread_can_be_forked_and_one_with_two_names_the_other() -> None:
    code = (
        "import threading, time; from grpo_engine.server.fork_server import why_unforkable; print(why_unforkable());"
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); print(why_unforkable())"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    alone, crowded = done.stdout.splitlines()
    assert alone == "None"
    assert "1 threads behind" in crowded


@pytest.mark.parametrize(
    ("name", "is_safe"),
    [("cuda00001800007", True), ("cuda0000c100007", True), ("jemalloc_bg_thd", True), ("cuda-EvtHandlr", False)],
)
def test_a_thread_of_nvml_or_jemalloc_does_not_prevent_a_fork(name: str, is_safe: bool) -> None:
    """On GPU machines each server used to be started as a program, because NVML had left its thread."""
    code = (
        "import ctypes, threading, time; from grpo_engine.server.fork_server import why_unforkable\n"
        "named = threading.Event()\n"
        f"def stay(): ctypes.CDLL(None).prctl(15, {name.encode()!r}); named.set(); time.sleep(60)\n"
        "threading.Thread(target=stay, daemon=True).start(); named.wait(); print(why_unforkable())"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ("None" in done.stdout) == is_safe


class Driver:
    """The one function of the CUDA driver that is called."""

    def __init__(self, answer: int) -> None:
        self._answer = answer

    def cuDeviceGetCount(self, _count: object) -> int:
        return self._answer


@pytest.mark.parametrize(
    ("driver", "is_initialised"), [(None, False), (Driver(3), False), (Driver(0), True), (Driver(100), True)]
)
def test_the_cuda_driver_reports_whether_it_was_initialised(driver: Any, is_initialised: bool) -> None:
    """NVML opens /dev/nvidia-uvm too, so the open file is no sign of CUDA."""
    assert has_cuda(driver) == is_initialised
    assert why_unforkable() is None or "behind" in str(why_unforkable())


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has installed a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
