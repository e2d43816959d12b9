"""Files of tensors that are written piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from grpo_engine.models import tensor_files
from grpo_engine.models.tensor_files import FilesInParts, write_tensors


def tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "b.half": torch.randn(5, 3, generator=generator).half(),
        "a.weight": torch.randn(300, 7, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "c.master": torch.randn(33, generator=generator),
        "step": torch.tensor(7),
        "quantized": torch.arange(250, dtype=torch.uint8).view(5, 50),
        "is_done": torch.tensor([True, False, True]),
    }


@pytest.mark.parametrize("stage_bytes", [8, 100, 1 << 20])
def test_safetensors_reads_back_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage_bytes: int
) -> None:
    monkeypatch.setattr(tensor_files, "_STAGE_BYTES", stage_bytes)
    tensors = tensors_of_all_kinds()
    write_tensors(tensors, tmp_path / "file.safetensors", metadata={"format": "pt"})
    again = load_file(tmp_path / "file.safetensors")
    assert again.keys() == tensors.keys()
    assert all(
        torch.equal(again[name], tensor) and again[name].dtype is tensor.dtype for name, tensor in tensors.items()
    )
    with safe_open(tmp_path / "file.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("stage_bytes", [8, 100, 1 << 20])
def test_files_written_in_parts_are_those_that_are_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage_bytes: int
) -> None:
    monkeypatch.setattr(tensor_files, "_STAGE_BYTES", stage_bytes)
    tensors = tensors_of_all_kinds()
    names = sorted(tensors)
    files = {tmp_path / "one": names[::2], tmp_path / "two": names[1::2]}
    bare = {path: {name: torch.empty_like(tensors[name], device="meta") for name in of} for path, of in files.items()}
    written = FilesInParts(bare, {"format": "pt"})
    for some in (names[3:], names[:3]):
        written.write({name: tensors[name] for name in some})
    written.close()
    written.require_all()
    for path, of in files.items():
        write_tensors({name: tensors[name] for name in of}, tmp_path / "whole", metadata={"format": "pt"})
        assert path.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_tensor_that_the_files_have_no_room_for_or_lack_is_an_error(tmp_path: Path) -> None:
    written = FilesInParts({tmp_path / "one": {"a": torch.empty(3, device="meta"), "b": torch.empty(2)}}, {})
    for refused in ({"a": torch.zeros(4)}, {"c": torch.zeros(3)}, {"b": torch.zeros(2).half()}):
        with pytest.raises(ValueError, match=f"{next(iter(refused))}: .* is not what the files have room for"):
            written.write(refused)
    written.close()
    lacking = FilesInParts({tmp_path / "two": {"a": torch.empty(3, device="meta")}}, {})
    lacking.close()
    with pytest.raises(ValueError, match="1 tensors were not written, a among them"):
        lacking.require_all()


def test_a_parameter_is_written_without_its_gradient(tmp_path: Path) -> None:
    write_tensors({"weight": torch.nn.Parameter(torch.ones(3))}, tmp_path / "file")
    assert torch.equal(load_file(tmp_path / "file")["weight"], torch.ones(3))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3, dtype=torch.complex64), torch.zeros(3, 4).T], ids=["type", "strides"]
)
def test_unsupported_tensors_are_refused_before_a_file_is_created(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"file: bad is torch"):
        write_tensors({"good": torch.zeros(1), "bad": tensor}, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_tensors({"weight": torch.zeros(1)}, "/dev/full")
