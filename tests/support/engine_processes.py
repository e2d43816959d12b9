"""Services of the engine as real processes: started, killed and started again, each with a log of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forked import Forked
from serving import end_all, free_port, python_path


def flags_of_services(
    folder: Path,
    model: str,
    *,
    steps: int,
    api: Sequence[str] = (),
    server: Sequence[str] = (),
    env: Sequence[str] = (),
    train: Sequence[str] = (),
) -> dict[str, list[str]]:
    """The flags of API, server, environment and trainer on shared weights, those given after the common ones."""
    api_port, server_port = free_port(), free_port()
    api_url, server_url = (f"http://127.0.0.1:{port}" for port in (api_port, server_port))
    return {
        "api": ["--port", str(api_port), "--database", str(folder / "rollouts.sqlite"), *api],
        "server": [
            *("--model-name", model, "--engine", "torch", "--device", "cpu", "--port", str(server_port)),
            *("--threads", "1", "--shared-weights", *server),
        ],
        "env": [
            *("--model-name", model, "--rollout-server-url", api_url, "--inference-url", server_url),
            *("--total-steps", str(steps), *env),
        ],
        "train": [
            *("--model-name", model, "--weight-bridge-mode", "shared_vllm", "--optimizer", "adamw"),
            *("--training-steps", str(steps), "--checkpoint-interval", "0", "--threads", "1", "--device", "cpu"),
            *("--atropos-url", api_url, "--vllm-port", str(server_port), "--run-folder", str(folder / "run"), *train),
        ],
    }


class EngineProcesses:
    """The services of one run, whose run folder is `folder/run`.

    Args:
        argv: the flags of each service.
        is_forked: start them without the time of their imports, and not by the command line.
    """

    def __init__(self, folder: Path, argv: Mapping[str, Sequence[str]], *, is_forked: bool = True) -> None:
        self.folder, self.run_folder = folder, folder / "run"
        self.processes: dict[str, subprocess.Popen[bytes] | Forked] = {}
        self._argv, self._is_forked = argv, is_forked
        self._environment = {
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
            "VLLM_BRIDGE_CONFIG_PATH": str(folder / "bridge.json"),
        }

    def start(self, *names: str) -> None:
        for name in names:
            self.processes[name] = self._started(name, *self._argv[name])

    def _started(self, *words: str) -> subprocess.Popen[bytes] | Forked:
        log = self.folder / f"{words[0]}.log"
        if self._is_forked:
            return Forked(*words, log=log, folder=self.folder, environment=self._environment)
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "grpo_engine", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env=self._environment,
            )

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it has exited."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def end(self, name: str, within_s: float = 120) -> None:
        """Wait until it exits by itself, with 0."""
        assert self.processes.pop(name).wait(within_s) == 0, self.log(name)

    def end_all(self) -> None:
        end_all(self.processes.values())

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def lines(self) -> list[dict[str, Any]]:
        """The records of all steps."""
        path = self.run_folder / "metrics.jsonl"
        if not path.exists():
            return []
        complete, _, _ = path.read_bytes().rpartition(b"\n")  # the trainer may be writing the next line
        return [json.loads(line) for line in complete.splitlines()]

    def num_steps(self) -> int:
        path = self.run_folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_until(self, is_so: Callable[[], bool], *, interval_s: float = 0.05) -> None:
        """Wait for a condition, as long as no service has failed; the limit is the test's own."""
        while not is_so():
            for name, process in self.processes.items():
                assert process.poll() in (None, 0), self.log(name)
            time.sleep(interval_s)
