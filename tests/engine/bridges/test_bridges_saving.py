"""Writing models to a folder, and errors of the disk."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel, modeling_utils

from grpo_engine.bridges.transport import saving
from grpo_engine.bridges.transport.saving import explain_write_errors, write_whole, writing_in_parts
from grpo_engine.errors import BridgeError
from grpo_engine.models import tensor_files
from grpo_engine.models.sharded import without_values
from grpo_engine.models.tensor_files import FilesInParts


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


def write_in_parts(model: PreTrainedModel, folder: Path) -> None:
    with explain_write_errors(folder), writing_in_parts(without_values(model), folder) as take:
        assert take is not None
        for name, parameter in model.named_parameters():
            take({name: parameter})


@pytest.mark.parametrize("file_size", ["1GB", "100KB"])
def test_a_model_that_is_written_in_parts_has_the_files_of_one_that_is_written_whole(
    file_size: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_FILE_SIZE", file_size)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    write_whole(
        without_values(model), tmp_path / "whole", {name: each.detach() for name, each in model.named_parameters()}
    )
    write_in_parts(model, tmp_path / "parts")
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()} == files


def test_a_model_that_is_stored_otherwise_is_not_written_in_parts(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, num_hidden_layers=1, num_local_experts=2, **sizes))
    with writing_in_parts(without_values(model), tmp_path) as take:
        assert take is None
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_an_error_when_all_parts_were_handed_out(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noting(FilesInParts):
        def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
            attempts.append(list(tensors))
            raise OSError(errno.ENOSPC, "No space left on device")

    attempts: list[list[str]] = []
    monkeypatch.setattr(tensor_files, "FilesInParts", Noting)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.raises(BridgeError, match=r"No space left.*make room"):
        write_in_parts(model, tmp_path)
    assert len(attempts) == 1  # it raised nothing before, since other ranks go on


def test_a_model_of_which_a_part_is_missing_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    model = without_values(AutoModelForCausalLM.from_pretrained(model_folder))
    with pytest.raises(ValueError, match="were not written"), writing_in_parts(model, tmp_path):
        pass
