"""Evaluations in whole runs of real processes: the curve of a policy that learns, and peers killed under them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from serving import end_all, free_port, python_path

from grpo_engine.models.loading import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Run:
    """API, server, environment and trainer on `local/tiny`; whatever still runs at the end is ended."""

    def __init__(
        self, folder: Path, *, steps: int, trainer: list[str], environment: list[str], task: str = "sort6"
    ) -> None:
        resolve_model("local/tiny")  # made once, so that no two services make it
        self.folder = folder
        api, server = free_port(), free_port()
        model = ["--model-name", "local/tiny"]
        self._argv = {
            "api": [
                *("--port", str(api), "--database", str(folder / "rollouts.sqlite")),
                *("--liveness-s", "10"),  # as long is a killed environment waited for
            ],
            "server": [
                *(*model, "--engine", "torch", "--device", "cpu", "--dtype", "float32", "--max-model-len", "64"),
                *("--port", str(server), "--threads", "1", "--shared-weights", "--logprobs-mode", "processed"),
            ],
            "env": [
                *(*model, "--task", task, "--group-size", "8", "--max-tokens", "8", "--total-steps", str(steps)),
                *("--max-batches-offpolicy", "1", *environment),
                *("--rollout-server-url", f"http://127.0.0.1:{api}", "--inference-url", f"http://127.0.0.1:{server}"),
            ],
            "train": [
                *(*model, "--weight-bridge-mode", "shared_vllm", "--optimizer", "adamw", "--dtype", "float32"),
                *("--batch-size", "128", "--gradient-accumulation-steps", "1", "--seq-len", "64", "--lr", "3e-4"),
                *("--training-steps", str(steps), "--checkpoint-interval", "0", "--threads", "1", "--device", "cpu"),
                *("--warmup-steps", "5", "--atropos-url", f"http://127.0.0.1:{api}", "--vllm-port", str(server)),
                *("--run-folder", str(folder / "run"), *trainer),
            ],
        }
        self._environment = {
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
            "VLLM_BRIDGE_CONFIG_PATH": str(folder / "bridge.json"),
        }
        self.processes: dict[str, Forked] = {}

    def start(self, *names: str) -> None:
        for name in names:
            self.processes[name] = Forked(
                *(name, *self._argv[name]),
                log=self.folder / f"{name}.log",
                folder=self.folder,
                environment=self._environment,
            )

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def lines(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def evaluations(self) -> dict[int, dict[str, float]]:
        return {line["step"]: line["metrics"] for line in self.lines() if "eval/time" in line["metrics"]}

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something, for as long as nobody has failed; the limit is the test's own."""
        while not is_so():
            for name, process in self.processes.items():
                assert process.poll() in (None, 0), self.log(name)
            time.sleep(0.05)  # the interval of a probe

    def wait_for_the_end(self) -> None:
        """Trainer and environment end by themselves, with exit code 0."""
        self.wait_until(lambda: self.processes["train"].poll() is not None)
        assert self.processes["train"].returncode == 0, self.log("train")
        assert self.processes["env"].wait(30) == 0, self.log("env")

    def end(self) -> None:
        end_all(self.processes.values())


@pytest.fixture
def run_of(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(**settings: Any) -> Run:
        runs.append(Run(tmp_path, **settings))
        runs[-1].start("api", "server", "env", "train")
        return runs[-1]

    try:
        yield begin
    finally:
        for run in runs:
            run.end()


def test_the_evaluations_of_a_policy_that_learns_rise_and_are_of_exactly_the_published_weights(
    run_of: Callable[..., Run],
) -> None:
    run = run_of(
        steps=25, task="copy6", trainer=["--eval-every", "10", "--eval-prompts", "64", "--lr", "1e-3"], environment=[]
    )
    run.wait_for_the_end()  # the environment stayed for the last evaluation
    found = run.evaluations()
    assert list(found) == [0, 10, 20, 25]
    assert [line["step"] for line in run.lines()] == list(range(26))
    assert {metrics["eval/other_version_fraction"] for metrics in found.values()} == {0.0}
    assert {metrics["eval/num_prompts"] for metrics in found.values()} == {64}
    errors = found[0]["eval/avg@4_se"] + found[25]["eval/avg@4_se"]
    assert found[25]["eval/avg@4"] > found[0]["eval/avg@4"] + 2 * errors, found  # four times that, most often


@pytest.mark.extended("test_train_processes.py kills the API under a whole stack")
def test_an_evaluation_outlives_a_killed_api_and_a_killed_environment(run_of: Callable[..., Run]) -> None:
    # One prompt at a time, so that there is time to kill somebody in the middle.
    run = run_of(steps=2, trainer=["--eval-every", "2", "--eval-prompts", "200"], environment=["--max-workers", "1"])
    run.wait_until(lambda: run.log("api").count('"evaluation ordered"') == 1 and "registered as" in run.log("env"))
    run.kill("api")
    run.wait_until(lambda: "waiting for the rollout API to come back" in run.log("train"))
    run.start("api")
    run.wait_until(lambda: 0 in run.evaluations())
    run.wait_until(lambda: run.log("api").count('"evaluation ordered"') == 2)
    run.kill("env")
    run.start("env")
    run.wait_for_the_end()
    found = run.evaluations()
    assert list(found) == [0, 2]
    assert [metrics["eval/num_prompts"] for metrics in found.values()] == [200, 200]
    assert [line["step"] for line in run.lines()] == [0, 1, 2]


def test_an_environment_that_cannot_evaluate_costs_the_run_nothing_but_the_curve(
    run_of: Callable[..., Run], tmp_path: Path
) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "sort 660487", "answer": "046678"}\n')
    run = run_of(steps=2, trainer=["--eval-every", "1"], environment=["--task", "jsonl", "--task.path", str(questions)])
    run.wait_for_the_end()
    assert [line["step"] for line in run.lines()] == [1, 2]
    assert run.evaluations() == {}
    assert "none of questions_0 evaluates" in run.log("train")
    assert "this environment answers no evaluations" in run.log("env")
