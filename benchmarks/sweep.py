"""Twelve tiny runs by `grpo-tui sweep --jobs 2`, beside the same runs started by hand, one after the other.

    .venv/bin/python benchmarks/sweep.py [--steps 15] [--by-hand 12]

Wall time from typing the command to the exit of the last process. Half of the runs by hand are made before the sweep
and half after it, so that a machine that grows slower or faster meanwhile counts for both. With `--by-hand 4` only four
of the twelve are made by hand, and their mean counts twelve times. Target: the sweep takes at most 1.15 times as long
as the runs by hand. On a machine with other work the sweep has an advantage: its two runs get the share of two.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

TARGET = 1.15
RATES = ("1e-4", "2e-4", "3e-4", "5e-4", "7e-4", "1e-3")
SEEDS = (0, 1)
JOBS = 2
GRPO_TUI = (sys.executable, "-m", "grpo_tui")


def main() -> None:
    parser = argparse.ArgumentParser(description="Twelve tiny runs as a sweep, and by hand.")
    parser.add_argument("--steps", type=int, default=15, help="training steps of each run")
    parser.add_argument("--by-hand", type=int, default=12, help="how many of the runs are made by hand too")
    options = parser.parse_args()
    steps = options.steps
    make_model = "from grpo_engine.models.loading import resolve_model; resolve_model('local/tiny')"
    subprocess.run([sys.executable, "-c", make_model], check=True)
    common = ["--profile", "tiny-cpu", "--set", f"services.trainer.training_steps={steps}"]
    common += ["--set", "services.trainer.eval_every=0"]
    points = [(rate, seed) for rate in RATES for seed in SEEDS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = points[:: len(points) // options.by_hand]
        by_hand_s = [seconds_of(run_by_hand(common, *point), folder) for point in chosen[::2]]
        grid = ["--set", f"services.trainer.lr={','.join(RATES)}", "--seeds", str(len(SEEDS))]
        command = [*GRPO_TUI, "sweep", *common, *grid, "--jobs", str(JOBS), "--name", "bench"]
        sweep_s = seconds_of(command, folder)
        by_hand_s += [seconds_of(run_by_hand(common, *point), folder) for point in chosen[1::2]]
        with (folder / "logs/sweeps/bench/points.csv").open() as file:
            rows = list(csv.DictReader(file))
    finished = [row for row in rows if row["state"] == "finished" and row["steps"] == str(steps)]
    assert len(finished) == len(points), f"{len(finished)} of {len(points)} points finished"
    all_by_hand_s = statistics.mean(by_hand_s) * len(points)
    ratio = sweep_s / all_by_hand_s
    print(f"one run by hand      {min(by_hand_s):6.1f} to {max(by_hand_s):.1f} s")
    of = "" if len(by_hand_s) == len(points) else f" (by {len(by_hand_s)} of them)"
    print(f"{len(points)} runs by hand      {all_by_hand_s:6.1f} s{of}")
    print(f"sweep, {JOBS} at a time   {sweep_s:6.1f} s")
    print(f"ratio                {ratio:6.2f} (target {TARGET}: {'met' if ratio <= TARGET else 'missed'})")


def run_by_hand(common: Sequence[str], rate: str, seed: int) -> list[str]:
    """One point of the sweep as a person starts it."""
    seeds = [f"services.{service}.seed={seed}" for service in ("vllm", "env", "trainer")]
    sets = [word for each in (f"services.trainer.lr={rate}", *seeds) for word in ("--set", each)]
    return [*GRPO_TUI, "up", *common, *sets, "--new", "--wait", "finished"]  # on free ports, as the sweep


def seconds_of(argv: Sequence[str], folder: Path) -> float:
    """Wall time of a command that must succeed."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    began = time.monotonic()
    subprocess.run(argv, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
