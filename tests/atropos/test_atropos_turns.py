"""An unchanged stock environment trains the tiny model by a server that sleeps during each step: its requests wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stack import Stack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.atropos,
    pytest.mark.timeout(300),
    pytest.mark.extended("tests/atropos/test_atropos_stack.py, and tests/engine/bridges/test_turns.py"),
]
STEPS = 10


def test_a_stock_environment_trains_with_a_server_that_sleeps(
    tmp_path: Path, stock: Path, tiny_model_dir: Path
) -> None:
    stack = Stack(tmp_path, stock, token="of-this-run")
    handover = ("--handover", str(tmp_path / "handover"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        stack.start_api()
        stack.start_server(tiny_model_dir, "--enable-sleep-mode", *handover)
        stack.start_env(
            str(tiny_model_dir), "--group-size", "8", "--max-batches-offpolicy", "1", "--max-token-length", "64"
        )
        stack.start_ours(
            *("train", "train", "--model-name", str(tiny_model_dir), "--weight-bridge-mode", "turns", *handover),
            *("--dtype", "float32", "--device", "cpu", "--threads", "1", "--seq-len", "64", "--optimizer", "adamw"),
            *("--batch-size", "64", "--gradient-accumulation-steps", "1", "--lr", "1e-5"),
            *("--training-steps", "100000", "--checkpoint-interval", "0", "--run-folder", str(tmp_path / "run")),
            *("--atropos-url", stack.api_url, "--vllm-port", str(stack.server_port)),
        )
        stack.wait_until(lambda: metrics.exists() and metrics.read_text().count("train/loss") >= STEPS)
    finally:
        stack.end_all()
    lines = [json.loads(line)["metrics"] for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line][:STEPS]
    alignment = [step["alignment/diff_abs_mean"] for step in steps]  # groups may be some batches old
    assert alignment[0] < 1e-4
    assert max(alignment) < 0.05
    assert min(step["sync/num_servers"] for step in steps) == 1
