"""Writing models to a folder, and errors of the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, modeling_utils

from grpo_engine.bridges.transport import saving
from grpo_engine.bridges.transport.saving import explain_write_errors, write_whole
from grpo_engine.errors import BridgeError


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda _folder: Path("/dev/full").write_text("weights"), "No space left on device"),
        (lambda _folder: Tokenizer(BPE()).save("/dev/full"), "No space left on device"),
        (lambda folder: save_file({"weight": torch.zeros(1)}, folder / "missing" / "file"), "No such file"),
    ],
    ids=["full disk", "disk that is full for the tokenizer", "safetensors in a missing folder"],
)
def test_an_error_of_the_disk_is_reported_with_what_to_do(
    tmp_path: Path, write: Callable[[Path], object], message: str
) -> None:
    with pytest.raises(BridgeError, match=f"{message}.*make room"), explain_write_errors(tmp_path):
        write(tmp_path)


def test_a_fault_of_the_program_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a fault"), explain_write_errors(tmp_path):
        raise ValueError("a fault")


def test_a_model_of_many_files_is_written_completely_and_transformers_is_unchanged(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_FILE_SIZE", "100KB")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    before = modeling_utils.safe_save_file
    write_whole(model, tmp_path / "written")
    assert modeling_utils.safe_save_file is before
    assert len(list((tmp_path / "written").glob("*.safetensors"))) > 3
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "written").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_a_file_that_cannot_be_written_ends_the_writing_of_all(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_FILE_SIZE", "100KB")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    for number in range(2, 30):  # files
        (tmp_path / "written" / f"model-00002-of-{number:05d}.safetensors").mkdir(parents=True)
    with pytest.raises(BridgeError, match="make room"), explain_write_errors(tmp_path):
        write_whole(model, tmp_path / "written")
