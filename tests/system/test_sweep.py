"""Sweeps of real runs of small commands, whose metrics are read from what they print."""

from __future__ import annotations

import csv
import json
import os

import pytest
from workplace import Workplace, service, until

TRAINER = """
import glob, os, re, signal, sys, time
value, go_on = os.environ["VALUE"], sys.argv[1]
if value == "bad": sys.exit("bad value")
def another_is_at_3():
    files = glob.glob(os.path.join(os.path.dirname(go_on), "logs", "*", "metrics.jsonl"))
    return any(re.search('"step": ?3[^0-9]', open(file).read()) for file in files)
for step in range(1, 4):
    while step == 3 and value == "0.2" and os.path.exists(go_on) and not another_is_at_3(): time.sleep(0.01)
    print(f"Step {step}/3\\n  reward {value}", flush=True)
if value == "0.2" or (value == "0.9" and not os.path.exists(go_on)): signal.pause()
"""
"""Prints the reward that it is given, three times; with 0.2 it waits for a signal, and with 0.9 unless a file is there.

While that file is there, 0.2 reaches step 3 after another one: a run is compared with those that were there before it.
"""
GPU = 6
"""Of no other test of this folder: runs see each other on the whole machine, and share no GPU."""
CONSOLE = "{ step = '^Step ([0-9]+)', 'reward/mean' = 'reward ([0-9.]+)' }"


def profile(place: Workplace) -> None:
    place.profile(service("t", TRAINER, place.folder / "go-on", console=CONSOLE, env="{ VALUE = '0.1' }"))


def points(place: Workplace, name: str = "s") -> list[dict[str, str]]:
    return table(place, f"{name}/points.csv")


def table(place: Workplace, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((place.folder / "logs/sweeps" / name).read_text().splitlines()))


def test_a_sweep_refuses_a_wrong_key_at_once_keeps_a_failed_point_and_ends_a_hopeless_one_early(
    place: Workplace,
) -> None:
    profile(place)
    command = ("sweep", "--profile", "p", "--name", "s", "--jobs", 2)
    refused = place.grpo(*command, "--set", "services.t.env.VALUE='0.2','0.3'", "--set", "services.t.evn.VALUE=1")
    assert refused.returncode == 2
    assert "unknown setting (did you mean 'env'?)" in refused.stderr
    assert not (place.folder / "logs").exists()

    (place.folder / "go-on").touch()
    values = "services.t.env.VALUE=bad,'0.9','0.2'"  # the last one never ends by itself
    done = place.grpo(*command, "--set", values, "--halving", "eta=2,min_steps=3")
    assert done.returncode == 1
    assert [row["services.t.env.VALUE"] for row in points(place)] == ["bad", "0.9", "0.2"]
    assert [row["state"] for row in points(place)] == ["failed", "finished", "pruned"]
    assert points(place)[0]["reason"].startswith("t: exit code 1")
    why = "reward 0.200 at step 3 was number 2 of 2 there, of which the best one goes on"
    assert points(place)[2]["reason"] == why
    assert f"t.env.VALUE=0.2: pruned: {why}" in done.stderr
    assert f"pruned: {why}" in {row["reason"] for row in table(place, "s/results.csv")}
    best = table(place, "s/results.csv")[0]
    assert (best["services.t.env.VALUE"], best["reward"]) == ("0.9", "0.9")
    assert done.stdout.splitlines()[1].split()[:3] == ["0.9", "1/1", "0.900"]
    runs = {row["run"] for row in json.loads(place.succeed("ps", "--json"))}
    assert runs == {row["run"] for row in points(place)}
    again = place.grpo(*command, "--set", "services.t.env.VALUE='0.2'")
    assert again.returncode == 4
    assert "sweep s exists: `grpo-tui sweep resume s` goes on with it, --name OTHER starts another" in again.stderr
    assert "sweep s was complete; nothing of it is left to stop" in place.grpo("sweep", "stop").stderr
    until(lambda: not place.supervisors())


@pytest.mark.extended("a sweep in the foreground, and runs that are detached")
def test_a_detached_sweep_goes_on_without_a_terminal_until_it_is_complete(place: Workplace) -> None:
    profile(place)
    command = ("sweep", "--profile", "p", "--name", "s", "--set", "services.t.env.VALUE='0.9','0.5'", "--detach")
    started = json.loads(place.succeed(*command, "--json"))
    until(lambda: bool(place.supervisors()))
    assert os.getsid(started["pid"]) == started["pid"]
    refused = place.grpo("sweep", "resume", "s", "--detach")
    assert refused.returncode == 1
    assert f"sweep s is running (pid {started['pid']})" in refused.stderr
    assert "is running" in place.grpo("sweep", "status").stderr
    place.succeed("sweep", "stop")
    assert "is not running; `grpo-tui sweep resume s`" in place.grpo("sweep", "status").stderr
    (place.folder / "go-on").touch()
    place.succeed("sweep", "resume", "--detach")
    until(lambda: json.loads(place.succeed("sweep", "status", "--json"))["is_complete"])
    assert "is complete" in place.grpo("sweep", "status").stderr
    assert [row["state"] for row in points(place)] == ["finished", "finished"]
    assert "REWARD" in (place.folder / "logs/sweeps/s/sweep.log").read_text()
    assert place.succeed("compare", "--sweep", "s", "--format", "svg").count("<polyline") == 2
    until(lambda: not place.supervisors())


@pytest.mark.extended("which points Optuna may choose is checked before anything starts")
def test_a_sweep_by_optuna_goes_on_after_kill_9_and_chooses_as_many_points_as_asked(place: Workplace) -> None:
    profile(place)
    value = "services.t.env.VALUE=uniform(0.1,0.5)"
    refused = place.grpo("sweep", "--profile", "p", "--optuna", 4, "--set", value, "--set", "services.t.evn.X=1")
    assert refused.returncode == 2
    assert not (place.folder / "logs").exists()
    sweep = place.start("sweep", "--profile", "p", "--name", "s", "--optuna", 4, "--set", value, "--jobs", 2)
    chosen = place.folder / "logs/sweeps/s/chosen.json"
    until(lambda: chosen.exists() and len(json.loads(chosen.read_text())["combinations"]) >= 2)
    sweep.kill()
    sweep.communicate()
    first = json.loads(chosen.read_text())["combinations"]
    place.succeed("sweep", "resume", "s")
    assert json.loads(chosen.read_text())["combinations"][: len(first)] == first
    assert [row["state"] for row in points(place)] == ["finished"] * 4
    for row in points(place):
        assert float(row["reward"]) == pytest.approx(float(row["services.t.env.VALUE"]))  # the mean of equal numbers
    until(lambda: not place.supervisors())


@pytest.mark.extended("starts in the queue get a port in their order, in test_leases")
def test_a_point_that_waits_for_a_gpu_has_its_place_in_the_queue_of_all_starts(place: Workplace) -> None:
    place.profile(service("t", TRAINER, place.folder / "go-on", console=CONSOLE, env="{ VALUE = '0.1' }", gpus=[GPU]))
    values = "services.t.env.VALUE='0.9','0.1'"
    sweep = place.start("sweep", "--profile", "p", "--name", "s", "--jobs", 2, "--set", values)
    until(lambda: f"the start of p (pid {sweep.pid})" in place.grpo("ps").stderr)
    (row,) = json.loads(place.succeed("ps", "--json"))
    place.succeed("down", row["run"])
    err = sweep.communicate(timeout=60)[1]
    assert sweep.returncode == 0
    assert f"waits: GPU {GPU} is used by run {row['run']} (t)" in err
    assert [point["state"] for point in points(place)] == ["stopped", "finished"]
    assert "the start of" not in place.grpo("ps").stderr
    until(lambda: not place.supervisors())


@pytest.mark.extended("the GPUs of points, in test_sweep_grid, and the refusal of a GPU that is taken, in test_leases")
def test_points_of_a_sweep_divide_its_gpus_and_the_next_takes_the_one_that_is_free(place: Workplace) -> None:
    place.profile(service("t", TRAINER, place.folder / "go-on", console=CONSOLE, env="{ VALUE = '0.1' }", gpus=[0]))
    values = "services.t.env.VALUE='0.9','0.2','0.1'"
    sweep = place.start("sweep", "--profile", "p", "--name", "s", "--gpus", "3,5", "--set", values)

    def gpus() -> dict[int, str]:
        rows = json.loads(place.succeed("ps", "--json"))
        return {row["gpus"][0]: row["run"] for row in rows if row["is_live"] and row.get("gpus")}

    until(lambda: len(gpus()) == 2)
    assert gpus().keys() == {3, 5}
    place.succeed("down", gpus()[3])
    until(lambda: points(place)[2]["state"] == "finished")
    (third,) = (row for row in json.loads(place.succeed("ps", "--json")) if row["run"] == points(place)[2]["run"])
    assert third["gpus"] == [3]
    place.succeed("down", gpus()[5])
    sweep.communicate(timeout=60)
    assert sweep.returncode == 0
    until(lambda: not place.supervisors())
