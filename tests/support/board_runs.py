"""Folders of many runs made of one recorded run: a sweep over learning rates and seeds, and runs beside it.

Metrics are the recorded ones with a shift and noise; names, settings and states are made up. Good enough because the
board knows runs only from these files.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_engine.wire.run_folder import METRICS_FILE, PLAN_FILE, RESOLVED_FILE, STATE_FILE, SWEEP_FILE, SWEEPS

RATES = {1e-4: -0.12, 3e-4: 0.0, 1e-3: -0.05}
"""Learning rates of the sweep, and what each adds to the reward at the end."""
SEEDS = 3
COPIED = (PLAN_FILE, STATE_FILE, RESOLVED_FILE, METRICS_FILE, "trainer.log", "events.jsonl")


def copied_run(
    recorded: Path, folder: Path, *, settings: Mapping[str, Any], gain: float = 0.0, num_steps: int | None = None,
    state: Mapping[str, Any] | None = None, began_at: float | None = None,
) -> Path:  # fmt: skip
    """A copy of a recorded run with these settings of services, whose reward ends so much higher."""
    folder.mkdir(parents=True)
    for name in COPIED:
        shutil.copy(recorded / name, folder / name)
    noise = random.Random(folder.name)
    lines = [json.loads(line) for line in (recorded / METRICS_FILE).read_text().splitlines()][:num_steps]
    for line in lines:
        share = line["step"] / max(1, lines[-1]["step"])
        for name in line["metrics"]:
            if name in ("reward/mean", "eval/avg@4"):
                line["metrics"][name] += gain * share + noise.gauss(0.0, 0.012)
    (folder / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    resolved = json.loads((recorded / RESOLVED_FILE).read_text())
    for key, value in settings.items():
        service, _, name = key.removeprefix("services.").partition(".")
        resolved["services"][service][name] = value
    (folder / RESOLVED_FILE).write_text(json.dumps(resolved))
    document = json.loads((recorded / STATE_FILE).read_text())
    shift = 0.0 if began_at is None else began_at - document["started_at"]
    document |= {"run": folder.name, "started_at": document["started_at"] + shift, **(state or {})}
    if document.get("ended_at") is not None:
        document["ended_at"] += shift
    (folder / STATE_FILE).write_text(json.dumps(document))
    for name in (PLAN_FILE, STATE_FILE):
        os.utime(folder / name, (document["started_at"],) * 2)
    return folder


def make_sweep(recorded: Path, logs: Path, *, name: str = "rates", began_at: float = 1_763_990_000.0) -> list[Path]:
    """A sweep of three learning rates with three seeds, all finished, with its table."""
    points, folders = [], []
    for number, (rate, seed) in enumerate(((rate, seed) for rate in RATES for seed in range(SEEDS)), start=1):
        settings = {"services.trainer.lr": rate, "services.env.seed": seed, "services.trainer.seed": seed}
        began = began_at + 90.0 * number
        folder = logs / f"tiny-cpu-1124-0100{number:02}-{number:04x}"
        copied_run(recorded, folder, settings=settings, gain=RATES[rate], began_at=began)
        mark = {"sweep": name, "id": "0011", "point": number, "pruned": None}
        (folder / SWEEP_FILE).write_text(json.dumps(mark))
        folders.append(folder)
        row = {"point": number, "settings": {"services.trainer.lr": rate}, "seed": seed, "state": "finished"}
        points.append({**row, "run": folder.name})
    best = {"settings": {"services.trainer.lr": 3e-4}, "reward": 0.94, "reward_error": 0.004, "score": 0.913,
            "score_error": 0.007}  # fmt: skip
    folder = logs / SWEEPS / name
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"sweep": name, "settings": [best], "points": points}))
    (folder / "sweep.toml").write_text('profile = "tiny-cpu"\n')
    os.utime(folder / "sweep.toml", (began_at, began_at))
    return folders


def make_runs(recorded: Path, logs: Path, num: int, *, began_at: float = 1_763_900_000.0) -> Iterator[Path]:
    """Runs that ended in several ways, an hour apart."""
    for number in range(num):
        loss = ("grpo", "dapo", "gspo", "dr_grpo")[number % 4]
        steps = (150, 150, 97, 40)[number % 4]
        ends = (
            {}, {"state": "stopped"},
            {"state": "failed", "services": _failed(recorded, "CUDA out of memory: tried to allocate 2.1 GiB")},
            {"state": "finished"},
        )[number * 7 // 3 % 4]  # fmt: skip
        folder = logs / f"tiny-cpu-1123-{number:06}-{number:04x}"
        settings = {"services.trainer.loss": loss, "services.trainer.lr": 3e-4 * (1 + number % 3)}
        gain = 0.05 * math.sin(number) - 0.05
        yield copied_run(recorded, folder, settings=settings, gain=gain, num_steps=steps, state=ends,
                         began_at=began_at + 3600.0 * number)  # fmt: skip


def _failed(recorded: Path, why: str) -> list[dict[str, Any]]:
    services: list[dict[str, Any]] = json.loads((recorded / STATE_FILE).read_text())["services"]
    return [{**each, "state": "failed", "why": why} if each["name"] == "trainer" else each for each in services]
