"""Tensors in shared memory: values written by one process are read by the other, in every dtype."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bridging import cuda_handle, write_and_wait
from forked import start_forked
from workplace import until

from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.bridges.memory.shared_tensors import (
    dtype_from_text,
    export_tensors,
    map_tensors,
    segments_of,
    unlink_segments,
)
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.errors import BridgeError
from grpo_engine.processes import ProcessIdentity
from grpo_engine.server.exports import Adopted, Owner, adopt, need_no_checkpoint, take_over
from grpo_engine.server.vllm.sharing import copy_adopted
from grpo_engine.wire.bridge_file import BridgeFile, PosixHandle, SharedTensor


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


def test_a_missing_or_short_segment_is_named(segment: str) -> None:
    manifest, _ = export_tensors({"a": torch.zeros(100)}, segment)
    with pytest.raises(BridgeError, match="already exists"):
        export_tensors({"a": torch.zeros(1)}, segment)
    longer = manifest["a"].model_copy(update={"shape": (1000,)})
    with pytest.raises(BridgeError, match="too short"):
        map_tensors({"a": longer})
    unlink_segments([segment])
    with pytest.raises(BridgeError, match=r"cannot be mapped.*is the inference server running"):
        map_tensors(manifest)


def test_a_bridge_file_that_names_memory_by_a_path_to_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bridge.json"
    for lock, weights in (("../../tmp/x", "w"), ("f", "../x")):
        handle = {"kind": "posix", "segment": weights, "offset_bytes": 0}
        tensor = {"handle": handle, "shape": [1], "stride": [1], "dtype": "torch.float32"}
        owner = {"model": "m", "pid": 1, "pid_start_ticks": 1, "instance": "i"}
        path.write_text(json.dumps({**owner, "fence_segment": lock, "tensors": {"a": tensor}}))
        with pytest.raises(BridgeError, match="segment: String should match"):
            read_bridge_file(path)


async def test_weights_that_a_trainer_still_writes_are_adopted_once_they_are_complete(segment: str) -> None:
    left = f"{segment}-left"
    try:
        manifest, theirs = export_tensors({"a": torch.zeros(3), "b": torch.zeros(3)}, left)
        lock = WeightLock.create(f"{left}-fence", policy_version=4)
        file = BridgeFile(
            model="m", pid=1, pid_start_ticks=1, instance="i", fence_segment=f"{left}-fence", tensors=manifest
        )
        entries, own = export_tensors({"a": torch.ones(3), "b": torch.ones(3)}, segment)
        with lock.writing(5):
            theirs["a"].fill_(5)
            taking = asyncio.create_task(copy_adopted(Adopted(file=file, lock=lock, parts=[theirs]), [entries]))
            for _ in range(20):
                await asyncio.sleep(0)
            theirs["b"].fill_(5)
        assert await taking == 5
        assert own["a"].tolist() == own["b"].tolist() == [5, 5, 5]
        with pytest.raises(BridgeError, match="cannot be mapped"):
            map_tensors(manifest)
    finally:
        unlink_segments([left, f"{left}-fence"])


def test_weights_of_an_earlier_server_on_a_gpu_are_gone_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner(instance="second", run=f"run-{os.getpid()}")
    lock = f"{owner.stem}first-fence"
    weight = SharedTensor(handle=cuda_handle(), shape=(1,), stride=(1,), dtype="torch.float32")
    file = BridgeFile(  # no process has begun at 1 tick
        model="m", pid=1, pid_start_ticks=1, instance="first", fence_segment=lock, tensors={"a": weight}
    )
    (tmp_path / "bridge.json").write_text(file.model_dump_json())
    WeightLock.create(lock, policy_version=4).close()
    with caplog.at_level(logging.INFO):
        assert adopt(tmp_path / "bridge.json", owner, fingerprint="") is None
    assert [(record.levelno, "freed with the server" in record.message) for record in caplog.records] == [
        (logging.INFO, True)
    ]
    assert not Path("/dev/shm", lock).exists()


def test_a_server_reads_no_checkpoint_only_where_memory_or_a_running_trainer_has_all_of_it(tmp_path: Path) -> None:
    owner, path = Owner(instance="second", run=f"run-{os.getpid()}"), tmp_path / "bridge.json"
    fence, weights = f"{owner.stem}first-fence", f"{owner.stem}first-weights"
    lock = WeightLock.create(fence)
    try:
        in_memory, _ = export_tensors({"a": torch.zeros(3)}, weights)
        on_gpu = {"a": SharedTensor(handle=cuda_handle(), shape=(1,), stride=(1,), dtype="torch.float32")}

        def needs_none(tensors: Mapping[str, SharedTensor], *, by: Owner = owner, **others: Any) -> bool:
            gone = {"pid": 1, "pid_start_ticks": 1}  # no process has begun at 1 tick
            own = {"model": "m", "instance": "first", "fence_segment": fence, "fingerprint": "f", "tensors": tensors}
            file = BridgeFile.model_validate({**gone, **own, "is_all_of_checkpoint": True, **others})
            path.write_text(file.model_dump_json())
            return need_no_checkpoint(path, by, "f")

        me = ProcessIdentity.of_this_process()
        assert not need_no_checkpoint(path, owner, "f")
        assert needs_none(in_memory)
        assert not needs_none(in_memory, is_all_of_checkpoint=False)
        assert not needs_none(in_memory, fingerprint="of another model")
        assert not needs_none(in_memory, pid=me.pid, pid_start_ticks=me.start_ticks)
        assert not needs_none(in_memory, by=Owner(instance="second", run="another"))
        assert not needs_none(in_memory, by=Owner(instance="second", run=None))
        assert not needs_none(on_gpu)
        trainer = start_forked(write_and_wait, fence, 1, True)
        until(lambda: lock.read().sequence == 2)
        assert needs_none(on_gpu)
        assert needs_none(on_gpu, by=Owner(instance="second", run=None))
        assert not needs_none(on_gpu, is_all_of_checkpoint=False)
        trainer.kill()
        trainer.join()
        assert not needs_none(on_gpu)
        trainer = start_forked(write_and_wait, fence, 1, False)
        until(lambda: lock.read().sequence == 4)
        assert not needs_none(on_gpu)
        trainer.kill()
        trainer.join()
        lock.expect(None)
        assert not needs_none(in_memory)
    finally:
        unlink_segments([fence, weights])


def test_weights_that_a_trainer_had_still_to_write_are_not_adopted_but_expected_again(tmp_path: Path) -> None:
    """The next server waited for their write, and the trainer for that server."""
    owner, path = Owner(instance="second", run=f"run-{os.getpid()}"), tmp_path / "bridge.json"
    fence, weights = f"{owner.stem}first-fence", f"{owner.stem}first-weights"
    lock = WeightLock.create(fence)
    trainer = start_forked(write_and_wait, fence, 1, True)
    try:
        tensors, _ = export_tensors({"a": torch.zeros(3)}, weights)
        gone = {"pid": 1, "pid_start_ticks": 1, "model": "m", "instance": "first", "fingerprint": "f"}
        file = {**gone, "fence_segment": fence, "tensors": tensors, "is_all_of_checkpoint": True}
        path.write_text(BridgeFile.model_validate(file).model_dump_json())
        until(lambda: lock.read().sequence == 2)
        lock.expect(lock.writer())
        assert need_no_checkpoint(path, owner, "f")
        assert take_over(path, owner, "f") == (None, lock.writer())
    finally:
        trainer.kill()
        unlink_segments([fence, weights])


def test_missing_space_is_an_error_and_leaves_no_file(segment: str) -> None:
    free = os.statvfs("/dev/shm")
    too_many = free.f_bavail * free.f_frsize + 2**30
    with pytest.raises(BridgeError, match="bytes of shared memory cannot be allocated"):
        export_tensors({"a": torch.empty(too_many, dtype=torch.uint8, device="meta")}, segment)
    assert not Path("/dev/shm", segment).exists()


def test_a_dtype_unknown_to_torch_is_refused() -> None:
    assert dtype_from_text("torch.bfloat16") is torch.bfloat16
    with pytest.raises(BridgeError, match="not a dtype"):
        dtype_from_text("torch.nn")
