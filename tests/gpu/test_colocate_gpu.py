"""Sampling and training in turn on NVIDIA GPUs: vLLM asleep frees its memory, and samples from the trained weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from serving import save_tiny_model

from grpo_engine.wire.metrics import MetricsLine

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FLAGS = (
    *("--weight-bridge-mode", "colocate", "--task", "sort6", "--group-size", "8", "--max-tokens", "8"),
    *("--batch-size", "32", "--gradient-accumulation-steps", "2", "--lr", "1e-3", "--seq-len", "64"),
    *("--training-steps", "3", "--gpu-memory-utilization", "0.3", "--optimizer", "adamw"),
    *("--cuda-graph-sizes", "1", "8", "32"),  # all of vLLM's take most of the time
)
MORE = {
    "all weights": (),
    "an adapter": ("--train-adapter",),
    "every second step": ("--sync-frequency", "2"),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_vllm_sleeps_while_a_rank_trains_and_samples_from_its_weights(
    more: tuple[str, ...], num_ranks: int, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"{num_ranks} GPUs")
    model = save_tiny_model(tmp_path / "model", seed=1)
    argv = (sys.executable, "-m", "grpo_engine", "train", "--model", str(model), "--gpus", str(num_ranks))
    trained = subprocess.run([*argv, *FLAGS, *more, "--run-folder", str(tmp_path / "run")], check=False, timeout=500)
    assert trained.returncode == 0
    lines = [
        MetricsLine.model_validate_json(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 3
    for number, line in enumerate(lines):
        fresh = line.metrics["rollout/staleness_max"] == 0
        assert fresh == ("--sync-frequency" not in more or number % 2 == 0)
        if fresh:
            assert line.metrics["alignment/diff_abs_mean"] < 0.1  # bf16 on both sides
        assert line.metrics["sync/num_servers"] in (0, num_ranks)
