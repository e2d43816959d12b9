"""Settings of a model and tokenizer of a checkpoint from elsewhere: an export refuses what hangs or fills memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import save_tiny_model

from grpo_engine.errors import ModelError
from grpo_engine.export import model as export


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A model with other values in one of its files."""

    def change(name: str, **values: Any) -> Path:
        folder = save_tiny_model(tmp_path / "tiny", seed=1)
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}))
        return folder

    return change


@pytest.mark.parametrize("values", [
    {"num_hidden_layers": 10**6}, {"vocab_size": 10**9}, {"intermediate_size": 10**9}, {"head_dim": 10**9},
], ids=str)  # fmt: skip
def test_a_config_of_a_larger_model_than_its_tensors_is_refused_before_memory_is_taken(
    values: dict[str, int], changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_load_exported", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ModelError, match="a larger model than its tensors are"):
        export.check(changed("config.json", **values), "cpu")


def test_a_tokenizer_that_multiplies_a_text_is_refused_within_its_limits(
    changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "TRIAL_CPU_S", 1)
    replacements = [{"type": "Replace", "pattern": {"String": " "}, "content": " " * 100}] * 6
    folder = changed("tokenizer.json", normalizer={"type": "Sequence", "normalizers": replacements})
    with pytest.raises(ModelError, match="takes more than 1 s of CPU or 4 GiB"):
        export.check(folder, "cpu")


def test_a_model_as_it_was_saved_is_loaded(changed: Callable[..., Path]) -> None:
    assert "it loads, and answers" in export.check(changed("config.json"), "cpu")
