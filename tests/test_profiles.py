"""Every profile that ships is valid, is described, and makes commands that its services accept."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from grpo_engine.colocate.config import TrainerConfig
from grpo_engine.environments.atropos.config import AtroposEnvConfig
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.flags import parse_flags
from grpo_engine.models.random_models import published_shape
from grpo_engine.parameters.config import ParametersConfig
from grpo_engine.reference.config import ReferenceConfig
from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.server.config import ServerConfig
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.dry_run import model_shape
from grpo_engine.train.memory.plan import Card, MemoryPlan, available_bytes, memory_plan
from grpo_engine.train.memory.sampling import SamplingPhase, sampling_phase
from grpo_engine.train.unused_settings import settings_without_effect
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import Plan, make_plan

PROFILES = sorted((Path(__file__).parents[1] / "profiles").glob("*.toml"))
SHAPES: dict[str, PreTrainedConfig] = {
    "NousResearch/Hermes-3-Llama-3.1-8B": published_shape("local/llama-8b-random"),
    "local/llama-8b-random": published_shape("local/llama-8b-random"),
    "Qwen/Qwen2.5-3B-Instruct": published_shape("local/qwen-3b-random"),
    "Qwen/Qwen2.5-3B": published_shape("local/qwen-3b-random"),
    "Qwen/Qwen2.5-7B": Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen2.5-14B-Instruct": Qwen2Config(
        vocab_size=152_064,
        hidden_size=5120,
        intermediate_size=13_824,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen2.5-72B-Instruct": Qwen2Config(
        vocab_size=152_064,
        hidden_size=8192,
        intermediate_size=29_568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "local/smollm2-135m-instruct": LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
}
"""By the name of the model in a profile."""
CARD_BYTES = {141: 150_100_000_000, 80: 84_900_000_000, 48: 47_600_000_000, 24: 25_200_000_000}
"""What torch calls the memory of the cards that are sold with so many GB."""
ROOM_BYTES = 1_500_000_000
BESIDE_WEIGHTS_BYTES = 2_500_000_000
"""What vLLM takes for its activations and CUDA graphs."""
SETTINGS = {
    "api": ApiConfig,
    "server": ServerConfig,
    "env": EnvironmentConfig,
    "atropos-env": AtroposEnvConfig,
    "train": TrainerConfig,
    "reference": ReferenceConfig,
    "parameters": ParametersConfig,
}


def test_the_documented_profiles_are_there() -> None:
    assert {"tiny-cpu", "smollm-cpu", "hermes8b-shared"} <= {path.stem for path in PROFILES}


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_is_described_and_its_services_accept_the_commands_of_its_plan(path: Path, tmp_path: Path) -> None:
    head = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert [words for words in ("Hardware:", "Memory:", "Choose it") if words not in head] == []
    loaded = load(str(path))
    assert loaded.profile.description
    plan = make_plan(loaded, run_folder=tmp_path, python=sys.executable)
    for launch in plan.launches:
        if launch.argv[1:4] == ("-P", "-m", "grpo_engine"):
            parse_flags(SETTINGS[launch.argv[4]], launch.argv[5:], prog=launch.name, description="")
    assert Plan.from_json(plan.to_json()) == plan


@dataclass(frozen=True)
class Claim:
    """What the head of a profile states about one card, as it is written there."""

    profile: str
    overrides: tuple[str, ...]
    card_gb: int
    words: str

    @property
    def figures(self) -> tuple[int, int]:
        """GB of the trainer, and tokens in inference's cache."""
        trainer = re.search(r"[Tt]rainer (\d+)", self.words)
        tokens = re.search(r"([\d,]+) tokens(?! \d)", self.words)
        assert trainer is not None, self.words
        assert tokens is not None, self.words
        return int(trainer[1]), int(tokens[1].replace(",", ""))


def claims(path: Path) -> Iterator[Claim]:
    """The profile as it is, and each group of `--set` lines in its head, described by the words above it."""
    head = [line.removeprefix("#").strip() for line in path.read_text().split("\n\n")[0].splitlines()]
    text = "\n".join(head)
    card = re.search(r"GPUs? with (\d+) GB", text)
    assert card is not None, "says how much memory the GPU has"
    card_gb = int(card[1])
    yield Claim(path.stem, (), card_gb, " ".join(text.partition("Memory:")[2].partition("Choose it")[0].split()))
    words: list[str] = []
    for is_set, lines in groupby(head, lambda line: line.startswith("--set")):
        group = list(lines)
        if is_set:
            yield Claim(path.stem, tuple(" ".join(group).split()[1::2]), card_gb, words[-1])
        else:
            cards = re.findall(r"[Oo]ne (\d+) GB card|cards with (\d+) GB", " ".join(group))
            cards = [one or other for one, other in cards]
            card_gb = int(cards[-1]) if cards else card_gb
            words = re.split(r"\n\n", "\n".join(group).strip())
            words = [" ".join(paragraph.split()) for paragraph in words]


ON_A_GPU = [
    path for path in PROFILES if path.stem.partition("-")[0] in {"hermes8b", "qwen3b", "qwen14b", "qwen72b", "llama8b"}
]
ON_A_GPU += [path for path in PROFILES if path.stem in {"smollm-gpu", "smollm-async", "gsm8k-async", "ifeval-async"}]
CLAIMS = [claim for path in ON_A_GPU for claim in claims(path)]


def planned(claim: Claim, folder: Path) -> tuple[MemoryPlan, SamplingPhase | None, Card, int, int]:
    """The plans of a rank's phases, what there is for it, and the tokens of inference's cache, by the profile's
    commands."""
    loaded = load(claim.profile, claim.overrides)
    plan = make_plan(loaded, run_folder=folder, python=sys.executable)
    argv = {launch.name: launch.argv[5:] for launch in plan.launches}
    trainer = parse_flags(TrainerConfig, argv["trainer"], prog="trainer", description="")
    own = trainer.own_server if trainer.bridge.samples_in_process else None
    server = own or parse_flags(ServerConfig, argv["vllm"], prog="vllm", description="")
    assert not list(settings_without_effect(trainer))
    total_bytes, share = CARD_BYTES[claim.card_gb], server.gpu_memory_utilization
    services = loaded.profile.services
    if trainer.bridge.takes_turns:
        assert trainer.gpu_memory_utilization == share
        card = Card(name="card", total_bytes=total_bytes, free_bytes=total_bytes, inference_share=None)
    elif set(services["vllm"].gpus) & set(services["trainer"].gpus):
        assert trainer.gpu_memory_utilization == share
        left = int((1 - share) * total_bytes)
        card = Card(name="card", total_bytes=total_bytes, free_bytes=left, inference_share=share)
    else:
        card = Card(name="card", total_bytes=total_bytes, free_bytes=total_bytes, inference_share=None)
    shape = model_shape(SHAPES.get(server.model_name, SHAPES["local/smollm2-135m-instruct"]), trainer)
    whole = model_shape(SHAPES.get(server.model_name, SHAPES["local/smollm2-135m-instruct"]), one_rank(trainer))
    weights = sum(parameter.num_bytes for parameter in whole.parameters) / server.tensor_parallel_size
    heads = shape.num_kv_heads // server.tensor_parallel_size
    of_a_token = 2 * shape.num_layers * heads * shape.head_dim * shape.bytes_each
    cache_tokens = int((share * total_bytes - weights - BESIDE_WEIGHTS_BYTES) / of_a_token)
    memory = memory_plan(shape, trainer)
    return memory, sampling_phase(shape, trainer, memory), card, available_bytes(card, trainer), cache_tokens


def one_rank(config: TrainConfig) -> TrainConfig:
    """The settings of a trainer that has the whole model."""
    return config.model_copy(update={"processes": None})


def test_the_heads_of_profiles_are_parsed() -> None:
    """The 8B model has three ways for an 80 GB card, and most heads state figures."""
    assert sum(claim.profile == "hermes8b-shared" and claim.card_gb == 80 for claim in CLAIMS) == 3
    assert sum("rainer" in claim.words and "tokens" in claim.words for claim in CLAIMS) > len(CLAIMS) / 2


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.profile}-{claim.card_gb}-{len(claim.overrides)}")
def test_a_profile_fits_the_card_that_its_head_names_with_the_figures_of_the_plan(claim: Claim, tmp_path: Path) -> None:
    plan, sampling, card, available, cache_tokens = planned(claim, tmp_path)
    assert available - plan.needed_bytes > ROOM_BYTES
    assert cache_tokens > 20_000
    if sampling is not None:
        assert sampling.spare_bytes(card) > ROOM_BYTES
    if "rainer" in claim.words and "tokens" in claim.words:
        trainer_gb, tokens = claim.figures
        assert trainer_gb == pytest.approx(plan.needed_bytes / 1e9, abs=0.6)
        assert 0.8 * cache_tokens < tokens < 1.02 * cache_tokens


def test_the_example_profile_in_the_docs_loads(tmp_path: Path) -> None:
    document = (Path(__file__).parents[1] / "docs" / "profiles.md").read_text()
    (tmp_path / "mine.toml").write_text(document.partition("```toml\n")[2].partition("```")[0])
    (tmp_path / "secrets.env").write_text("TOKEN=x\n")
    loaded = load(str(tmp_path / "mine.toml"), ["model.name=local/tiny"])
    plan = make_plan(loaded, run_folder=tmp_path / "run", python=sys.executable)
    names = [launch.name for launch in plan.launches if launch.name != "mps"]  # where this machine has MPS
    assert names == ["api", "board", "vllm", "env", "trainer"]
