"""Every profile that ships is valid, says what it is for, and gives the commands that its services accept."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from grpo_engine.environments.atropos.config import AtroposEnvConfig
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.flags import parse_flags
from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.server.config import ServerConfig
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.dry_run import model_shape
from grpo_engine.train.memory_plan import Card, MemoryPlan, available_bytes, memory_plan
from grpo_engine.train.objective import settings_without_effect
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import Plan, make_plan

PROFILES = sorted((Path(__file__).parents[1] / "profiles").glob("*.toml"))
HERMES_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
H200_BYTES, H100_BYTES = 150_100_000_000, 84_900_000_000
"""What torch calls the memory of the cards that are sold with 141 and 80 GB."""
HERMES_8B_PARAMETERS = 8_030_261_248
ROOM_BYTES = 1_500_000_000
SETTINGS = {
    "api": ApiConfig,
    "server": ServerConfig,
    "env": EnvironmentConfig,
    "atropos-env": AtroposEnvConfig,
    "train": TrainConfig,
}


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


def hermes_sets() -> list[tuple[str, ...]]:
    """The groups of `--set` in the head of the profile, each for one 80 GB card."""
    text = (Path(__file__).parents[1] / "profiles" / "hermes8b-shared.toml").read_text()
    groups = re.findall(r"(?:^# +--set .*\n)+", text, re.MULTILINE)
    return [tuple(re.findall(r"--set (\S+)", group)) for group in groups]


def planned(overrides: tuple[str, ...], total_bytes: int, folder: Path) -> tuple[MemoryPlan, int, int]:
    """The trainer's plan, what there is for it, and what inference has, by the commands that the profile gives."""
    plan = make_plan(load("hermes8b-shared", overrides), run_folder=folder, python=sys.executable)
    argv = {launch.name: launch.argv[4:] for launch in plan.launches}
    server = parse_flags(ServerConfig, argv["vllm"], prog="vllm", description="")
    trainer = parse_flags(TrainConfig, argv["trainer"], prog="trainer", description="")
    assert trainer.gpu_memory_utilization == server.gpu_memory_utilization
    assert not list(settings_without_effect(trainer))
    share = server.gpu_memory_utilization
    free_bytes = int((1 - share) * total_bytes)
    card = Card(name="card", total_bytes=total_bytes, free_bytes=free_bytes, inference_share=share)
    shape = model_shape(HERMES_8B, trainer)
    return memory_plan(shape, trainer), available_bytes(card, trainer), int(share * total_bytes)


def test_an_8b_model_and_its_training_fit_on_one_h200(tmp_path: Path) -> None:
    plan, available, _ = planned((), H200_BYTES, tmp_path)
    assert available - plan.needed_bytes > 6_000_000_000


def test_there_are_three_ways_for_an_80_gb_card() -> None:
    assert len(hermes_sets()) == 3


@pytest.mark.parametrize("overrides", hermes_sets())
def test_each_way_that_the_profile_names_for_an_80_gb_card_fits_there(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    plan, available, of_inference = planned(overrides, H100_BYTES, tmp_path)
    assert available - plan.needed_bytes > ROOM_BYTES
    cache = of_inference - 2 * HERMES_8B_PARAMETERS - 2_500_000_000  # its activations and CUDA graphs
    assert cache > 40_000 * 131_072  # tokens × bytes: 2 × 32 layers × 8 heads × 128 × 2
