"""Writes tensors into a safetensors file, GPU tensors through a small pinned buffer.

safetensors' own writer copies the whole file to newly allocated, unpinned memory first, which costs more than the copy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

WRITERS = 8
"""Files that are written at a time: one writer is limited by one core, below a fast disk's bandwidth."""

_STAGE_BYTES = 32 << 20
_ALIGNMENT = 8
"""Of the first tensor; safetensors pads its header to it."""
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(tensors: Mapping[str, Tensor], path: Path | str, metadata: Mapping[str, str] | None = None) -> None:
    """Write a file as `safetensors.torch.save_file` would, for tensors of any device.

    Format: https://huggingface.co/docs/safetensors/en/index#format

    Args:
        tensors: those that `can_write` says it can.
        metadata: texts for the file's header.

    Raises:
        OSError: the disk fails.
        ValueError: a tensor of another type, or not contiguous.
    """
    for name, tensor in tensors.items():
        if not can_write(tensor):
            raise ValueError(f"{path}: {name} is {tensor.dtype}, contiguous: {tensor.is_contiguous()}")
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # so that all are aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    stage = torch.empty(_STAGE_BYTES if on_gpu else 0, dtype=torch.uint8, pin_memory=on_gpu)
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for _, tensor in ordered:
            content = tensor.detach().view(-1).view(torch.uint8)
            for begin in range(0, len(content), _STAGE_BYTES):
                piece = content[begin : begin + _STAGE_BYTES]
                if piece.is_cuda:
                    piece = stage[: len(piece)].copy_(piece)
                _write_all(file.fileno(), piece.numpy().data)


def can_write(tensor: Tensor) -> bool:
    """Whether it is contiguous, and of a plain type."""
    return tensor.dtype in _NAMES and tensor.is_contiguous()


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:  # one call writes 2 GB at most, and less on a disk that is nearly full
        content = content[os.write(descriptor, content) :]
