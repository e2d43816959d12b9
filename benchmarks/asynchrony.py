"""Asynchronous training beside training by turns: the same profile with `max_staleness` S and 0, seed by seed.

    .venv/bin/python benchmarks/asynchrony.py [--profile tiny-cpu] [--steps 150] [--staleness 4] [--seeds 3]
        [--set KEY=VALUE …] [--at-once] [--out FOLDER]

The runs of a seed follow each other, so that a machine that grows slower meanwhile counts for both. With `--at-once`
the seeds of a kind run at the same time, on ports of their own: for a machine that is lent for minutes. Steps an hour
are taken from the end of the third step to the end of the last, without evaluations; the reward at the end is the mean
over the last tenth of the steps. One line of JSON a run, then the ratio, both rewards with their standard errors over
seeds, and FOLDER/curves.svg with the mean reward of each kind over the steps.

Target on two GPUs: 1.8 times the steps an hour at an equal reward. The limit is (sampling + training) / max(sampling,
training), at most 2, where all completions of a step have one length. With a long tail it is higher, since by turns
most of a server has nothing to do while the longest completion is sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.run_folder import METRICS_FILE

GRPO_TUI = (sys.executable, "-m", "grpo_tui")
PORTS = {"api": 8002, "vllm": 9001}
"""Of the run with the first seed; the others have the next ones."""
LEFT_OUT = 3
"""First steps that no time is taken of: compilation, and groups that were sampled before."""
TARGET = 1.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="tiny-cpu")
    parser.add_argument("--steps", type=int, default=150, help="of each run, at least 10")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs, repeatable")
    parser.add_argument("--at-once", action="store_true", help="run the seeds of a kind at the same time")
    parser.add_argument("--out", type=Path, help="where runs and curves stay; default: a temporary folder")
    options = parser.parse_args()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        measure(options, options.out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(options, Path(folder))


def measure(options: argparse.Namespace, folder: Path) -> None:
    """All runs, and what they come to."""
    bounds, seeds = (0, options.staleness), range(options.seeds)
    runs: dict[int, list[str]] = {bound: [] for bound in bounds}
    figures: dict[int, list[dict[str, float]]] = {bound: [] for bound in bounds}

    def add(bound: int, seed: int, run: str) -> None:
        runs[bound].append(run)
        figures[bound].append(read(folder / "logs" / run / METRICS_FILE))
        print(json.dumps({"max_staleness": bound, "seed": seed, **figures[bound][-1]}), flush=True)

    if options.at_once:
        for bound in bounds:
            with ThreadPoolExecutor() as pool:
                done = [pool.submit(train, options, bound, seed, folder) for seed in seeds]
            for seed, run in zip(seeds, done, strict=True):
                add(bound, seed, run.result())
    else:
        for seed in seeds:
            for bound in bounds if seed % 2 == 0 else reversed(bounds):
                add(bound, seed, train(options, bound, seed, folder))
    for bound in bounds:
        rewards = [each["reward"] for each in figures[bound]]
        error = statistics.stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else float("nan")
        print(f"max_staleness {bound}: reward at the end {statistics.mean(rewards):.3f} ± {error:.3f}")
    ratios = [
        faster["steps_per_hour"] / slower["steps_per_hour"] for slower, faster in zip(*figures.values(), strict=True)
    ]
    ratio = statistics.median(ratios)
    print(
        f"steps an hour, {options.staleness} over 0: {ratio:.2f}, by seed {', '.join(f'{each:.2f}' for each in ratios)}"
    )
    print(f"target {TARGET}: {'met' if ratio >= TARGET else 'missed'}")
    curves = folder / "curves.svg"
    call("compare", *runs[0], *runs[options.staleness], "--format", "svg", "--output", str(curves), folder=folder)
    if options.out:
        print(f"curves: {curves}")


def train(options: argparse.Namespace, bound: int, seed: int, folder: Path) -> str:
    """One run to its end; returns its id."""
    settings = [f"services.{service}.seed={seed}" for service in ("vllm", "env", "trainer")]
    settings += [f"services.{service}.port={port + seed}" for service, port in PORTS.items()]
    settings += [f"services.trainer.training_steps={options.steps}", "services.trainer.eval_every=0"]
    settings += [f"services.trainer.max_staleness={bound}", *options.set]
    sets = [word for each in settings for word in ("--set", each)]
    name = f"staleness-{bound}-seed-{seed}"
    call("up", "--profile", options.profile, *sets, "--new", "--name", name, "--wait", "finished", folder=folder)
    return max((each for each in (folder / "logs").iterdir() if each.name.startswith(name)), key=os.path.getmtime).name


def read(metrics: Path) -> dict[str, float]:
    """Speed and reward of a run."""
    lines = [MetricsLine.model_validate_json(line) for line in metrics.read_bytes().splitlines()]
    timed = lines[LEFT_OUT - 1 :]
    hours = (timed[-1].time - timed[0].time) / 3600
    last, counted = lines[-(len(lines) // 10) :], lines[LEFT_OUT:]

    def mean(name: str, of: list[MetricsLine]) -> float:
        return round(statistics.mean(line.metrics.get(name, 0.0) for line in of), 3)

    return {
        "steps": len(lines),
        "steps_per_hour": round((len(timed) - 1) / hours, 1),
        "reward": mean("reward/mean", last),
        "trainer_busy": mean("train/busy_fraction", counted),
        "sampling_busy": mean("rollout/busy_fraction", counted),
        "staleness": mean("rollout/staleness_mean", counted),
    }


def call(*words: str, folder: Path) -> None:
    """A command of `grpo-tui` that must succeed, with its runs in `folder`."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    subprocess.run(
        [*GRPO_TUI, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )


if __name__ == "__main__":
    main()
