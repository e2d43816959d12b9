"""Environments of Atropos in a profile: what they are handed, and what cannot work with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_engine.environments.atropos.config import AtroposEnvConfig
from grpo_engine.errors import ConfigError
from grpo_engine.flags import parse_flags
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import make_plan

STACK = """
[model]
name = "local/tiny"
[services.api]
kind = "rollout_api"
port = 8111
[services.vllm]
kind = "inference"
port = 9111
[services.env]
kind = "atropos_environment"
file = "env.py"
python = "~/venv/bin/python"
group_size = 4
settings = { lr = 1e-5 }
[services.trainer]
kind = "trainer"
training_steps = 120
batch_size = 8
gradient_accumulation_steps = 1
"""


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "p.toml"
    path.write_text(STACK)
    return str(path)


def test_model_and_urls_are_passed_on_and_settings_are_in_the_run_folder(profile: str, tmp_path: Path) -> None:
    plan = make_plan(load(profile), run_folder=tmp_path / "run", python=sys.executable)
    (launch,) = [each for each in plan.launches if each.name == "env"]
    assert launch.argv[1:5] == ("-P", "-m", "grpo_engine", "atropos-env")
    settings = parse_flags(AtroposEnvConfig, launch.argv[5:], prog="env", description="")
    assert (settings.model_name, settings.settings) == ("local/tiny", {"lr": 1e-5})
    assert settings.rollout_server_url == "http://127.0.0.1:8111"
    assert settings.inference_urls == ("http://127.0.0.1:9111",)
    assert settings.python == Path.home() / "venv/bin/python"
    assert settings.yaml_file == tmp_path / "run" / "env.yaml"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("services.api.allow_without_token=true services.api.token=x", "allow_without_token is set, and so is a token"),
        ("services.env.total_steps=100", "services.env.total_steps=100: 100, but the trainer runs 120"),
        ("services.env.group_size=3", "not a multiple of the environment's group_size 3"),
        ("services.env.settings.wandb_name=x", "settings.wandb_name is name here: set name = 'x' instead"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_a_start(profile: str, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(profile, override.split())
    assert said in str(refusal.value)


@pytest.mark.parametrize("override", ["services.env.total_steps=-1", "services.env.total_steps=120"])
def test_an_environment_with_as_many_steps_as_the_trainer_is_accepted(profile: str, override: str) -> None:
    assert load(profile, [override])
