"""Which GPUs a launch uses: those it names, or those that CUDA_VISIBLE_DEVICES leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_tui.services.base import Place
from grpo_tui.services.command import Command
from grpo_tui.services.visible_gpus import gpus_of

UUIDS = {0: "GPU-aaaa", 1: "GPU-bbbb", 2: "GPU-bbcc"}
PLACE = Place(profile_folder=Path(), run_folder=Path(), python="python3")


def taken(inherited: str | None = None, **settings: object) -> list[int]:
    """The GPUs of a command with these settings, started where CUDA_VISIBLE_DEVICES is inherited."""
    command = Command.model_validate({"kind": "command", "argv": ["true"], **settings})
    environment = {} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited}
    return gpus_of(command.launch("a", PLACE), UUIDS, environment)


def test_named_gpus_are_used_where_they_exist_whatever_is_inherited() -> None:
    assert taken("2", gpus=[1, 0, 7]) == [1, 0]


def test_a_launch_without_gpus_and_memory_share_uses_none() -> None:
    assert taken() == []


@pytest.mark.parametrize(
    ("inherited", "first"),
    [
        (None, [0]),
        ("2,1", [2]),
        ("GPU-bb,0", [1]),
        (" 1", [1]),
        ("", []),
        ("-1", []),
        ("7,0", []),
        ("MIG-1234", []),
    ],
)
def test_a_launch_without_gpus_and_with_a_memory_share_uses_the_first_visible_one(
    inherited: str | None, first: list[int]
) -> None:
    assert taken(inherited, gpu_memory_share=0.5) == first


def test_the_environment_of_the_service_overrides_the_inherited_one() -> None:
    assert taken("2", gpu_memory_share=0.5, env={"CUDA_VISIBLE_DEVICES": "1"}) == [1]
    assert taken("2", gpu_memory_share=0.5, gpus=[]) == []
