"""Tensors in shared memory: what is written on one side is read on the other, in every dtype."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo_engine.bridges.shared_tensors import (
    dtype_from_text,
    export_tensors,
    map_tensors,
    segments_of,
    unlink_segments,
)
from grpo_engine.errors import BridgeError
from grpo_engine.wire.bridge_file import PosixHandle


@pytest.fixture
def segment() -> Iterator[str]:
    name = f"grpo-test-{os.getpid()}-weights"
    yield name
    unlink_segments([name])


def test_both_sides_see_one_memory(segment: str) -> None:
    tensors = {
        "half": torch.arange(15, dtype=torch.bfloat16).view(3, 5),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "scalar": torch.tensor(7.5, dtype=torch.float64),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "empty": torch.empty(0, 4),
    }
    manifest, exported = export_tensors(tensors, segment)
    mapped = map_tensors(manifest)
    for name, tensor in tensors.items():
        assert mapped[name].dtype == tensor.dtype
        assert torch.equal(mapped[name], tensor)
    mapped["half"][1, 2] = -4
    assert exported["half"][1, 2] == -4
    exported["transposed"].zero_()
    assert mapped["transposed"].abs().sum() == 0
    assert mapped["bytes"].tolist() == [0, 1, 2]
    assert segments_of(manifest) == {segment}


def test_every_tensor_begins_on_a_cache_line_and_is_a_storage_of_its_own(segment: str) -> None:
    manifest, exported = export_tensors({"a": torch.zeros(3), "b": torch.zeros(5)}, segment)
    handles = [entry.handle for entry in manifest.values()]
    assert [h.offset_bytes for h in handles if isinstance(h, PosixHandle)] == [0, 64]
    assert exported["a"].untyped_storage().nbytes() == 12
    assert exported["b"].data_ptr() % 64 == 0


def test_a_view_of_a_fused_tensor_can_be_described(segment: str) -> None:
    manifest, exported = export_tensors({"fused": torch.arange(12.0).view(4, 3)}, segment)
    entry = manifest["fused"]
    rows = entry.model_copy(update={"shape": (2, 3), "handle": PosixHandle(segment=segment, offset_bytes=2 * 3 * 4)})
    view = map_tensors({"lower": rows})["lower"]
    view.fill_(-1)
    assert exported["fused"][:2].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert exported["fused"][2:].tolist() == [[-1] * 3] * 2


def test_a_segment_that_is_gone_or_short_is_named(segment: str) -> None:
    manifest, _ = export_tensors({"a": torch.zeros(100)}, segment)
    with pytest.raises(BridgeError, match="exists already"):
        export_tensors({"a": torch.zeros(1)}, segment)
    longer = manifest["a"].model_copy(update={"shape": (1000,)})
    with pytest.raises(BridgeError, match="too short"):
        map_tensors({"a": longer})
    unlink_segments([segment])
    with pytest.raises(BridgeError, match=r"cannot be mapped.*is the inference server up"):
        map_tensors(manifest)


def test_no_room_is_said_and_leaves_nothing(segment: str) -> None:
    free = os.statvfs("/dev/shm")
    too_many = free.f_bavail * free.f_frsize + 2**30
    with pytest.raises(BridgeError, match="GiB of shared memory cannot be had"):
        export_tensors({"a": torch.empty(too_many, dtype=torch.uint8, device="meta")}, segment)
    assert not Path("/dev/shm", segment).exists()


def test_a_dtype_that_torch_has_not_is_refused() -> None:
    assert dtype_from_text("torch.bfloat16") is torch.bfloat16
    with pytest.raises(BridgeError, match="not a dtype"):
        dtype_from_text("torch.nn")
