"""A run that is over goes on in its own folder: commands, files of its lives, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import stat
from contextlib import suppress

import pytest
from workplace import IDLE, Workplace, service, until

from grpo_engine.wire.supervisor import RunState, ServiceState

pytestmark = pytest.mark.slow


def test_a_run_goes_on_in_its_folder_after_any_end_and_keeps_what_each_life_was(place: Workplace) -> None:
    run = place.up(place.recorded(), service("b", IDLE, ends_run="false"))
    folder, first_token = place.run_folder(), (place.run_folder() / "access.token").read_text()
    joined = place.grpo("resume", run, "--detach")
    assert (joined.returncode, joined.stdout) == (0, f"{run}\n")
    refused = place.grpo("resume", run, "--set", "services.b.nice=3")
    assert (refused.returncode, "is live" in refused.stderr) == (4, True)

    os.kill(place.pid(), signal.SIGKILL)  # the run fails: nothing restarts the service
    until(lambda: place.status().state is RunState.FAILED)
    over = place.grpo("start", run, "a")
    assert (over.returncode, f"grpo-tui resume {run}" in over.stderr) == (5, True)
    assert f"INFO    `grpo-tui resume {run}` goes on with it" in place.log()
    (place.folder / "profiles" / "p.toml").unlink()  # a run goes on with its own settings
    resumed = place.grpo("resume", run, "--set", "services.b.nice=3", "--detach", "--wait", "ready")
    assert resumed.returncode == 0, resumed.stderr
    assert f"run {run} resumed" in resumed.stderr
    assert (place.run_folder(), place.service().attempt, place.service().restarts) == (folder, 1, 0)
    assert os.getpriority(os.PRIO_PROCESS, place.pid("b")) == 3

    place.until_written()
    everything = [place.supervisor().pid, *(each.pid for each in place.survivors())]
    for pid in everything:  # at once, as when the machine kills them all
        with suppress(ProcessLookupError):  # a keeper exits with its service
            os.kill(pid, signal.SIGKILL)
    until(lambda: not place.survivors() and not place.supervisors())
    assert f"grpo-tui resume {run}" in place.status().warnings[0].hint
    place.succeed("resume", run, "--detach", "--wait", "ready")
    assert os.getpriority(os.PRIO_PROCESS, place.pid("b")) == 3
    assert len(place.starts()) == 3
    assert place.grpo("resume", run, "--steps", "+5").returncode == 4
    assert f"grpo-tui resume {run}" in place.succeed("down")
    no_trainer = place.grpo("branch", run, "--from", "step_5")
    assert (no_trainer.returncode, "needs one service of kind trainer" in no_trainer.stderr) == (2, True)

    first, second = (folder / "lives" / number for number in "12")
    states = [json.loads((life / "state.json").read_text())["state"] for life in (first, second)]
    assert states == [RunState.FAILED, RunState.RUNNING]
    assert (first / "crash-a-1.txt").exists()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (*first.glob("*.json"), *folder.glob("[prs]*.json"))} == {
        0o600
    }
    services = [json.loads((life / "resolved.json").read_text())["services"]["b"] for life in (first, second)]
    assert [each["nice"] for each in services] == [0, 3]
    assert (folder / "access.token").read_text() != first_token
    assert place.log("a").count("=== attempt 1 ") == 3
    assert [each.state for each in place.status().services] == [ServiceState.STOPPED] * 2
