"""The environment as a service: what it keeps of its items between its starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_tui.services.base import Place
from grpo_tui.services.environment import Environment

PLACE = Place(profile_folder=Path("/profiles"), run_folder=Path("/runs/one"), python="python3")


def state_file(**settings: object) -> str | None:
    """What the command line of an environment called `env` says of it."""
    table = {"kind": "environment", "task": "arithmetic", "model_name": "unused", **settings}
    argv = Environment.model_validate(table).launch("env", PLACE).argv
    return argv[argv.index("--state-file") + 1] if "--state-file" in argv else None


@pytest.mark.parametrize("learning", [{"curriculum": "rising"}, {"easy_threshold": 1}, {"hard_threshold": 0}])
def test_what_is_learned_of_items_is_kept_in_the_run_folder(learning: dict[str, object]) -> None:
    assert state_file(**learning) == "/runs/one/env.items.json"
    assert state_file(**learning, state_file="/mine.json") == "/mine.json"


def test_an_environment_that_learns_nothing_of_its_items_keeps_nothing() -> None:
    assert state_file() is None
