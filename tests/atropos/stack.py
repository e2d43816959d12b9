"""A stack around a stock environment: our API, server and runner as processes, and our trainer or the stock one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from forked import Forked
from serving import end_all, free_port, python_path

from grpo_engine.wire.access_token import authorization
from grpo_engine.wire.environment_variables import TOKEN_VARIABLE

ENVIRONMENT = Path(__file__).with_name("sorting_env.py")
Process = subprocess.Popen[bytes] | Forked
NO_RESTARTS: Mapping[str, Callable[[], None]] = MappingProxyType({})


class Stack:
    """Processes by name, each with a log in one folder."""

    def __init__(self, folder: Path, stock: Path, *, token: str | None = None) -> None:
        self.folder, self.stock = folder, stock
        self.api_port, self.server_port = free_port(), free_port()
        self.api_url = f"http://127.0.0.1:{self.api_port}"
        self.server_url = f"http://127.0.0.1:{self.server_port}"
        self.processes: dict[str, Process] = {}
        self._headers = authorization(token)
        temporary = folder / "tmp"  # W&B of the stock environment and killed processes leave files
        temporary.mkdir(exist_ok=True)
        self._environment = {
            **os.environ,
            "TMPDIR": str(temporary),
            **{"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"},
            "VLLM_BRIDGE_CONFIG_PATH": str(folder / "bridge.json"),
            **({TOKEN_VARIABLE: token} if token else {}),
        }

    def start_api(self) -> None:
        """Our rollout API; started again it continues with its stored state."""
        flags = ("--port", str(self.api_port), "--store", str(self.folder / "rollouts.sqlite"))
        self.start_ours("api", "api", *flags)
        self.wait_until(lambda: self.answers(f"{self.api_url}/info"))

    def start_server(self, model: Path, *flags: str) -> None:
        """Our inference server, on torch and one core."""
        shape = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-model-len", "64")
        server = ("--engine", "torch", "--model-name", str(model), "--port", str(self.server_port))
        self.start_ours("server", "server", *server, *shape, *flags)
        self.wait_until(lambda: self.answers(f"{self.server_url}/health"))

    def start_env(self, model: str, *flags: str, file: Path = ENVIRONMENT) -> None:
        """Our runner with a stock environment."""
        words = ["--file", str(file), "--python", str(self.stock / "python"), "--model-name", model]
        urls = ["--rollout-server-url", self.api_url, "--inference-url", self.server_url]
        self.start("env", sys.executable, "-m", "grpo_engine", "atropos-env", *words, *urls, *flags)

    def start_ours(self, name: str, *words: str) -> None:
        """Start a command of ours without its import time."""
        log = self.folder / f"{name}.log"
        self.processes[name] = Forked(*words, log=log, folder=self.folder, environment=self._environment)

    def start(self, name: str, *argv: str) -> None:
        """Start any command."""
        environment = self._environment
        if argv[0] != sys.executable:  # stock Atropos does not see this checkout
            environment = {key: value for key, value in environment.items() if key != "PYTHONPATH"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env=environment
            )

    def end(self, name: str, number: int = signal.SIGTERM) -> int:
        """End a process by a signal; its exit code."""
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(60)

    def end_all(self) -> None:
        end_all(self.processes.values())

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def wait_until(
        self, holds: Callable[[], bool], *, restarts: Mapping[str, Callable[[], None]] = NO_RESTARTS
    ) -> None:
        """Wait until a condition holds, while no process fails; the limit is that of the test.

        Args:
            restarts: processes that may fail, and how to start them again, as a supervisor would.
        """
        while not holds():
            for name, process in list(self.processes.items()):
                if process.poll() not in (None, 0):
                    assert name in restarts, f"{name}: {self.log(name)[-4000:]}"
                    restarts[name]()
            time.sleep(0.05)  # the interval of a probe

    def answers(self, url: str) -> bool:
        try:
            return httpx.get(url, timeout=5, trust_env=False).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def ask(self, method: str, path: str, **body: Any) -> httpx.Response:
        """Send a request to the API with a JSON body, as stock clients do."""
        return httpx.request(
            method, f"{self.api_url}{path}", json=body or None, headers=self._headers, timeout=60, trust_env=False
        )
