"""Ranks that train on the parts of a tensor parallel server compute what one process computes on whole weights."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_training import Trained, Training, ended_ranks, make_model, train_on_ranks, why_ended
from safetensors.torch import load_file
from training import settings
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from weight_parts import exported_parts, whole_weights

from grpo_engine.bridges.memory.shared_tensors import map_tensors, segments_of, unlink_segments
from grpo_engine.bridges.placement.mapped_parts import MappedPart, check_parts
from grpo_engine.errors import BridgeError
from grpo_engine.models.loading import load_config, load_model, load_model_on_shared
from grpo_engine.models.places import places_on_rank
from grpo_engine.ranks.group import RankGroup
from grpo_engine.train.memory.dry_run import model_shape
from grpo_engine.train.memory.plan import memory_plan, part_of_model
from grpo_engine.train.utilization import ModelFlops

SIZES = {
    "vocab_size": 100,  # parts of 64 and 36 words
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "llama, one key head": LlamaConfig(**{**SIZES, "num_key_value_heads": 1}, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
}


OTHERS = pytest.mark.extended("test_two_ranks_train_on_parts_what_one_trains_on_the_whole of qwen3")


def train_both(
    name: str, folder: Path, *, num_parts: int = 2, steps: int = 3, **changes: Any
) -> tuple[Trained, Trained, dict[str, torch.Tensor]]:
    """On one rank and on several; and what the memory of the parts then holds.

    Adam multiplies the rounding of a gradient near its `eps` by the learning rate, so that is small.
    """
    own = {"lr": 1e-4, **changes}
    model = make_model(folder / "model", config=MODELS[name])
    stem = f"parts-{os.getpid()}"
    one = train_on_ranks(Training(model=model, folder=folder / "1", num_ranks=1, steps=range(steps), settings=own))
    with exported_parts(model, num_parts, stem) as file:
        several = train_on_ranks(
            Training(
                **{"model": model, "folder": folder / "n", "num_ranks": num_parts, "steps": range(steps)},
                settings={**own, "bridge": {"mode": "shared_vllm"}},
                file=file,
            )
        )
        return one, several, whole_weights(file)


def assert_equal(one: Trained, several: Trained) -> None:
    assert one.parameters.keys() == several.parameters.keys()
    for name, value in one.parameters.items():
        torch.testing.assert_close(
            several.parameters[name], value, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    for before, after in zip(one.metrics[-len(several.metrics) :], several.metrics, strict=True):
        assert of_training(after) == pytest.approx(of_training(before), rel=1e-3, abs=1e-6)


def of_training(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("rank/")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "qwen3" else OTHERS) for name in MODELS])
def test_two_ranks_train_on_parts_what_one_trains_on_the_whole(name: str, tmp_path: Path) -> None:
    one, two, served = train_both(name, tmp_path, steps=20, max_grad_norm=0.05)
    assert_equal(one, two)
    assert served.keys() == two.parameters.keys()
    for key, value in served.items():
        assert torch.equal(value, two.parameters[key]), key


@OTHERS
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("llama", {"loss": "gspo", "correction": "truncate"}, id="gspo, corrected"),
        pytest.param("qwen2", {"loss": "dapo", "micro_batch_tokens": 40, "num_iterations": 2}, id="dapo, two updates"),
        pytest.param("qwen3", {"loss": "bnpo", "kl_coef": 0.1, "entropy_coef": 0.01}, id="bnpo with a reference"),
        pytest.param("qwen3", {"gradient_checkpointing": True, "train_layer_indices": "1"}, id="recomputing a layer"),
    ],
)
def test_settings_mean_the_same_on_parts(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    one, two, _ = train_both(name, tmp_path, **settings)
    assert_equal(one, two)


@OTHERS
def test_four_ranks_of_which_two_have_each_key_head_train_the_same(tmp_path: Path) -> None:
    one, four, _ = train_both("qwen3", tmp_path, num_parts=4)
    assert_equal(one, four)


@OTHERS
@pytest.mark.parametrize("name", ["llama, one key head", "qwen3"])
def test_what_both_ranks_have_stays_equal_though_updates_are_rounded_at_random(name: str, tmp_path: Path) -> None:
    """Each rank draws random numbers of its own, and no norm may drift apart from that of the other process."""
    model = make_model(tmp_path / "model", config=MODELS[name], dtype=torch.bfloat16)
    rounded = {"master_weights": "stochastic_rounding", "gradient_dtype": "bfloat16", "dtype": "bfloat16"}
    with exported_parts(model, 2, f"parts-{os.getpid()}") as file:
        before = whole_weights(file)
        training = Training(
            **{"model": model, "folder": tmp_path / "2", "num_ranks": 2, "file": file},
            settings={**rounded, "bridge": {"mode": "shared_vllm"}},
        )
        two = train_on_ranks(training)
        after = whole_weights(file)  # checks that copies are equal
    assert all(torch.equal(after[key], two.parameters[key]) for key in after)
    norms = [key for key in after if "norm" in key]
    assert any(not torch.equal(after[key], before[key]) for key in norms)
    assert all(math.isfinite(step["train/grad_norm"]) for step in two.metrics)


@pytest.mark.parametrize("name", MODELS)
def test_the_memory_plan_counts_what_a_rank_has(name: str, tmp_path: Path) -> None:
    config = settings(model_name="m", bridge={"mode": "shared_vllm"}, processes=2)
    planned = part_of_model(model_shape(MODELS[name], config), 2)
    with exported_parts(make_model(tmp_path / "model", config=MODELS[name]), 2, f"parts-{os.getpid()}") as file:
        assert {each.name: each.shape for each in planned.parameters} == {
            name: part.shape for name, part in file.parts[0].items()
        }
    assert memory_plan(model_shape(MODELS[name], config), config).num_trained == sum(
        math.prod(part.whole) for part in file.parts[0].values()
    )


def test_trainers_of_parts_and_of_the_whole_resume_each_other(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", config=MODELS["llama"])

    def train(folder: str, steps: range, num_parts: int) -> Trained:
        own = {"lr": 1e-4, "bridge": {"mode": "shared_vllm"}}
        training = Training(model=model, folder=tmp_path / folder, num_ranks=num_parts, steps=steps, settings=own)
        if num_parts == 1:
            return train_on_ranks(replace(training, settings={"lr": 1e-4}))
        with exported_parts(model, num_parts, f"parts-{os.getpid()}") as file:
            return train_on_ranks(replace(training, file=file))

    whole = train("whole", range(4), 1)
    train("resumed", range(2), 2)
    train("resumed", range(2, 3), 1)
    assert_equal(whole, train("resumed", range(3, 4), 2))


def test_parts_are_written_to_the_memory_of_the_next_server_and_saved_without_one(tmp_path: Path) -> None:
    """The lower layer is frozen: each rank keeps its values in main memory."""
    model = make_model(tmp_path / "model", config=MODELS["llama, one key head"])
    stem, own = f"parts-{os.getpid()}", {"lr": 1e-4, "train_layer_indices": "1"}
    training = Training(model=model, folder=tmp_path / "1", num_ranks=1, steps=range(1), settings=own)
    one = train_on_ranks(training)
    with exported_parts(model, 2, f"{stem}-a") as first, exported_parts(model, 2, f"{stem}-b") as second:
        for tensor in (tensor for part in second.parts for tensor in map_tensors(part).values()):
            tensor.fill_(torch.nan)
        own |= {"bridge": {"mode": "shared_vllm"}}
        two = train_on_ranks(
            replace(training, folder=tmp_path / "2", num_ranks=2, settings=own, file=first, next_file=second)
        )
        assert_equal(one, two)
        unmapped = load_file(tmp_path / "2/unmapped/step_1/model.safetensors")
        for key, value in whole_weights(second).items():
            assert torch.equal(value, two.parameters[key]), key
            assert torch.equal(value, unmapped[key]), key


def test_a_part_that_one_rank_cannot_map_ends_all_ranks_at_once(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", config=MODELS["qwen2"])
    with exported_parts(model, 2, f"parts-{os.getpid()}") as file:
        unlink_segments(segments_of(file.parts[1]))
        training = Training(
            **{"model": model, "folder": tmp_path / "2", "num_ranks": 2, "file": file},
            settings={"bridge": {"mode": "shared_vllm"}},
        )
        assert [process.exitcode for process in ended_ranks(training)] == [1, 1]
    assert why_ended(training, 0).startswith("BridgeError: rank 1: /dev/shm/")


def test_other_parts_than_the_ranks_have_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", config=MODELS["qwen2"])
    with exported_parts(model, 2, f"parts-{os.getpid()}") as file:
        with pytest.raises(BridgeError, match="weights in 2 processes, and the trainer has 1 ranks: start as many"):
            MappedPart(str(model), file, RankGroup())
        whole = file.model_copy(update={"parts": []})
        with pytest.raises(BridgeError, match="weights in 1 processes, and the trainer has 2 ranks"):
            check_parts(whole, SimpleNamespace(size=2))


def test_a_rank_counts_the_operations_of_its_part(tmp_path: Path) -> None:
    config = Qwen3Config(**{**SIZES, "vocab_size": 128}, tie_word_embeddings=False)
    folder = make_model(tmp_path / "model", config=config)
    with exported_parts(folder, 2, f"parts-{os.getpid()}") as file:
        part = load_model_on_shared(
            load_config(str(folder)), map_tensors(file.parts[1]), places=places_on_rank(file.parts, 1)
        )
        work = {"positions": 100, "labels": 50, "mean_length": 20}
        whole = ModelFlops(load_model(str(folder), dtype="float32", device="cpu")).of(**work)
        assert 2 * ModelFlops(part).of(**work) == whole
