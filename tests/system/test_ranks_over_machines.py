"""Ranks of a trainer on several machines of a real Ray cluster: what they train, and what a kill and a loss cost."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest
from machines import ray_machines, why_not
from ports import free_port
from workplace import Workplace, until

from grpo_engine.wire.supervisor import RunState, ServiceState, ServiceStatus
from grpo_tui.keeper_process import Stat
from grpo_tui.paths import available_profiles
from grpo_tui.profile.cluster import has_ray
from grpo_tui.supervisor.keeper.proc import command_line, identify

pytestmark = [
    pytest.mark.skipif(not has_ray(), reason="Ray is not installed"),
    pytest.mark.extended("test_cluster_parts.py has the same with other programs and a cluster in this process"),
    pytest.mark.timeout(900),
]
NUM_STEPS = 12


def tiny(place: Workplace, **settings: object) -> list[str]:
    """Flags that start `tiny-ray` with a trainer of two ranks, on machines of one device each."""
    (place.folder / "profiles").mkdir(exist_ok=True)
    (place.folder / "profiles" / "p.toml").write_text(available_profiles()["tiny-ray"].read_text())
    place.ports += [free_port(), free_port()]
    given = {
        "services.api.port": place.ports[-2],
        "services.vllm.port": place.ports[-1],
        "services.trainer.num_devices": 2,
        "services.trainer.eval_every": 0,
        "services.trainer.batch_size": 32,
        "services.trainer.gradient_accumulation_steps": 2,
        "cluster.machines": 3,
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    flags = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    return ["up", "--profile", "p", *flags, "--detach"]


def steps(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line)["metrics"] for line in lines]


def ranks(place: Workplace) -> list[tuple[int, str | None]]:
    """The ranks that the status has figures of, with their machines."""
    return [(each.rank, each.machine) for each in place.service("trainer").ranks if each.rss_bytes]


def processes(place: Workplace, words: str) -> list[Stat]:
    return [each for each in place.survivors() if words in command_line(each.pid)]


def test_a_killed_rank_and_a_lost_machine_start_all_ranks_again_and_training_goes_on(place: Workplace) -> None:
    settings = {"services__trainer__restart": "on-failure", "services__trainer__backoff_s": 0.2}
    settings |= {"services__trainer__training_steps": 100000, "services__trainer__checkpoint_interval": 2}
    place.succeed(*tiny(place, **settings, cluster__machines=4), "--wait", "ready", "--timeout", "400", limit_s=500)
    folder = place.run_folder()

    def trainer() -> ServiceStatus:
        return place.service("trainer")

    def trains_on(attempt: int) -> None:
        until(lambda: (now := trainer()).attempt >= attempt and now.state is ServiceState.READY)
        before = len(steps(folder))
        until(lambda: len(steps(folder)) > before)

    trains_on(1)
    until(lambda: ranks(place) == [(0, "machine-1"), (1, "machine-2")])
    assert trainer().machines == ["machine-1", "machine-2"]
    assert (trainer().rss_bytes or 0) > sum(each.rss_bytes or 0 for each in trainer().ranks) > 0

    first = [each.pid for each in trainer().ranks]
    os.kill(first[1], signal.SIGKILL)
    until(lambda: trainer().attempt == 2)
    assert f"machine-2: rank 1 (process {first[1]}) was killed by SIGKILL" in place.log()
    trains_on(2)
    assert all(identify(pid) is None for pid in first)

    os.kill(place.pid("machines"), signal.SIGKILL)
    until(lambda: (now := place.service("machines")).attempt == 2 and now.state is ServiceState.READY)
    trains_on(2)

    (raylet,) = processes(place, "machine-2,1")
    os.kill(raylet.pid, signal.SIGKILL)
    until(lambda: trainer().attempt >= 3)  # one more, where it started again before the machine was given up
    until(lambda: "machine-2 (127.0.0.1) is lost, and with it trainer" in place.log())
    trains_on(3)
    until(lambda: len(ranks(place)) == 2)
    where = [machine for _, machine in ranks(place)]
    assert where[0] == "machine-1"
    assert where[1] in ("machine-2", "machine-4")

    (agent, *_) = processes(place, "placement.agent")
    os.kill(agent.pid, signal.SIGKILL)
    trains_on(trainer().attempt)
    place.kill_supervisor()
    place.succeed("down", limit_s=200)  # another supervisor takes it over
    assert place.status().state is RunState.STOPPED
    assert not place.survivors()


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_ranks_that_meet_over_a_network_train_the_parameters_of_ranks_on_one_machine(tmp_path: Path) -> None:
    def trained(run: str) -> tuple[list[tuple[float, float]], str]:
        folder = tmp_path / "logs" / run
        model = folder / "checkpoints" / f"step_{NUM_STEPS}" / "model.safetensors"
        curve = [(each["train/loss"], each["train/grad_norm"]) for each in steps(folder)]
        assert all(f"rank/{rank}/step_time" in each for rank in (0, 1) for each in steps(folder))
        return curve, hashlib.sha256(model.read_bytes()).hexdigest()

    same = {"services__env__seed_completions": "true", "services__env__max_workers": 1, "bridge__every_steps": 1}
    same |= {"services__trainer__max_staleness": 0, "services__trainer__training_steps": NUM_STEPS}
    with ray_machines(tmp_path, "m1", "m2", "m3", "m4") as place:
        flags = tiny(place, **same, cluster__address=place.address)
        over = place.succeed(*flags, "--wait", "ready", "--timeout", "400", limit_s=500).strip()
        until(lambda: ranks(place) == [(0, "m2"), (1, "m3")])
        assert place.service("trainer").machines == ["m2", "m3"]
        until(lambda: place.status().state is RunState.FINISHED)
        assert not place.survivors()
        alone = place.succeed(*tiny(place, **same, cluster__kind="local"), "--wait", "finished", limit_s=400).strip()
    assert "m3: " in (tmp_path / "logs" / over / "trainer.log").read_text()
    assert len(trained(over)[0]) == NUM_STEPS
    assert trained(over) == trained(alone)
