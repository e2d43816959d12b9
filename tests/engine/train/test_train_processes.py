"""The four services as real processes, with a peer of the trainer killed under it: everybody else goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter
from serving import end_all, free_port, python_path, save_tiny_model
from training import weights_of

from grpo_engine.environments.tasks import AnyTask, spell_out
from grpo_engine.models.loading import load_tokenizer
from grpo_engine.train.checkpointing import checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
GROUP_SIZE, GROUPS_A_BATCH, BATCHES_AHEAD = 4, 2, 2


class Services:
    """API, server, environment and trainer of one run; whatever still runs at the end is ended."""

    def __init__(self, folder: Path, *, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.model = save_tiny_model(folder / "model", seed=1)
        self.run_folder = folder / "run"
        self.database = folder / "rollouts.sqlite"
        api, server = free_port(), free_port()
        self._argv = {
            "api": ["--port", str(api), "--database", str(self.database)],
            "server": [
                *("--model-name", str(self.model), "--engine", "torch", "--device", "cpu", "--dtype", "bfloat16"),
                *("--port", str(server), "--threads", "1", "--shared-weights", "--max-model-len", "256"),
            ],
            "env": [
                *("--task", "sort6", "--model-name", str(self.model), "--group-size", str(GROUP_SIZE)),
                *("--max-tokens", "6", "--max-batches-offpolicy", str(BATCHES_AHEAD), "--total-steps", str(steps)),
                *("--rollout-server-url", f"http://127.0.0.1:{api}", "--inference-url", f"http://127.0.0.1:{server}"),
            ],
            "train": [
                *("--model-name", str(self.model), "--weight-bridge-mode", "shared_vllm", "--optimizer", "adamw"),
                *("--batch-size", "4", "--gradient-accumulation-steps", "2", "--seq-len", "64", "--lr", "1e-3"),
                *("--training-steps", str(steps), "--checkpoint-interval", "0", "--threads", "1", "--device", "cpu"),
                *("--atropos-url", f"http://127.0.0.1:{api}", "--vllm-port", str(server)),
                *("--run-folder", str(self.run_folder), "--rollouts-groups", str(GROUPS_A_BATCH)),
            ],
        }
        self._environment = {
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
            "VLLM_BRIDGE_CONFIG_PATH": str(folder / "bridge.json"),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        for name in names:
            with (self.folder / f"{name}.log").open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "grpo_engine", name, *self._argv[name]],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    cwd=self.folder,
                    env=self._environment,
                )

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def num_steps(self) -> int:
        path = self.run_folder / "metrics.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something, for as long as nobody has failed; the limit is the test's own."""
        while not is_so():
            for name, process in self.processes.items():
                assert process.poll() in (None, 0), self.log(name)
            time.sleep(0.05)  # the interval of a probe

    def end(self) -> None:
        end_all(self.processes.values())


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path, steps=24)
    try:
        services.start("api", "server", "env", "train")
        services.wait_until(lambda: services.num_steps() >= 3)
        yield services
    finally:
        services.end()


def test_a_killed_api_ends_nobody_and_no_group_is_lost_or_trained_twice(services: Services) -> None:
    for time_killed in (1, 2):
        services.kill("api")
        so_far = services.num_steps()
        services.wait_until(lambda n=time_killed: services.log("train").count("waiting for the rollout API") >= n)
        services.start("api")
        services.wait_until(lambda n=so_far: services.num_steps() >= n + 4)
    assert services.processes["train"].wait(120) == 0, services.log("train")
    assert services.processes["env"].wait(30) == 0, services.log("env")
    services.end()
    lines = [json.loads(line) for line in (services.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, services.steps + 1))

    items = TypeAdapter(AnyTask).validate_python(spell_out("sort6")).items(0)
    number_of = {next(items).question: number for number in range(1000)}
    trained = [json.loads(line)["prompt"] for line in (services.run_folder / "rollouts.jsonl").read_text().splitlines()]
    decode = load_tokenizer(str(services.model)).decode
    with sqlite3.connect(services.database) as database:
        waiting = [decode(json.loads(body)["tokens"][0]) for (body,) in database.execute("SELECT body FROM bodies")]
    numbers = [number_of["sort " + re.search(r"sort (\d{6})", text)[1]] for text in trained + waiting]
    assert len(trained) == services.steps * GROUPS_A_BATCH
    assert len(set(numbers)) == len(numbers)
    in_the_making = set(range(max(numbers))) - set(numbers)  # when the environment ended
    assert len(in_the_making) <= BATCHES_AHEAD * GROUPS_A_BATCH


def test_a_trainer_whose_server_has_ended_still_saves_what_it_did_and_exits_with_0(services: Services) -> None:
    services.kill("server")
    services.wait_until(lambda: "has exited; its memory is unmapped" in services.log("train"))
    trainer = services.processes["train"]
    assert "/dev/shm/grpo-" not in Path(f"/proc/{trainer.pid}/maps").read_text()
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(60) == 0, services.log("train")
    folder = checkpoints.newest(services.run_folder / "checkpoints")
    assert folder is not None
    state, saved = checkpoints.load(folder, model_name=str(services.model)), weights_of(folder)
    assert state.marker.step == services.num_steps()
    assert saved.keys() == state.masters.keys()
    assert all(torch.equal(values, state.masters[name].to(torch.bfloat16)) for name, values in saved.items())
    services.start("server", "train")  # the server clears away what the killed one left
    services.wait_until(lambda: services.num_steps() >= state.marker.step + 2)
    steps = [json.loads(line)["step"] for line in (services.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
