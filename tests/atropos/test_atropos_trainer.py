"""The stock trainer against our API and our inference server, with a stock environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.atropos, pytest.mark.timeout(300)]
STEPS = 6


@pytest.fixture
def stack(tmp_path: Path, stock: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, stock)
    try:
        yield stack
    finally:
        stack.end_all()


@pytest.mark.extended("test_atropos_stack: a restarted API")
def test_the_stock_trainer_continues_after_our_api_was_killed(stack: Stack, tiny_model_dir: Path) -> None:
    stack.start_api()
    stack.start_server(tiny_model_dir, "--enable-lora")
    flags = ("--group-size", "4", "--max-batches-offpolicy", "2", "--max-token-length", "64")

    def start_env() -> None:
        stack.start_env(str(tiny_model_dir), *flags)

    start_env()
    stack.start(
        *("trainer", str(stack.stock / "atropos-grpo"), "--model", str(tiny_model_dir), "--device", "cpu"),
        *("--atropos-url", stack.api_url, "--vllm-port", str(stack.server_port), "--optimizer", "adamw"),
        *("--weight-bridge-mode", "lora_only", "--vllm-restart-interval", "2", "--training-steps", str(STEPS)),
        *("--batch-size", "4", "--gradient-accumulation-steps", "4", "--seq-len", "64", "--lr", "1e-3"),
        *("--save-path", str(stack.folder / "saved"), "--checkpoint-interval", "0", "--benchmark"),
    )
    stack.wait_until(lambda: f"Step 2/{STEPS}" in stack.log("trainer"))
    stack.end("api", 9)
    stack.start_api()
    trainer = stack.processes["trainer"]
    stack.wait_until(lambda: trainer.poll() is not None, restarts={"env": start_env})
    log = stack.log("trainer")
    assert trainer.wait() == 0, log
    assert [int(step) for step in re.findall(rf"^Step (\d+)/{STEPS}$", log, re.MULTILINE)] == list(range(1, STEPS + 1))
    assert log.count("[LORA] ✓ Hot-swapped adapter via custom API") >= STEPS // 2
    assert "✗" not in log
    assert "WARNING] ref_logprobs" not in log  # every group brought its log-probabilities
    assert "Training finished." in log
