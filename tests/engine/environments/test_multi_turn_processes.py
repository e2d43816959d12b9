"""Games of real processes: API, server, environment and trainer on `local/tiny`, every seat the policy's."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from serving import end_all, free_port, python_path

from grpo_engine.models.loading import resolve_model
from grpo_engine.models.tiny_tokenizer import CONTEXT_TOKENS, END_ID

pytestmark = [
    pytest.mark.extended("test_environments_mafia.py and test_multi_turn_training.py, in one process"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]
GROUP_SIZE, NUM_SEATS, STEPS = 4, 5, 3


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of three steps leaves behind; all four services have ended by themselves."""
    resolve_model("local/tiny")  # made once, so that no two services make it
    folder = tmp_path_factory.mktemp("games")
    api, server, length = free_port(), free_port(), str(CONTEXT_TOKENS)
    model = ("--model-name", "local/tiny")
    argv = {
        "api": ["--port", str(api), "--database", str(folder / "rollouts.sqlite")],
        "server": [
            *(*model, "--engine", "torch", "--device", "cpu", "--dtype", "float32", "--max-model-len", length),
            *("--port", str(server), "--threads", "1", "--shared-weights", "--logprobs-mode", "processed"),
        ],
        "env": [
            *(*model, "--task", "mafia", "--no-task.explain", "--task.max-days", "1", "--task.max-statement", "12"),
            *("--group-size", str(GROUP_SIZE), "--max-tokens", "8", "--max-token-length", length),
            *("--max-batches-offpolicy", "1", "--total-steps", str(STEPS)),
            *("--rollout-server-url", f"http://127.0.0.1:{api}", "--inference-url", f"http://127.0.0.1:{server}"),
        ],
        "train": [
            *(*model, "--weight-bridge-mode", "shared_vllm", "--optimizer", "adamw", "--dtype", "float32"),
            # Two groups a batch: fewer than the five that one item becomes.
            *("--batch-size", str(2 * GROUP_SIZE), "--gradient-accumulation-steps", "1", "--seq-len", length),
            *("--lr", "1e-3", "--training-steps", str(STEPS), "--checkpoint-interval", "0", "--threads", "1"),
            *("--eval-every", "2", "--eval-prompts", "3", "--eval-samples", "2", "--rollouts-groups", "2"),
            *("--device", "cpu", "--atropos-url", f"http://127.0.0.1:{api}", "--vllm-port", str(server)),
            *("--run-folder", str(folder / "run"), "--vllm-config-path", str(folder / "bridge.json")),
        ],
    }
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "VLLM_BRIDGE_CONFIG_PATH": str(folder / "bridge.json"),
    }
    processes: dict[str, Forked] = {}

    def wait_until(is_so: Callable[[], bool]) -> None:
        while not is_so():
            for name, process in processes.items():
                assert process.poll() in (None, 0), (folder / f"{name}.log").read_text(errors="replace")
            time.sleep(0.05)  # the interval of a probe

    try:
        for name, words in argv.items():
            processes[name] = Forked(name, *words, log=folder / f"{name}.log", folder=folder, environment=environment)
        wait_until(lambda: processes["train"].poll() is not None and processes["env"].poll() is not None)
    finally:
        end_all(processes.values())
    return folder


def test_every_turn_of_every_seat_is_trained_with_the_log_probabilities_it_was_sampled_with(run_folder: Path) -> None:
    groups = lines_of(run_folder / "run" / "rollouts.jsonl")
    assert len(groups) == 2 * STEPS
    for completion in (completion for group in groups for completion in group["completions"]):
        assert math.isfinite(completion["reward"])
        assert -1 <= completion["reward"] <= 2
        ours, theirs = completion["training_logprobs"], completion["inference_logprobs"]
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-3
    turns = [completion["token_ids"].count(END_ID) for group in groups for completion in group["completions"]]
    assert max(turns) >= 2, "no seat has ended two of its turns"
    for line in lines_of(run_folder / "run" / "metrics.jsonl"):
        if line["step"] > 0:
            assert line["metrics"]["alignment/diff_max"] < 1e-3
            assert line["metrics"]["rollout/length_mean"] < 3 * 8


def test_a_group_has_one_seat_and_one_prompt(run_folder: Path) -> None:
    groups = lines_of(run_folder / "run" / "rollouts.jsonl")
    assert all(len(group["completions"]) == GROUP_SIZE for group in groups)
    names = {group["prompt"].partition("You are ")[2].partition(",")[0] for group in groups}
    assert len(names) >= 2
    assert all("Day 1, talk: <say>text</say> of 12 letters at most" in group["prompt"] for group in groups)


def test_an_item_of_more_groups_than_a_batch_is_sampled_no_further_ahead_than_needed(
    run_folder: Path,
) -> None:
    metrics = [line for line in lines_of(run_folder / "run" / "metrics.jsonl") if line["step"] > 0]
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    # An item of five groups serves two batches; nothing is ever made further ahead.
    assert all(line["metrics"]["rollout/staleness_max"] <= 3 for line in metrics)


def test_games_are_evaluated_on_held_out_seeds_with_one_entry_a_game(run_folder: Path) -> None:
    evaluations = [
        line["metrics"] for line in lines_of(run_folder / "run" / "metrics.jsonl") if "eval/time" in line["metrics"]
    ]
    assert len(evaluations) == 3  # before the first step, after the second and after the last
    for metrics in evaluations:
        assert metrics["eval/num_prompts"] == 3
        assert -1 <= metrics["eval/avg@2"] <= 2
        assert metrics["eval/other_version_fraction"] == 0
        assert metrics["eval/length_mean"] > NUM_SEATS  # of all seats together
