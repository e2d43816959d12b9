"""Loses a machine of a run whose machines have a parameter service each, and measures until all is as before.

    .venv/bin/python benchmarks/parameter_services.py [--rounds 1] [--json]

`tiny-parameters` on four machines made of namespaces (root), joined by `ray start`: supervisor, trainer, and two
inference servers. The raylet of the second server's machine is killed (`kill -9`), and the machine joins again once the
run has trained on with the other server. These must hold, else the exit code is 1: each machine has the newest version
in its own shared memory; trainer, parameter service and the other server run in their first attempt throughout;
trainer and servers compute the same to 1e-4 in every step; no process and no shared memory is left on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from machines import ClusterWorkplace, join, ray_machines, why_not
from workplace import until

from grpo_engine.wire.supervisor import ServiceState
from grpo_tui.paths import available_profiles

SHARED_MEMORY = "import os; print([name for name in os.listdir('/dev/shm') if name.startswith('grpo-')])"
MOST_DIFFERENCE = 1e-4
PART_LOST = "is lost: parameters ran there"


def main() -> None:
    options = flags().parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(reason)
    folder = Path(tempfile.mkdtemp(prefix="gps-"))
    try:
        with ray_machines(folder, "m1", "m2", "m3", "m4") as place:
            rounds = measured(place, options.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for figures in rounds:
        print(
            "; ".join(f"{name.removesuffix('_s').replace('_', ' ')} {value:.1f} s" for name, value in figures.items())
        )
    if options.json:
        print(json.dumps(rounds, indent=1))


def measured(place: ClusterWorkplace, num_rounds: int) -> list[dict[str, float]]:
    """Seconds of each round, from the kill and from the joining."""
    (place.folder / "profiles").mkdir()
    (place.folder / "profiles" / "p.toml").write_text(available_profiles()["tiny-parameters"].read_text())
    given = {
        "cluster": f"{{kind='ray', address='{place.address}'}}",
        "bridge.push_every": 1,
        "bridge.pull_every": 1,
        "services.parameters.every_machine": "true",
        "services.trainer.num_devices": 1,
        "services.vllm.num_devices": 2,
        "services.trainer.training_steps": 100000,
        "services.trainer.eval_every": 0,
        "services.trainer.max_staleness": 0,
    }
    settings = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    name = place.succeed("up", "--profile", "p", *settings, "--detach", "--wait", "ready", limit_s=600).strip()
    try:
        trains_on(place, name)
        check_versions(place, name)
        rounds = [lose_once(place, name, number) for number in range(2, num_rounds + 2)]
    finally:
        place.succeed("down", name, limit_s=300)
    assert not place.survivors()
    left = {place.on(machine, "python", "-c", SHARED_MEMORY) for machine in place.machines.all}
    assert left == {"[]\n"}, left
    return rounds


def lose_once(place: ClusterWorkplace, name: str, attempt: int) -> dict[str, float]:
    """Lose the machine of the second server and have it join again; `attempt` is that of the server afterwards."""
    lost, losses = place.machines.all[3], lost_parts(place)
    (raylet,) = place.processes(lost, "raylet/raylet ")
    os.kill(raylet.pid, signal.SIGKILL)
    figures = {"lost_s": seconds_until(lambda: lost_parts(place) > losses)}
    figures["three_steps_without_it_s"] = trains_on(place, name)
    join(place, lost)
    began = time.monotonic()
    figures["newest_version_there_s"] = seconds_until(lambda: fetched(place) > losses)
    until(lambda: (now := place.service("vllm-2")).attempt == attempt and now.state is ServiceState.READY)
    figures["server_ready_s"] = time.monotonic() - began
    until(lambda: steps(place, name)[-1].get("sync/num_servers") == 2.0)
    figures["step_with_both_servers_s"] = time.monotonic() - began
    check_versions(place, name)
    return figures


def check_versions(place: ClusterWorkplace, name: str) -> None:
    """Where versions are, who was restarted, and whether trainer and servers compute the same."""
    assert place.service("parameters").machines == ["m2", "m3", "m4"]
    for machine in place.machines.all[1:]:
        current = os.readlink(place.folder / "logs" / name / "handover" / machine.name / "current")
        assert current.startswith("/dev/shm/"), current
    attempts = {each: place.service(each).attempt for each in ("trainer", "parameters", "vllm")}
    assert attempts == {"trainer": 1, "parameters": 1, "vllm": 1}, attempts
    assert max(each["alignment/diff_abs_mean"] for each in steps(place, name)) < MOST_DIFFERENCE
    assert {each["rollout/staleness_max"] for each in steps(place, name)} == {0.0}


def trains_on(place: ClusterWorkplace, name: str) -> float:
    """Seconds until three more steps were trained."""
    before = len(steps(place, name))
    return seconds_until(lambda: len(steps(place, name)) >= before + 3)


def seconds_until(holds: Callable[[], bool]) -> float:
    began = time.monotonic()
    until(holds)
    return time.monotonic() - began


def lost_parts(place: ClusterWorkplace) -> int:
    return place.log("parameters").count(PART_LOST)


def fetched(place: ClusterWorkplace) -> int:
    """How often the part that was lost was started again and has fetched a version."""
    parts = place.log("parameters").split(PART_LOST)
    return sum(
        any(line.startswith("m4: ") and "fetched from" in line for line in part.splitlines()) for part in parts[1:]
    )


def steps(place: ClusterWorkplace, name: str) -> list[dict[str, float]]:
    """The metrics of each step."""
    try:
        lines = (place.folder / "logs" / name / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line)["metrics"] for line in lines]


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    main()
