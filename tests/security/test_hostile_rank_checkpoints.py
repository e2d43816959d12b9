"""Checkpoints of several ranks from elsewhere: what torch pickles there hangs no trainer, and fills no memory."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from grpo_engine.errors import CheckpointError
from grpo_engine.ranks.group import RankGroup
from grpo_engine.train.checkpointing import plain_pickle
from grpo_engine.train.checkpointing.sharded_state import FOLDER, MASTER, read_sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PARTS = "__0_0.distcp"


def nested_tuples(depth: int) -> bytes:
    """A tuple of which each item is the same tuple, so often, as a pickle: 2^depth hashes."""
    level = b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(depth))
    return b"K\x01q\x00" + level


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


def rewrite(folder: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Write the archive of the tensor anew."""
    path, written = folder / FOLDER / PARTS, io.BytesIO()
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(written, "w", compression) as after:
        for name in before.namelist():
            after.writestr(name, change(name.partition("/")[2], before.read(name)))
    path.write_bytes(written.getvalue())
    restate(folder, lambda stored: replace(stored, length=len(written.getvalue())))


def test_a_key_of_nested_tuples_does_not_hold_a_trainer_for_ever(folder: Path) -> None:
    for as_key in (b"}" + nested_tuples(100) + b"K\x01s.", b"}(" + nested_tuples(100) + b"K\x01u."):
        (folder / FOLDER / ".metadata").write_bytes(b"\x80\x02" + as_key)
        with pytest.raises(CheckpointError, match=r"a tuple has a tuple in it, which no checkpoint has"):
            read(folder)


def test_a_key_of_nested_tuples_in_a_tensor_does_not_hold_a_trainer_for_ever(folder: Path) -> None:
    hostile = b"\x80\x02}" + nested_tuples(100) + b"K\x01s."
    rewrite(folder, lambda name, content: hostile if name == "data.pkl" else content)
    with pytest.raises(CheckpointError, match=r"a tuple has a tuple in it, which no checkpoint has"):
        read(folder)


def test_keys_that_hold_each_other_do_not_hold_a_trainer_for_ever(folder: Path) -> None:
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}(X\x03\x00\x00\x00fqn"
    level = b"".join(
        index + b"h" + bytes([n]) + b"X\x06\x00\x00\x00offseth" + bytes([n]) + b"ubq" + bytes([n + 1])
        for n in range(100)
    )
    (folder / FOLDER / ".metadata").write_bytes(b"\x80\x02}K\x01q\x00" + level + b"K\x01s.")
    with pytest.raises(CheckpointError, match=r"unreadable"):
        read(folder)


def test_metadata_of_millions_of_lists_is_refused_before_it_fills_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_pickle, "MAX_OBJECTS", 1000)
    (folder / FOLDER / ".metadata").write_bytes(b"\x80\x02" + b"]" * 2000 + b".")
    with pytest.raises(CheckpointError, match="more than 1,000 objects"):
        read(folder)


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


def test_a_compressed_tensor_which_could_unpack_to_any_size_is_refused(folder: Path) -> None:
    rewrite(folder, lambda _, content: content, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="a part is compressed"):
        read(folder)


@pytest.mark.parametrize("extra", [bytes(4), bytes(8 << 20)])
def test_a_tensor_is_stored_with_as_many_numbers_as_it_has(folder: Path, extra: bytes) -> None:
    rewrite(folder, lambda name, content: content + extra if name == "data/0" else content)
    with pytest.raises(CheckpointError, match=r"a part of \(2,\) is stored with"):
        read(folder)


def test_an_archive_with_a_list_of_millions_of_files_is_refused(folder: Path) -> None:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as file:
        for number in range(2000):
            file.writestr(str(number), b"")
    (folder / FOLDER / PARTS).write_bytes(written.getvalue())
    restate(folder, lambda stored: replace(stored, length=len(written.getvalue())))
    with pytest.raises(CheckpointError, match="bytes besides its numbers, more than any checkpoint"):
        read(folder)


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
