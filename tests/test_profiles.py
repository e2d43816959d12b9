"""Every profile that ships is valid, says what it is for, and gives the commands that its services accept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.flags import parse_flags
from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.server.config import ServerConfig
from grpo_engine.train.config import TrainConfig
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import Plan, make_plan

PROFILES = sorted((Path(__file__).parents[1] / "profiles").glob("*.toml"))
SETTINGS = {"api": ApiConfig, "server": ServerConfig, "env": EnvironmentConfig, "train": TrainConfig}


def test_the_documented_profiles_are_there() -> None:
    assert {"tiny-cpu", "smollm-cpu", "hermes8b-shared"} <= {path.stem for path in PROFILES}


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_opens_with_hardware_memory_and_when_to_choose_it(path: Path) -> None:
    head = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert "Hardware:" in head
    assert "Memory:" in head
    assert "Choose it" in head


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_is_valid_and_has_a_description(path: Path) -> None:
    assert load(str(path)).profile.description


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_the_commands_of_a_plan_are_accepted_by_the_services_they_start(path: Path, tmp_path: Path) -> None:
    plan = make_plan(load(str(path)), run_folder=tmp_path, python=sys.executable)
    for launch in plan.launches:
        if launch.argv[1:3] == ("-m", "grpo_engine"):
            parse_flags(SETTINGS[launch.argv[3]], launch.argv[4:], prog=launch.name, description="")


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_plan_survives_its_file(path: Path, tmp_path: Path) -> None:
    plan = make_plan(load(str(path)), run_folder=tmp_path, python=sys.executable)
    assert Plan.from_json(plan.to_json()) == plan
