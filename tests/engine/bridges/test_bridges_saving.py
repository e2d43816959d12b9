"""Writing models to a folder, and errors of the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from serving import save_tiny_model
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, modeling_utils

from grpo_engine.bridges.transport import saving
from grpo_engine.bridges.transport.saving import explain_write_errors, write_whole
from grpo_engine.errors import BridgeError


def test_a_full_disk_is_named_with_the_folder_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=r"No space left on device.*make room"), explain_write_errors(tmp_path):
        Path("/dev/full").write_text("weights")


def test_a_disk_that_is_full_for_the_tokenizer_is_named_too() -> None:
    with pytest.raises(BridgeError, match=r"No space left on device.*make room"), explain_write_errors(Path("/dev")):
        Tokenizer(BPE()).save("/dev/full")


def test_a_fault_of_the_program_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a fault"), explain_write_errors(tmp_path):
        raise ValueError("a fault")


def test_a_model_of_many_files_is_written_completely_and_transformers_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_FILE_SIZE", "100KB")
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path / "tiny", seed=1))
    before = modeling_utils.safe_save_file
    write_whole(model, tmp_path / "written")
    assert modeling_utils.safe_save_file is before
    assert len(list((tmp_path / "written").glob("*.safetensors"))) > 3
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "written").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_a_file_that_cannot_be_written_ends_the_writing_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_FILE_SIZE", "100KB")
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path / "tiny", seed=1))
    for number in range(2, 30):  # files
        (tmp_path / "written" / f"model-00002-of-{number:05d}.safetensors").mkdir(parents=True)
    with pytest.raises(BridgeError, match="make room"), explain_write_errors(tmp_path):
        write_whole(model, tmp_path / "written")


def test_what_safetensors_says_of_a_folder_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=r"No such file.*make room"), explain_write_errors(tmp_path):
        save_file({"weight": torch.zeros(1)}, tmp_path / "missing" / "file")
