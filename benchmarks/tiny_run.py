"""A whole supervised run of `tiny-cpu` on sort6: wall time, and what the reward did.

    .venv/bin/python benchmarks/tiny_run.py

From typing the command to the last process gone, all four services included, the model already made. Targets: under
three minutes on two cores, mean sampled reward of the last 10 of 150 steps at least 0.85 (about 0.64 in the first 10).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGET_S, TARGET_REWARD = 180.0, 0.85


def main() -> None:
    subprocess.run(
        [sys.executable, "-c", "from grpo_engine.models.loading import resolve_model; resolve_model('local/tiny')"],
        check=True,
    )
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "grpo_tui", "up", "--profile", "tiny-cpu", "--wait", "finished"]
        command += ["--set", "services.api.port=18000", "--set", "services.vllm.port=19001"]
        command += ["--set", "services.trainer.eval_every=0"]
        began = time.monotonic()
        subprocess.run(command, cwd=name, env={**os.environ, "XDG_RUNTIME_DIR": name}, check=True)
        seconds = time.monotonic() - began
        [path] = Path(name).glob("logs/*/metrics.jsonl")
        lines = [json.loads(line)["metrics"] for line in path.read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines]
    first, last = statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])
    print(f"wall time           {seconds:6.1f} s (target {TARGET_S:.0f}: {'met' if seconds < TARGET_S else 'missed'})")
    print(f"reward, first 10    {first:6.3f}")
    print(f"reward, last 10     {last:6.3f} (target {TARGET_REWARD}: {'met' if last >= TARGET_REWARD else 'missed'})")
    for metric in ("grpo/mean_ratio", "grpo/clipped_fraction", "alignment/diff_abs_mean", "rollout/staleness_mean"):
        print(f"{metric:<24}{statistics.mean(line[metric] for line in lines):.4f} in the mean")


if __name__ == "__main__":
    main()
