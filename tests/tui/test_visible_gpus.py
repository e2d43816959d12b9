"""Which GPUs a launch uses: those it names, or those that CUDA_VISIBLE_DEVICES leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_tui.services.base import Place
from grpo_tui.services.command import Command
from grpo_tui.services.visible_gpus import gpus_of

UUIDS = {0: "GPU-aaaa", 1: "GPU-bbbb", 2: "GPU-bbcc"}
PLACE = Place(profile_folder=Path(), run_folder=Path(), python="python3")


SHARE: dict[str, object] = {"gpu_memory_share": 0.5}


@pytest.mark.parametrize(
    ("inherited", "settings", "expected"),
    [
        ("2", {"gpus": [1, 0, 7]}, [1, 0]),
        (None, {}, []),
        (None, SHARE, [0]),
        ("2,1", SHARE, [2]),
        ("GPU-bb,0", SHARE, [1]),
        (" 1", SHARE, [1]),
        ("", SHARE, []),
        ("-1", SHARE, []),
        ("7,0", SHARE, []),
        ("MIG-1234", SHARE, []),
        ("2", {**SHARE, "env": {"CUDA_VISIBLE_DEVICES": "1"}}, [1]),
        ("2", {**SHARE, "gpus": []}, []),
    ],
)
def test_a_launch_uses_the_gpus_it_names_or_with_a_memory_share_the_first_visible_one(
    inherited: str | None, settings: dict[str, object], expected: list[int]
) -> None:
    command = Command.model_validate({"kind": "command", "argv": ["true"], **settings})
    environment = {} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited}
    assert gpus_of(command.launch("a", PLACE), UUIDS, environment) == expected
