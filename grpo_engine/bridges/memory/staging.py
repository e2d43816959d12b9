"""A small memory on the device of an inference server, through which a trainer hands over weights of any size.

All elements of all tensors, in the order of the layers, are one stream. The memory holds one part of it after another;
the trainer fills it, and the server copies it to where the elements belong. Only this memory is mapped by the server:
its own, which vLLM's sleep mode unmaps, cannot be exported, and that of a sharded trainer comes and goes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_engine.bridges.memory.shared_names import remove_stale_staging, run_of, staging_name
from grpo_engine.bridges.memory.shared_tensors import export_tensors, unlink_segments
from grpo_engine.wire.bridge_file import SharedTensor
from grpo_engine.wire.inference import StagedWeights, TensorShape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from grpo_engine.bridges.transport.weight_group import Checksum

_NAME = "staging"


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one tensor that are in the memory together."""

    name: str
    start: int
    """In the flattened tensor."""
    count: int
    offset: int
    """In the memory."""


def pieces_by_content(layers: Iterable[Iterable[TensorShape]], capacity: int) -> list[list[Piece]]:
    """What the memory holds, one content after another.

    Args:
        capacity: elements that fit.
    """
    contents: list[list[Piece]] = [[]]
    used = 0
    for tensor in (tensor for layer in layers for tensor in layer):
        start, left = 0, math.prod(tensor.shape)
        while left:
            if used == capacity:
                contents.append([])
                used = 0
            count = min(left, capacity - used)
            contents[-1].append(Piece(tensor.name, start, count, used))
            start, left, used = start + count, left - count, used + count
    return contents


class Staging:
    """The trainer's side."""

    def __init__(
        self, layers: list[dict[str, tuple[int, ...]]], *, dtype: torch.dtype, device: torch.device, num_bytes: int
    ) -> None:
        """Allocate nothing yet.

        Args:
            layers: names and shapes of the weights, in the order in which they come.
            num_bytes: of the memory, at most.
        """
        self.layers = [[TensorShape(name=name, shape=shape) for name, shape in layer.items()] for layer in layers]
        self.dtype, self._device = dtype, device
        total = sum(math.prod(tensor.shape) for layer in self.layers for tensor in layer)
        self.capacity = max(1, min(num_bytes // dtype.itemsize, total))
        self._memory: Tensor | None = None
        self._described: SharedTensor | None = None
        self._segment: str | None = None

    def open(self) -> StagedWeights:
        """Allocate the memory, and describe it for the server.

        On a GPU it stays, since each export takes resources of CUDA until the process ends.

        Raises:
            BridgeError: it cannot be exported, or shared memory is full.
        """
        import torch

        if self._memory is None or self._described is None:
            empty = torch.empty(self.capacity, dtype=self.dtype, device=self._device)
            if self._device.type == "cuda":
                from grpo_engine.bridges.memory.cuda_tensors import export_cuda_tensors

                self._memory, described = empty, export_cuda_tensors({_NAME: empty})
            else:
                run = run_of(os.environ)
                remove_stale_staging(run)
                # Of another name each time: a server takes memory of the same description for the same memory.
                self._segment = staging_name(run)
                described, tensors = export_tensors({_NAME: empty}, self._segment)
                self._memory = tensors[_NAME]
            self._described = described[_NAME]
        return StagedWeights(memory=self._described, layers=self.layers)

    def filler(self, take: Callable[[int], None], checksum: Checksum | None = None) -> Filler:
        """What one weight update is given to.

        Args:
            take: called with the number of each content of the memory; returns when the server has copied it.
        """
        assert self._memory is not None
        return Filler(self._memory, take, checksum)

    def close(self) -> None:
        """Remove memory that has a name; a server that maps it keeps it until it takes other memory."""
        if self._segment is not None:
            unlink_segments([self._segment])
            self._memory = self._described = self._segment = None


class Filler:
    """Fills the memory with one layer after another."""

    def __init__(self, memory: Tensor, take: Callable[[int], None], checksum: Checksum | None) -> None:
        self._memory, self._take, self._checksum = memory, take, checksum
        self._used = self._number = 0
        self.num_bytes = 0
        """Handed over."""

    def add(self, layer: Mapping[str, Tensor]) -> None:
        """Hand over the tensors of a layer; the last elements stay in the memory until it is full, or `end`."""
        for tensor in layer.values():
            values = tensor.detach().to(self._memory.dtype).contiguous()
            if self._checksum is not None:
                self._checksum.add([values])
            flat, start = values.view(-1), 0
            while start < flat.numel():
                if self._used == self._memory.numel():
                    self._hand_over()
                count = min(flat.numel() - start, self._memory.numel() - self._used)
                self._memory[self._used : self._used + count].copy_(flat[start : start + count])
                start, self._used = start + count, self._used + count

    def end(self) -> None:
        """Hand over what is left."""
        if self._used:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._memory.is_cuda:
            import torch

            torch.cuda.synchronize(self._memory.device)
        self._take(self._number)
        self.num_bytes += self._used * self._memory.itemsize
        self._used, self._number = 0, self._number + 1
