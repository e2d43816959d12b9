"""Ranks that train on the parts of a tensor parallel server compute what one process computes on whole weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_training import Trained, Training, make_model, train_on_ranks
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from weight_parts import exported_parts, whole_weights

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


def train_both(
    name: str, folder: Path, *, num_parts: int = 2, steps: int = 3, **settings: Any
) -> tuple[Trained, Trained, dict[str, torch.Tensor]]:
    """On one rank and on several; and what the memory of the parts then holds."""
    model = make_model(folder / "model", config=MODELS[name])
    one = train_on_ranks(Training(model=model, folder=folder / "1", num_ranks=1, steps=range(steps), settings=settings))
    with exported_parts(model, num_parts, f"parts-{os.getpid()}") as file:
        several = train_on_ranks(
            Training(
                **{"model": model, "folder": folder / "n", "num_ranks": num_parts, "steps": range(steps)},
                settings={**settings, "bridge": {"mode": "shared_vllm"}},
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


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_train_on_parts_what_one_trains_on_the_whole(name: str, tmp_path: Path) -> None:
    one, two, served = train_both(name, tmp_path, max_grad_norm=0.05)
    assert_equal(one, two)
    assert served.keys() == two.parameters.keys()
    for key, value in served.items():
        assert torch.equal(value, two.parameters[key]), key
