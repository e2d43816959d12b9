"""With `max_staleness = 0` a run of real processes takes turns to its end, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from workplace import Workplace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.extended("test_rollouts_slots.py: the same rules, with every kill, against a model"),
]

STEPS = 24
LIMIT_S = 180.0


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    complete, _, _ = path.read_bytes().rpartition(b"\n")  # the trainer may be writing the next line
    return [json.loads(line) for line in complete.splitlines()]


def until_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (seen := lines(folder)) or seen[-1]["step"] < step:
        assert time.monotonic() < deadline, f"step {step} was not reached: {len(seen)} lines"
        time.sleep(0.05)


def test_every_step_trains_on_what_its_own_weights_sampled(place: Workplace) -> None:
    settings = (
        *("--set", "services.trainer.max_staleness=0", "--set", f"services.trainer.training_steps={STEPS}"),
        *("--set", "services.trainer.eval_every=0", "--set", "services.trainer.restart=on-failure"),
    )
    run = place.succeed(
        "up", "--profile", "tiny-cpu", "--new", *settings, "--detach", "--wait", "ready", limit_s=LIMIT_S
    ).strip()
    folder = place.folder / "logs" / run
    for number, name in enumerate(("env", "api", "trainer")):
        until_step(folder, 6 * number + 4)
        status = json.loads(place.succeed("status", run, "--json"))
        os.kill(next(each["pid"] for each in status["services"] if each["name"] == name), signal.SIGKILL)
    until_step(folder, STEPS)
    measured = lines(folder)
    assert [line["step"] for line in measured] == list(range(1, STEPS + 1))
    assert {line["metrics"]["rollout/staleness_max"] for line in measured} == {0.0}
