"""Evaluations in whole runs of real processes: the curve of a policy that learns, and services killed during them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from engine_processes import EngineProcesses, flags_of_services

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


SERVER = ["--dtype", "float32", "--max-model-len", "64", "--logprobs-mode", "processed"]
ENVIRONMENT = ["--group-size", "8", "--max-tokens", "8", "--max-batches-offpolicy", "1"]
TRAINER = [
    *("--dtype", "float32", "--batch-size", "128", "--gradient-accumulation-steps", "1", "--seq-len", "64"),
    *("--lr", "3e-4", "--warmup-steps", "5"),
]
LIVENESS = ["--liveness-s", "10"]
"""So long the API waits for a killed environment."""


def evaluations(run: EngineProcesses) -> dict[int, dict[str, float]]:
    return {line["step"]: line["metrics"] for line in run.lines() if "eval/time" in line["metrics"]}


def wait_for_the_end(run: EngineProcesses) -> None:
    """Trainer and environment exit by themselves, with 0."""
    run.wait_until(lambda: run.processes["train"].poll() is not None)
    run.end("train")
    run.end("env", 30)


@pytest.fixture
def run_of(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Callable[..., EngineProcesses]]:
    """Starts the services on `local/tiny`; those that still run at the end are ended."""
    with ExitStack() as stack:

        def start(*, steps: int, trainer: list[str], environment: list[str]) -> EngineProcesses:
            env, train = [*ENVIRONMENT, *environment], [*TRAINER, *trainer]
            flags = flags_of_services(
                tmp_path, "local/tiny", steps=steps, api=LIVENESS, server=SERVER, env=env, train=train
            )
            run = EngineProcesses(tmp_path, flags)
            stack.callback(run.end_all)
            run.start("api", "server", "env", "train")
            return run

        yield start


@pytest.mark.extended("test_evaluation and test_environments_evaluating")
def test_the_evaluations_of_a_policy_that_learns_rise_and_are_of_exactly_the_published_weights(
    run_of: Callable[..., EngineProcesses],
) -> None:
    trainer = ["--eval-every", "10", "--eval-prompts", "64", "--lr", "1e-3"]
    run = run_of(steps=25, trainer=trainer, environment=["--task", "copy6"])
    wait_for_the_end(run)  # the environment stayed for the last evaluation
    found = evaluations(run)
    assert list(found) == [0, 10, 20, 25]
    assert [line["step"] for line in run.lines()] == list(range(26))
    assert {metrics["eval/other_version_fraction"] for metrics in found.values()} == {0.0}
    assert {metrics["eval/num_prompts"] for metrics in found.values()} == {64}
    errors = found[0]["eval/avg@4_se"] + found[25]["eval/avg@4_se"]
    assert found[25]["eval/avg@4"] > found[0]["eval/avg@4"] + 2 * errors, found  # four times that, most often


@pytest.mark.extended("test_train_processes.py kills the API under a whole stack")
def test_an_evaluation_is_completed_after_a_killed_api_and_after_a_killed_environment(
    run_of: Callable[..., EngineProcesses],
) -> None:
    # One prompt at a time, so that there is time to kill a service in the middle.
    run = run_of(
        steps=2,
        trainer=["--eval-every", "2", "--eval-prompts", "200"],
        environment=["--task", "sort6", "--max-workers", "1"],
    )
    run.wait_until(lambda: run.log("api").count('"evaluation ordered"') == 1 and "registered as" in run.log("env"))
    run.kill("api")
    run.wait_until(lambda: "waiting for the rollout API to come back" in run.log("train"))
    run.start("api")
    run.wait_until(lambda: 0 in evaluations(run))
    run.wait_until(lambda: run.log("api").count('"evaluation ordered"') == 2)
    run.kill("env")
    run.start("env")
    wait_for_the_end(run)
    found = evaluations(run)
    assert list(found) == [0, 2]
    assert [metrics["eval/num_prompts"] for metrics in found.values()] == [200, 200]
    assert [line["step"] for line in run.lines()] == [0, 1, 2]


@pytest.mark.extended("test_evaluation.py: environments that cannot evaluate are reported")
def test_an_environment_that_cannot_evaluate_changes_nothing_but_the_curve(
    run_of: Callable[..., EngineProcesses], tmp_path: Path
) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "sort 660487", "answer": "046678"}\n')
    run = run_of(steps=2, trainer=["--eval-every", "1"], environment=["--task", "jsonl", "--task.path", str(questions)])
    wait_for_the_end(run)
    assert [line["step"] for line in run.lines()] == [1, 2]
    assert evaluations(run) == {}
    assert "none of questions_0 evaluates" in run.log("train")
    assert "this environment answers no evaluations" in run.log("env")
