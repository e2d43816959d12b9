"""Hooks in a profile: their services exist, and the plan carries them to the daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_engine.errors import ConfigError
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import make_plan
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.hook import HookEvent

PROFILE = """
[services.trainer]
kind = "command"
argv = ["true"]
[[hooks]]
on = ["finished"]
argv = ["./archive"]
[[hooks]]
on = ["failed", "restarted"]
services = ["trainer"]
argv = ["./notify", "--loud"]
timeout_s = 5
"""


def test_a_hook_names_services_of_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(PROFILE.replace('services = ["trainer"]', 'services = ["trainr"]'))
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    assert str(caught.value) == (f"{path}: hooks.1.services: 'trainr' is not a service here (did you mean 'trainer'?)")


def test_the_plan_that_a_daemon_reads_has_the_hooks_and_their_folder(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(PROFILE)
    plan = Plan.from_json(make_plan(load(str(path)), run_folder=tmp_path / "run", python="python").to_json())
    assert plan.profile_folder == tmp_path
    assert [hook.argv for hook in plan.hooks] == [("./archive",), ("./notify", "--loud")]
    assert plan.hooks[1].on == (HookEvent.FAILED, HookEvent.RESTARTED)
    assert plan.hooks[1].timeout_s == 5
