"""A standby and the servers that it forks: real processes, with the torch engine."""

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

from grpo_engine.server.remembered import remember_cache_bytes, remembered_cache_bytes
from grpo_engine.server.standby import has_cuda, why_unforkable
from grpo_engine.wire.standby import NOTHING_LEFT_LINE, RESTART_SIGNAL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("standby") / "model", seed=1)


@contextmanager
def standing_by(model: Path, folder: Path, **environment: str) -> Iterator[RunningServer]:
    """A standby whose first server need not be healthy yet; killed at the end, if it lives."""
    port, log = free_port(), folder / "server.log"
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
            env={**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", **environment},
            start_new_session=True,  # as a keeper does: no terminal whose hang-up this could be
        )
    try:
        yield RunningServer(process, f"http://127.0.0.1:{port}", log)
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other processes bring about; the limit is the test's own."""
    while not condition():
        time.sleep(0.02)


def serving_process(server: RunningServer) -> psutil.Process:
    """The server, which is the standby's only child."""
    (child,) = psutil.Process(server.process.pid).children()
    return child


def instance_of(server: RunningServer) -> str | None:
    """Which start of the server answers; None while none does."""
    with suppress(httpx.TransportError), server.client as client:
        answer = client.get("/bridge/info")
        return str(answer.json()["instance"]) if answer.status_code == 200 else None
    return None


def num_restarts(server: RunningServer) -> int:
    return server.log.read_text(errors="replace").count(NOTHING_LEFT_LINE)


def test_a_restart_serves_from_another_process_of_the_same_parent_and_the_end_is_told(
    model: Path, tmp_path: Path
) -> None:
    with standing_by(model, tmp_path) as server:
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
    with standing_by(model, tmp_path) as server:
        until(lambda: _handles(server.process.pid, RESTART_SIGNAL))
        server.process.send_signal(RESTART_SIGNAL)  # while it imports: what is asked for is under way
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


def test_a_killed_standby_takes_its_server_along(model: Path, tmp_path: Path) -> None:
    with standing_by(model, tmp_path) as server:
        wait_healthy(server)
        child = serving_process(server)
        server.process.kill()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        assert instance_of(server) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_server_that_dies_of_a_signal_ends_its_standby_by_the_same(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with standing_by(model, tmp_path) as server:
        wait_healthy(server)
        serving_process(server).send_signal(number)
        assert server.process.wait(30) == -number


def test_a_model_that_is_not_there_ends_the_standby_before_it_serves(tmp_path: Path) -> None:
    with standing_by(tmp_path / "nothing", tmp_path) as server:
        assert server.process.wait(60) == 1
        assert "neither a folder that exists" in server.log.read_text(errors="replace")


def test_a_standby_with_a_thread_starts_its_server_as_a_program(model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if '--no-standby' not in sys.argv: threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
    )
    path = os.pathsep.join([str(tmp_path), python_path()])
    with standing_by(model, tmp_path, PYTHONPATH=path) as server:
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


def test_the_size_of_the_cache_that_a_server_measured_is_known_to_the_next_one() -> None:
    assert remembered_cache_bytes() is None
    pid = os.fork()
    if pid == 0:
        remember_cache_bytes(1 << 40)
        os._exit(0)
    os.waitpid(pid, 0)
    assert remembered_cache_bytes() == 1 << 40
    remember_cache_bytes(0)


def test_a_process_with_one_thread_can_be_forked_and_one_with_two_says_which_is_in_the_way() -> None:
    code = (
        "import threading, time; from grpo_engine.server.standby import why_unforkable; print(why_unforkable());"
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); print(why_unforkable())"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    alone, crowded = told.stdout.splitlines()
    assert alone == "None"
    assert "1 threads behind" in crowded


@pytest.mark.parametrize(
    ("name", "is_safe"),
    [("cuda00001800007", True), ("cuda0000c100007", True), ("jemalloc_bg_thd", True), ("cuda-EvtHandlr", False)],
)
def test_a_thread_of_nvml_or_jemalloc_is_no_obstacle_to_a_fork(name: str, is_safe: bool) -> None:
    """On GPU machines each server used to be started as a program, because NVML had left its thread."""
    code = (
        "import ctypes, threading, time; from grpo_engine.server.standby import why_unforkable\n"
        "named = threading.Event()\n"
        f"def stay(): ctypes.CDLL(None).prctl(15, {name.encode()!r}); named.set(); time.sleep(60)\n"
        "threading.Thread(target=stay, daemon=True).start(); named.wait(); print(why_unforkable())"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ("None" in told.stdout) == is_safe


class Driver:
    """As much of CUDA's library as is asked."""

    def __init__(self, answer: int) -> None:
        self._answer = answer

    def cuDeviceGetCount(self, _count: object) -> int:
        return self._answer


@pytest.mark.parametrize(
    ("driver", "is_initialised"), [(None, False), (Driver(3), False), (Driver(0), True), (Driver(100), True)]
)
def test_cuda_s_own_library_says_whether_it_was_initialised(driver: Any, is_initialised: bool) -> None:
    """NVML has /dev/nvidia-uvm open too, so that the open file tells nothing."""
    assert has_cuda(driver) == is_initialised
    assert why_unforkable() is None or "behind" in str(why_unforkable())


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
