"""Checkpoints of several ranks from elsewhere: their metadata names no other files, and no parts that tensors lack."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from grpo_engine.errors import CheckpointError
from grpo_engine.ranks.group import RankGroup
from grpo_engine.train.checkpointing.sharded_state import FOLDER, MASTER, read_sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PARTS = "__0_0.distcp"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two numbers."""
    save({f"{MASTER}w": torch.tensor([1.0, 2.0])}, checkpoint_id=tmp_path / FOLDER, no_dist=True)
    assert read(tmp_path) == [1.0, 2.0]
    return tmp_path


def read(folder: Path) -> list[float]:
    masters, _ = read_sharded(folder, {"w": torch.zeros(2)}, {"w": torch.zeros(2)}, RankGroup())
    values: list[float] = masters["w"].tolist()
    return values


def metadata_of(folder: Path) -> Metadata:
    found = pickle.loads((folder / FOLDER / ".metadata").read_bytes())
    assert isinstance(found, Metadata)
    return found


def restate(folder: Path, change: Callable[[_StorageInfo], _StorageInfo]) -> None:
    """Change where the tensor is stored."""
    metadata = metadata_of(folder)
    [(index, stored)] = metadata.storage_data.items()
    metadata.storage_data[index] = change(stored)
    (folder / FOLDER / ".metadata").write_bytes(pickle.dumps(metadata))


def test_metadata_longer_than_any_is_not_read_to_its_end(folder: Path) -> None:
    os.truncate(folder / FOLDER / ".metadata", 40 << 30)
    with pytest.raises(CheckpointError, match="longer than 67,108,864 bytes"):
        read(folder)


@pytest.mark.parametrize("is_absolute", [True, False])
def test_metadata_names_no_file_outside_its_folder(folder: Path, is_absolute: bool) -> None:
    other = folder / PARTS
    (folder / FOLDER / PARTS).rename(other)
    restate(folder, lambda stored: replace(stored, relative_path=str(other) if is_absolute else f"../{PARTS}"))
    with pytest.raises(CheckpointError, match=r"is not a file of this folder"):
        read(folder)


def test_no_pipe_is_waited_for_and_no_link_followed_in_place_of_tensors_or_metadata(folder: Path) -> None:
    for name in (PARTS, ".metadata"):
        path = folder / FOLDER / name
        path.rename(folder / "other")
        path.symlink_to(folder / "other")
        with pytest.raises(CheckpointError, match="is a link"):
            read(folder)
        path.unlink()
        if name == PARTS:
            os.mkfifo(path)
            with pytest.raises(CheckpointError, match="is no regular file"):
                read(folder)
            path.unlink()
        (folder / "other").rename(path)


def test_a_tensor_of_which_parts_are_missing_is_not_filled_with_whatever_was_in_memory(folder: Path) -> None:
    metadata = metadata_of(folder)
    [entry] = metadata.state_dict_metadata.values()
    assert not isinstance(entry, BytesStorageMetadata)
    entry.chunks = []
    (folder / FOLDER / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="its parts do not add up to it"):
        read(folder)


def test_tensors_of_all_kinds_and_layouts_are_read_as_they_were_written(tmp_path: Path) -> None:
    state = {f"{MASTER}w": torch.zeros(2)}
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    values = {str(kind): torch.arange(6).view(2, 3).t().to(kind) for kind in kinds}
    state |= {f"optimizer/w/{name}": value for name, value in values.items()}
    state |= {"optimizer/w/step": torch.tensor(3.0), "optimizer/w/nothing": torch.zeros(0, 4)}
    save(state, checkpoint_id=tmp_path / FOLDER, no_dist=True)
    _, optimizer = read_sharded(tmp_path, {"w": torch.zeros(2)}, {"w": torch.zeros(2)}, RankGroup())
    for name, value in values.items():
        assert optimizer["w"][name].dtype == value.dtype
        assert torch.equal(optimizer["w"][name], value)
    assert optimizer["w"]["step"].item() == 3.0
    assert optimizer["w"]["nothing"].shape == (0, 4)


def pickled_by_name(metadata: bytes, owner: object, name: str) -> bytes:
    """As Python 3.11.0 to 3.11.3 pickle the member of an enumeration, here the attribute of anything."""

    class ByName(pickle.Pickler):
        def reducer_override(self, value: object) -> Any:
            return (getattr, (owner, name)) if isinstance(value, _MEM_FORMAT_ENCODING) else NotImplemented

    written = io.BytesIO()
    ByName(written).dump(pickle.loads(metadata))
    return written.getvalue()


def test_a_checkpoint_that_was_written_by_python_3_11_2_is_read(folder: Path) -> None:
    """Before, no trainer of several ranks could resume with the Python of Debian 12."""
    path = folder / FOLDER / ".metadata"
    content = path.read_bytes()
    path.write_bytes(pickled_by_name(content, _MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert b"getattr" in path.read_bytes()
    assert read(folder) == [1.0, 2.0]
    for owner, name in ((Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__subclasses__")):
        path.write_bytes(pickled_by_name(content, owner, name))
        with pytest.raises(CheckpointError, match="unreadable"):
            read(folder)
