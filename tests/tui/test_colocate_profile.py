"""The profile of a trainer that samples itself: what it has, what it refuses, and what the screen knows of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_engine.errors import ConfigError
from grpo_engine.wire.environment_variables import RESTARTS_VARIABLE
from grpo_engine.wire.run_folder import item_state_file
from grpo_tui.profile.loaded import resolved
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import make_plan
from grpo_tui.view.run_settings import settings_of

SERVER = ["services.vllm.kind=inference", "services.vllm.engine=torch"]


def test_one_service_of_so_many_ranks_is_all_that_there_is(tmp_path: Path) -> None:
    loaded = load("tiny-colocate", ["services.trainer.processes=2"])
    [launch] = make_plan(loaded, run_folder=tmp_path, python=sys.executable).launches
    assert launch.num_ranks == 2
    assert launch.argv[-2:] == ("--state-file", str(item_state_file(tmp_path, "trainer")))
    assert launch.restart_in_place is not None
    assert launch.env[RESTARTS_VARIABLE] == str(launch.restart_in_place.file)


def test_a_trainer_of_one_process_has_no_launcher_that_could_restart_it_in_place(tmp_path: Path) -> None:
    [launch] = make_plan(load("tiny-colocate", []), run_folder=tmp_path, python=sys.executable).launches
    assert launch.restart_in_place is None
    assert RESTARTS_VARIABLE not in launch.env


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["services.api.kind=rollout_api"], "nothing would use this service: remove it"),
        (SERVER, "nothing would use this service: remove it"),
        (["services.trainer.environment.group_size=7"], "not a multiple of group_size 7"),
        (["services.trainer.environment.tsk=copy6"], "did you mean 'task'"),
        (["bridge.mode=none"], "environment: .* has no effect with weight_bridge_mode none"),
    ],
)
def test_what_a_trainer_that_samples_cannot_use_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load("tiny-colocate", overrides)


def test_the_screen_knows_how_it_samples() -> None:
    settings = settings_of(resolved(load("tiny-colocate", ["bridge.adapter=true"])))
    assert (settings.temperatures, settings.logprobs_mode) == ((1.0,), "processed")
    assert settings.trains_adapter
