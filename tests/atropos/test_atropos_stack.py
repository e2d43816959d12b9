"""An unchanged stock environment trains the tiny model through our whole stack, and continues after failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.atropos, pytest.mark.timeout(300)]
STEPS, BATCH, GROUP = 40, 128, 8


class Training(Stack):
    """A stack with our trainer, which runs until it is stopped."""

    model: Path

    def start_all(self, model: Path) -> None:
        self.model = model
        self.start_api()
        self.start_server(model, "--shared-weights")
        self.restart_env()
        self.start_ours(
            *("train", "train", "--model-name", str(model), "--weight-bridge-mode", "shared_vllm"),
            *("--dtype", "float32", "--device", "cpu", "--threads", "1", "--seq-len", "64", "--optimizer", "adamw"),
            *("--batch-size", str(BATCH), "--gradient-accumulation-steps", "1", "--lr", "4e-4", "--warmup-steps", "5"),
            *("--training-steps", "100000", "--checkpoint-interval", "0", "--run-folder", str(self.folder / "run")),
            *("--atropos-url", self.api_url, "--vllm-port", str(self.server_port)),
        )

    def restart_env(self) -> None:
        # Groups of equal rewards are sent too: without them the mean of the rewards is that of other groups.
        flags = ("--group-size", str(GROUP), "--max-batches-offpolicy", "1", "--no-ensure-scores-are-not-same")
        self.start_env(str(self.model), *flags, "--max-token-length", "64")

    def rewards(self) -> list[float]:
        """Of every step so far."""
        path = self.folder / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line)["metrics"]["reward/mean"] for line in lines if line.endswith("\n")]

    def train(self, num_steps: int) -> None:
        """Wait for so many more steps; a failed environment is started again, as by a supervisor."""
        wanted = len(self.rewards()) + num_steps
        self.wait_until(lambda: len(self.rewards()) >= wanted, restarts={"env": self.restart_env})

    def status_env(self, env_id: int) -> dict[str, float]:
        """The answer that an environment gets, with its own request."""
        answer = self.ask("GET", "/status-env", env_id=env_id)
        assert answer.status_code == httpx.codes.OK, answer.text
        return dict(answer.json())

    def newest_env_id(self) -> int:
        """Id of the environment that registered last: they have one name and consecutive numbers."""
        names = self.ask("GET", "/status").json()["environments"]
        return max((int(name.removeprefix("sorting_")) for name in names), default=-1)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory, stock: Path, tiny_model_dir: Path) -> Iterator[Training]:
    training = Training(tmp_path_factory.mktemp("stack"), stock, token="of-this-run")
    try:
        training.start_all(tiny_model_dir)
        training.train(3)
        yield training
    finally:
        training.end_all()


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_stock_environment_trains_the_tiny_model_through_our_whole_stack(training: Training) -> None:
    training.train(max(0, STEPS - len(training.rewards())))
    rewards = training.rewards()[:STEPS]
    assert 0.58 < mean(rewards[:5]) < 0.72
    assert mean(rewards[-10:]) >= 0.70  # ten steps of an untrained model are within 0.63 and 0.67
    assert "alignment" in training.log("train")


def test_a_reset_of_the_api_is_refused_while_a_run_is_active(training: Training) -> None:
    refusal = training.ask("GET", "/reset_data")  # as view-run, atropos-sft-gen and atropos-dpo-gen begin
    assert refusal.status_code == httpx.codes.CONFLICT
    assert "a run is active" in refusal.text
    assert training.ask("GET", "/info").json()["batch_size"] == BATCH
    training.train(3)
    assert training.status_env(0)["env_weight"] == 1.0


def test_a_restarted_api_knows_the_stock_environment_and_the_run_continues(training: Training) -> None:
    known = training.newest_env_id()
    training.end("api", 9)
    training.start_api()
    assert training.status_env(known)["env_weight"] == 1.0
    training.train(5)


@pytest.mark.extended("test_rollouts_stock_defects.py has the share of an environment that comes back")
def test_a_restarted_stock_environment_has_its_whole_share_again(training: Training) -> None:
    known = training.newest_env_id()
    assert training.end("env") == 128 + 15
    training.restart_env()
    training.wait_until(lambda: training.newest_env_id() > known)
    training.wait_until(lambda: training.status_env(training.newest_env_id())["env_weight"] == 1.0)
    training.train(5)
