"""Tensors in POSIX shared memory: one segment holds a model's weights, and any process maps it.

CUDA memory is in `cuda_tensors.py`, write access in `weight_lock.py`. Not `multiprocessing.shared_memory`: its resource
tracker unlinks segments that another process still needs when the first one exits.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from grpo_engine.bridges.memory.weight_lock import SHARED_MEMORY, attach_segment, create_segment
from grpo_engine.errors import BridgeError
from grpo_engine.wire.bridge_file import BridgeFile, PosixHandle, SharedTensor

if TYPE_CHECKING:
    import torch

SEGMENT_PREFIX = "grpo-"
"""Prefix of all our segments; nothing else below /dev/shm is ever removed."""
LAYOUT_ERRORS = (RuntimeError, ValueError, TypeError, OverflowError)
"""Raised by torch for shapes, strides and offsets that no tensor has, or that reach beyond the memory."""
_ALIGNMENT_BYTES = 64
"""A cache line, which vectorised kernels are fastest on."""


def export_tensors(
    tensors: Mapping[str, torch.Tensor], segment: str
) -> tuple[dict[str, SharedTensor], dict[str, torch.Tensor]]:
    """Copy tensors into a new segment.

    Returns:
        The manifest, and the tensors in the segment: contiguous, on the CPU, each a storage of its own.

    Raises:
        BridgeError: the name is taken, or /dev/shm has not enough space.
    """
    manifest: dict[str, SharedTensor] = {}
    end = 0
    for name, tensor in tensors.items():
        manifest[name] = SharedTensor(
            handle=PosixHandle(kind="posix", segment=segment, offset_bytes=end),
            shape=tuple(tensor.shape),
            stride=_contiguous_stride(tuple(tensor.shape)),
            dtype=str(tensor.dtype),
        )
        end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    memory = create_segment(segment, max(end, _ALIGNMENT_BYTES))
    shared = {name: _view(memory, entry) for name, entry in manifest.items()}
    for name, tensor in tensors.items():
        shared[name].copy_(tensor.detach())
    return manifest, shared


def map_tensors(manifest: Mapping[str, SharedTensor]) -> dict[str, torch.Tensor]:
    """Map the tensors of a manifest; writing into them writes into every process that maps them.

    Raises:
        BridgeError: a segment is missing or too short, or a tensor is not in POSIX shared memory, or has no layout.
    """
    memories: dict[str, mmap.mmap] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in manifest.items():
        if not isinstance(entry.handle, PosixHandle):
            raise BridgeError(f"{name}: in CUDA memory, not in POSIX shared memory")
        segment = entry.handle.segment
        if segment not in memories:
            memories[segment] = attach_segment(segment)
        tensors[name] = _view(memories[segment], entry)
    return tensors


def segments_of(manifest: Mapping[str, SharedTensor]) -> set[str]:
    """The POSIX segments that a manifest refers to."""
    return {entry.handle.segment for entry in manifest.values() if isinstance(entry.handle, PosixHandle)}


def segments_of_file(file: BridgeFile) -> set[str]:
    """All POSIX segments that belong to a bridge file, that of the weight lock included."""
    return {file.fence_segment}.union(segments_of(file.tensors), *(segments_of(part) for part in file.parts))


def unlink_segments(segments: Iterable[str]) -> None:
    """Remove segments; mapped memory is freed when its last user unmaps it."""
    for segment in segments:
        assert segment.startswith(SEGMENT_PREFIX), segment
        assert "/" not in segment, segment
        (SHARED_MEMORY / segment).unlink(missing_ok=True)


def _view(memory: mmap.mmap, entry: SharedTensor) -> torch.Tensor:
    """The tensor of `entry` in its segment; it keeps the mapping alive."""
    import torch

    handle = entry.handle
    assert isinstance(handle, PosixHandle)
    dtype = dtype_from_text(entry.dtype)
    count = 1
    for size in entry.shape:
        count *= size
    if handle.offset_bytes + count * dtype.itemsize > len(memory):
        raise BridgeError(f"{handle.segment}: too short: {len(memory)} bytes do not hold the tensor at its end")
    try:
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=handle.offset_bytes)
        return flat.as_strided(entry.shape, entry.stride)
    except LAYOUT_ERRORS as error:
        raise BridgeError(f"{handle.segment}: {layout_fault(entry, error)}") from None


def layout_fault(entry: SharedTensor, error: Exception) -> str:
    """What torch cannot make of the numbers of a bridge file."""
    reason = str(error).partition("\n")[0]
    return f"no tensor has shape {entry.shape} and stride {entry.stride} there ({reason}): restart the inference server"


def dtype_from_text(text: str) -> torch.dtype:
    """The dtype that prints as `text`, e.g. `torch.bfloat16`.

    Raises:
        BridgeError: torch has none of that name.
    """
    import torch

    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise BridgeError(f"{text!r}: not a dtype of torch {torch.__version__}")
    return dtype


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride = [1] * len(shape)
    for index in range(len(shape) - 2, -1, -1):
        stride[index] = stride[index + 1] * max(shape[index + 1], 1)
    return tuple(stride)
