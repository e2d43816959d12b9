"""Writes tensors into safetensors files, GPU tensors through small pinned buffers.

safetensors' own writer copies the whole file to newly allocated, unpinned memory first, which costs more than the copy.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

WRITERS = 8
"""Files, or parts of them, written at a time: one writer is limited by one core, below a fast disk's bandwidth."""

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
    start, places = _layout(tensors, metadata)
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    stage = torch.empty(_STAGE_BYTES if on_gpu else 0, dtype=torch.uint8, pin_memory=on_gpu)
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(start), 0)
        for name, offset in places.items():
            for begin, piece in _pieces(tensors[name]):
                _write_piece(file.fileno(), piece, offset + begin, stage)


class FilesInParts:
    """Files whose tensors come one after the other, in any order; each is written by several threads at once."""

    def __init__(self, files: Mapping[Path, Mapping[str, Tensor]], metadata: Mapping[str, str]) -> None:
        """Write what stands before the tensors.

        Args:
            files: names, types and shapes of the tensors of each; without values.

        Raises:
            OSError: the disk fails.
        """
        self._places: dict[str, tuple[int, int, Tensor]] = {}
        self._stages: SimpleQueue[Tensor] = SimpleQueue()
        self._stack = ExitStack()
        with ExitStack() as opened:
            pool = opened.enter_context(ThreadPoolExecutor(WRITERS, thread_name_prefix="weight-files"))
            for path, tensors in files.items():
                descriptor = opened.enter_context(open(path, "wb", buffering=0)).fileno()
                start, places = _layout(tensors, metadata)
                _write_all(descriptor, memoryview(start), 0)
                self._places |= {name: (descriptor, offset, tensors[name]) for name, offset in places.items()}
            self._stack = opened.pop_all()
        self._pool = pool

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write some of the tensors; they may be freed afterwards.

        Raises:
            OSError: the disk fails.
            ValueError: a tensor that belongs to none of the files, or comes twice, or of another type or shape.
        """
        writings = []
        for name, tensor in tensors.items():
            descriptor, offset, expected = self._places.pop(name, (0, 0, None))
            if expected is None or (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
                raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} is not what the files have room for")
            for begin, piece in _pieces(tensor.contiguous()):
                writings.append(self._pool.submit(self._write_piece, descriptor, piece, offset + begin))
        wait(writings)
        for writing in writings:
            writing.result()

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def require_all(self) -> None:
        """Refuse files that lack a tensor.

        Raises:
            ValueError: one was not written.
        """
        if self._places:
            raise ValueError(f"{len(self._places)} tensors were not written, {next(iter(self._places))} among them")

    def _write_piece(self, descriptor: int, piece: Tensor, offset: int) -> None:
        """Write a piece, of a GPU through one of as many buffers as there are threads."""
        if not piece.is_cuda:
            _write_piece(descriptor, piece, offset, piece)
            return
        try:
            stage = self._stages.get_nowait()
        except Empty:
            stage = torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        _write_piece(descriptor, piece, offset, stage)
        self._stages.put(stage)


def _layout(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> tuple[bytes, dict[str, int]]:
    """What stands before the tensors of a file, and where each begins, in the order in which they stand there."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # so that all are aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begins: dict[str, int] = {}
    end = 0
    for name, tensor in ordered:
        begins[name], end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = len(text).to_bytes(8, "little") + text
    return start, {name: len(start) + begin for name, begin in begins.items()}


def _pieces(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A tensor's bytes in pieces that fit into a buffer, each with its place."""
    content = tensor.detach().view(-1).view(torch.uint8)
    for begin in range(0, len(content), _STAGE_BYTES):
        yield begin, content[begin : begin + _STAGE_BYTES]


def _write_piece(descriptor: int, piece: Tensor, offset: int, stage: Tensor) -> None:
    """Write bytes; those of a GPU through `stage`."""
    if piece.is_cuda:
        piece = stage[: len(piece)].copy_(piece)
    # Not `numpy()`, after which torch cannot free the storage, as FSDP does with that of a gathered layer.
    content = (ctypes.c_ubyte * len(piece)).from_address(piece.data_ptr())
    _write_all(descriptor, memoryview(content).cast("B"), offset)


def can_write(tensor: Tensor) -> bool:
    """Whether it is contiguous, and of a plain type."""
    return tensor.dtype in _NAMES and tensor.is_contiguous()


def _write_all(descriptor: int, content: memoryview, offset: int) -> None:
    while content:  # one call writes 2 GB at most, and less on a disk that is nearly full
        num_bytes = os.pwrite(descriptor, content, offset)
        content, offset = content[num_bytes:], offset + num_bytes
