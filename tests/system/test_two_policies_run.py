"""The profile tiny-two-policies: two policies play one game, and each learns its own objective from it."""

from __future__ import annotations

import json

import pytest
from workplace import Workplace

STEPS = 8


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.extended("test_environments_two_policies in tests/engine and test_two_policies_profile in tests/tui")
def test_two_policies_of_one_game_learn_opposite_objectives(place: Workplace) -> None:
    steps = [f"services.{name}.training_steps={STEPS}" for name in ("trainer", "trainer-mafia")]
    up = [word for each in steps for word in ("--set", each)]
    place.succeed("up", "--new", "--profile", "tiny-two-policies", *up, "--wait", "finished", limit_s=300)
    run = place.run_folder().name
    lengths = {}
    for side, policy in (("town", ()), ("mafia", ("--policy", "mafia"))):
        lines = place.succeed("metrics", run, "--json", *policy).splitlines()
        lengths[side] = [json.loads(line)["metrics"]["rollout/length_mean"] for line in lines]
        assert len(lengths[side]) == STEPS
    assert lengths["town"][-1] < lengths["town"][0]
    assert lengths["mafia"][-1] > 3 * lengths["mafia"][0]
    place.succeed("export", run, "mafia", "--policy", "mafia", limit_s=120)
    assert "| completions per step | 8 |" in (place.folder / "mafia" / "README.md").read_text()
    place.succeed("resume", run, "--steps", "+2", "--wait", "finished", limit_s=200)
    for policy in ((), ("--policy", "mafia")):
        lines = place.succeed("metrics", run, "--json", *policy).splitlines()
        assert json.loads(lines[-1])["step"] == STEPS + 2
