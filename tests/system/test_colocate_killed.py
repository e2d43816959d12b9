"""A rank of a trainer that samples itself is killed in each phase: the group starts again, and no step is stale."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from workplace import Workplace, until

from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, RunState, ServiceState

LIMIT_S = 240.0
KILLER = """
import os, sys, threading, time
FOLDER = {folder!r}

def dies(owner, method, phase):
    plain = getattr(owner, method)
    def call(*arguments, **named):
        if os.path.exists(name := f"{{FOLDER}}/{{phase}}-{{os.environ.get('RANK')}}"):
            os.rename(name, name + "-done")
            os.kill(os.getpid(), 9)
        return plain(*arguments, **named)
    setattr(owner, method, call)

def patch():
    names = ["grpo_engine.server.torch.in_process", "grpo_engine.train.trainee"]
    while True:
        modules = [sys.modules.get(name) for name in names]
        try:
            engine, trainee = modules[0].TorchInProcess, modules[1].Trainee
        except AttributeError:  # not imported yet
            time.sleep(0.01)
            continue
        dies(engine, "generate", "sampling")
        dies(trainee, "update", "training")
        dies(engine, "load", "syncing")
        return

# Of the launcher, which has no thread when it forks its ranks.
os.register_at_fork(after_in_child=lambda: threading.Thread(target=patch, daemon=True).start())
"""
"""A `sitecustomize` with which a rank kills itself in a phase once a file is there, which it renames before."""


def steps(folder: Path) -> list[MetricsLine]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    complete, _, _ = path.read_bytes().rpartition(b"\n")  # the trainer may be writing the next line
    return [MetricsLine.model_validate_json(line) for line in complete.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.extended("test_a_trainer_samples_every_batch_by_its_newest_weights; tests/engine/train/test_rank_watch.py")
def test_a_rank_that_is_killed_in_any_phase_restarts_the_group_and_no_step_is_stale(
    place: Workplace, tmp_path: Path
) -> None:
    killer = tmp_path / "killer"
    killer.mkdir()
    (killer / "sitecustomize.py").write_text(KILLER.format(folder=str(killer)))
    overrides = (
        *("services.trainer.processes=2", "services.trainer.training_steps=60", "services.trainer.eval_every=0"),
        *("services.trainer.checkpoint_interval=7", "services.trainer.backoff_s=0.1"),
        f"services.trainer.env.PYTHONPATH={killer}",
    )
    flags = [word for override in overrides for word in ("--set", override)]
    place.succeed("up", "--profile", "tiny-colocate", *flags, "--detach", "--wait", "ready", limit_s=LIMIT_S)
    folder = place.run_folder()
    deadline = time.monotonic() + LIMIT_S
    for restarts, (phase, rank) in enumerate((("sampling", 1), ("training", 1), ("syncing", 1), ("training", 0)), 1):
        (killer / f"{phase}-{rank}").touch()
        while place.service("trainer").restarts != restarts:
            assert time.monotonic() < deadline, f"rank {rank} was not killed while it was {phase}, or not restarted"
            time.sleep(0.1)
        assert (killer / f"{phase}-{rank}-done").exists()
        place.until_state(ServiceState.READY, "trainer")
        before = len(steps(folder))
        while len(steps(folder)) < before + 2:
            assert time.monotonic() < deadline, f"no step after rank {rank} was killed while it was {phase}"
            time.sleep(0.05)
    until(lambda: place.status().state in ENDED_RUN_STATES)
    assert place.status().state is RunState.FINISHED
    measured = steps(folder)
    assert [line.step for line in measured] == list(range(1, 61))
    assert {line.metrics["rollout/staleness_max"] for line in measured} == {0.0}
