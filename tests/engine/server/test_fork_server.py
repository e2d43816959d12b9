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
from forked import Forked
from serving import RunningServer, free_port, python_path, wait_healthy

from grpo_engine.forking import has_cuda, why_unforkable
from grpo_engine.processes import running
from grpo_engine.server.vllm.arguments import store_cache_bytes, stored_cache_bytes
from grpo_engine.wire.environment_variables import RESTARTS_VARIABLE
from grpo_engine.wire.fork_server import RESTART_SIGNAL, Restarts

RESTARTS = "restarts.json"
pytestmark = pytest.mark.slow


@contextmanager
def fork_server(model: Path, folder: Path, *, is_program: bool = False, **environment: str) -> Iterator[RunningServer]:
    """A fork server whose first inference server need not be healthy yet; killed at the end, if it runs.

    Args:
        is_program: starts it by its command line, with all imports; otherwise it is forked with its imports done.
    """
    port, log = free_port(), folder / "server.log"
    words = [
        *("server", "--engine", "torch", "--standby", "--device", "cpu", "--threads", "1", "--max-model-len", "64"),
        *("--model-name", str(model), "--dtype", "float32", "--port", str(port)),
    ]
    variables = {**os.environ, RESTARTS_VARIABLE: str(folder / RESTARTS), "HF_HUB_OFFLINE": "1", **environment}
    process: subprocess.Popen[bytes] | Forked
    if is_program:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "grpo_engine", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env={"PYTHONPATH": python_path(), **variables},
                start_new_session=True,  # as a keeper does, so that SIGHUP is not taken for a lost terminal
            )
    else:
        process = Forked(*words, log=log, folder=folder, environment=variables, is_session=True)
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


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has installed a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.extended("test_a_restart_requested_twice_ends_in_one_healthy_server_and_sigterm_ends_a_restart")
def test_a_restart_serves_from_another_process_of_the_same_parent_and_is_counted(
    model_folder: Path, tmp_path: Path
) -> None:
    with fork_server(model_folder, tmp_path, is_program=True) as server:
        until(lambda: handles(server.process.pid, RESTART_SIGNAL))
        server.process.send_signal(RESTART_SIGNAL)  # while it imports
        until(lambda: num_restarts(server) == 1)
        wait_healthy(server)
        before, first = instance_of(server), serving_process(server)
        server.process.send_signal(RESTART_SIGNAL)
        until(lambda: instance_of(server) not in (None, before))
        after = serving_process(server)
        assert after.pid != first.pid
        assert not first.is_running()
        assert num_restarts(server) == 2
        assert "started as a program" not in server.log.read_text(errors="replace")
        assert server.generate(prompt="abc", max_tokens=4, ignore_eos=True)["finish_reasons"] == ["length"]
        assert server.stop(signal.SIGTERM) == 0
        assert not after.is_running()


def test_a_restart_requested_twice_ends_in_one_healthy_server_and_sigterm_ends_a_restart(
    model_folder: Path, tmp_path: Path
) -> None:
    with fork_server(model_folder, tmp_path) as server:
        wait_healthy(server)
        for _ in range(2):
            server.process.send_signal(RESTART_SIGNAL)
        until(lambda: num_restarts(server) >= 1)
        wait_healthy(server)
        assert len(psutil.Process(server.process.pid).children()) == 1
        server.process.send_signal(RESTART_SIGNAL)
        server.process.send_signal(signal.SIGTERM)  # in the middle of it
        server.process.wait(60)
        assert instance_of(server) is None


def wait_gone(process: psutil.Process) -> None:
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def test_an_inference_server_does_not_outlive_its_killed_fork_server(model_folder: Path, tmp_path: Path) -> None:
    with fork_server(model_folder, tmp_path) as server:
        wait_healthy(server)
        child = serving_process(server)
        server.process.kill()
        wait_gone(child)
        assert instance_of(server) is None


def killed_by(server: RunningServer) -> str | None:
    """What the fork server says of its inference server."""
    with suppress(FileNotFoundError):
        return Restarts.model_validate_json((server.log.parent / RESTARTS).read_bytes()).killed_by
    return None


def test_a_fork_server_outlives_its_killed_server_and_forks_the_next_one_when_it_is_asked(
    model_folder: Path, tmp_path: Path
) -> None:
    with fork_server(model_folder, tmp_path) as server:
        wait_healthy(server)
        killed = serving_process(server)
        killed.kill()
        until(lambda: killed_by(server) == "SIGKILL")
        assert num_restarts(server) == 0
        server.process.send_signal(RESTART_SIGNAL)
        wait_healthy(server)
        assert serving_process(server).pid != killed.pid
        assert (num_restarts(server), killed_by(server)) == (1, None)
        serving_process(server).kill()
        until(lambda: killed_by(server) == "SIGKILL")
        server.process.terminate()
        assert server.process.wait(60) == -signal.SIGKILL


ENGINE = """
import os, socket, subprocess, sys
from grpo_engine.server import fork_server
from grpo_engine.server.config import ServerConfig

def serve(config, listener):
    engine = f"trap 'sleep 0.1; echo > {sys.argv[1]}; exit' TERM; echo up; while :; do sleep 0.01; done"
    process = subprocess.Popen(["sh", "-c", engine], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    os.kill(os.getpid(), 9)

fork_server.preload = lambda config: None
fork_server.ForkServer(ServerConfig(engine="torch", model_name="none"), socket.socket(), serve).run()
"""
"""A server that is killed, and its engine, which needs a while to end its step."""


def test_an_engine_whose_server_was_killed_ends_its_step_first(tmp_path: Path) -> None:
    """Under MPS, one that is killed within a kernel can end the trainer too."""
    ended = tmp_path / "ended"
    command = [sys.executable, "-c", ENGINE, str(ended)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    assert ended.exists()


RANKS = """
import os, signal, subprocess, sys, time

who, server, ended = sys.argv[1:]
signal.alarm(60)  # nothing of a test that fails stays
if who == "rank":
    from grpo_engine.processes import ProcessIdentity
    from grpo_engine.server.vllm.worker import watch_server

    watch_server(ProcessIdentity.of(int(server)))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank ends with its engine core
    engine = os.getppid()
    print("up", flush=True)
    while os.getppid() == engine:
        time.sleep(0.01)
elif who == "engine":
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.1), open(ended, "w").close(), sys.exit()))
    ranks = [subprocess.Popen([*sys.orig_argv[:3], "rank", server, ended], stdout=subprocess.PIPE) for _ in range(2)]
    for rank in ranks:
        rank.stdout.readline()
    print(*(rank.pid for rank in ranks), flush=True)
    signal.pause()
else:
    subprocess.run([*sys.orig_argv[:3], "engine", str(os.getpid()), ended])
"""
"""A server, vLLM's engine core below it, and two ranks below that."""


def test_ranks_whose_server_was_killed_let_their_engine_core_end_its_step(tmp_path: Path) -> None:
    """Under MPS, a rank that is killed while another waits for it within a kernel ends all that share the GPU."""
    ended = tmp_path / "ended"
    with subprocess.Popen([sys.executable, "-c", RANKS, "server", "", str(ended)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        ranks = [int(pid) for pid in server.stdout.readline().split()]
        server.kill()
    until(lambda: not any(running(rank) for rank in ranks))
    assert ended.exists()


LOADING = """
import os, signal, sys
from grpo_engine.server.vllm import worker

signal.alarm(60)  # nothing of a test that fails stays
signal.signal(signal.SIGTERM, lambda *_: os._exit(3))  # of vLLM
worker._synchronize = lambda: os.write(1, b"the GPU is idle\\n")  # print is not reentrant
worker.exit_between_kernels()
if sys.argv[1] == "loaded":
    worker.GrpoWorker().grpo_loaded()
print("up", flush=True)
while True:
    signal.pause()
"""
"""A process of vLLM."""


@pytest.mark.parametrize(
    ("state", "code", "last"), [("loading", 128 + signal.SIGTERM, b"the GPU is idle\n"), ("loaded", 3, b"")]
)
def test_a_vllm_that_is_ended_while_it_loads_leaves_no_kernel_running(state: str, code: int, last: bytes) -> None:
    """It was killed within one, which under MPS can end the trainer too."""
    with subprocess.Popen([sys.executable, "-c", LOADING, state], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.stdout.read() == last
    assert process.returncode == code


@pytest.mark.parametrize(
    ("number", "is_supervised"), [(signal.SIGKILL, False), (signal.SIGABRT, False), (signal.SIGABRT, True)]
)
def test_a_server_killed_by_a_signal_ends_its_fork_server_by_the_same_signal(
    model_folder: Path, tmp_path: Path, number: signal.Signals, is_supervised: bool
) -> None:
    with fork_server(model_folder, tmp_path, **({} if is_supervised else {RESTARTS_VARIABLE: ""})) as server:
        wait_healthy(server)
        serving_process(server).send_signal(number)
        assert server.process.wait(60) == -number


def test_a_missing_model_ends_the_fork_server_before_it_serves(tmp_path: Path) -> None:
    with fork_server(tmp_path / "nothing", tmp_path) as server:
        assert server.process.wait(60) == 2
        assert "neither a folder that exists" in server.log.read_text(errors="replace")


@pytest.mark.extended("the threads that prevent a fork are in the table below; restarts are in the tests above")
def test_a_fork_server_with_a_thread_starts_its_server_as_a_program(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if '--no-standby' not in sys.argv: threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
    )
    path = os.pathsep.join([str(tmp_path), python_path()])
    with fork_server(model_folder, tmp_path, is_program=True, PYTHONPATH=path) as server:
        wait_healthy(server)
        assert "threads behind" in server.log.read_text(errors="replace")
        first = serving_process(server)
        assert "--no-standby" in first.cmdline()
        server.process.send_signal(RESTART_SIGNAL)
        until(lambda: num_restarts(server) == 1)
        wait_healthy(server)
        child = serving_process(server)
        assert child.pid != first.pid
        server.process.kill()
        wait_gone(child)


def test_the_cache_size_that_a_server_measured_is_stored_for_the_next_one() -> None:
    assert stored_cache_bytes() is None
    pid = os.fork()
    if pid == 0:
        store_cache_bytes(1 << 40)
        os._exit(0)
    os.waitpid(pid, 0)
    assert stored_cache_bytes() == 1 << 40
    store_cache_bytes(0)


def test_a_process_with_another_thread_cannot_be_forked_unless_that_is_nvmls_or_jemallocs() -> None:
    """On GPU machines each server used to be started as a program, because NVML had left its thread."""
    names = ("cuda00001800007", "cuda0000c100007", "jemalloc_bg_thd", "cuda-EvtHandlr", "other")
    code = (
        "import ctypes, os, sys, threading; from grpo_engine.forking import why_unforkable\n"
        "def stay(name):\n"
        "    ctypes.CDLL(None).prctl(15, name.encode()); is_named.set(); may_end.wait()\n"
        "print(why_unforkable())\n"
        "for name in sys.argv[1:]:\n"
        "    is_named, may_end = threading.Event(), threading.Event()\n"
        "    thread = threading.Thread(target=stay, args=(name,)); thread.start(); is_named.wait()\n"
        "    print(why_unforkable()); may_end.set(); thread.join()\n"
        "    while len(os.listdir('/proc/self/task')) > 1: pass\n"  # joined when Python has left it, not the kernel
    )
    environment = {**os.environ, "PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    alone, *beside = done.stdout.splitlines()
    assert alone == "None"
    for name, answer in zip(names, beside, strict=True):
        is_safe = name not in ("cuda-EvtHandlr", "other")
        assert answer == "None" if is_safe else f"1 threads behind ({name})" in answer


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
