"""Copies of a trainer's state in main memory, from which a checkpoint is written while training goes on.

The memory is kept from one checkpoint to the next: new pages take longer than the copy. For a GPU it can be pinned
(page-locked), which lets the GPU copy into it by itself, at the speed of its bus.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

MOST_OF_FREE_MEMORY = 0.75
"""Share of the main memory that is free which copies may take; the trainer and its neighbours need some too."""
_ALIGNMENT = 64
_CGROUP = Path("/sys/fs/cgroup")
_FOR_ALL_DEVICES = 1
"""`cudaHostRegisterPortable`."""

log = logging.getLogger(__name__)


class StagingMemory:
    """Main memory for one copy of a state."""

    def __init__(self, *, is_pinned: bool = False) -> None:
        """No memory is taken yet.

        Args:
            is_pinned: whether to pin it, where there is a GPU.
        """
        self._is_pinned = is_pinned
        self._memory: mmap.mmap | None = None
        self._registered: int | None = None

    @property
    def num_bytes(self) -> int:
        """What is held now."""
        return 0 if self._memory is None else len(self._memory)

    @torch.no_grad()
    def copy(self, state: Any) -> Any:
        """A nested state with its tensors copied; those of the last copy are overwritten.

        A tensor that occurs several times is copied once. Other values must not change later.

        Raises:
            MemoryError: there is not so much memory.
        """
        originals = unique_tensors(state)
        self._reserve(_size(originals.values()))
        copies: dict[tuple[object, ...], Tensor] = {}
        start = 0
        for key, tensor in originals.items():
            copies[key] = self._tensor(start, tensor)
            start += _aligned(tensor.nbytes)
            copies[key].copy_(tensor, non_blocking=self._registered is not None)
        for device in {tensor.device for tensor in originals.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return _replaced(state, copies)

    def close(self) -> None:
        """Give the memory back, once its copies are gone too."""
        if self._registered is not None:
            _cudart().cudaHostUnregister(self._registered)
        self._memory = self._registered = None

    def _reserve(self, num_bytes: int) -> None:
        if self.num_bytes >= max(num_bytes, 1):
            return
        self.close()
        try:
            self._memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{num_bytes / 1e9:.3g} GB for a copy of the state: {error.strerror}") from error
        with suppress(OSError):  # a kernel without large pages, with which new memory takes a fraction of the time
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        if self._is_pinned and torch.cuda.is_available():
            address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
            code = _cudart().cudaHostRegister(address, len(self._memory), _FOR_ALL_DEVICES)
            if int(code) == 0:
                self._registered = address
            else:
                log.warning("%.3g GB of main memory cannot be pinned: copies take longer", num_bytes / 1e9)

    def _tensor(self, start: int, like: Tensor) -> Tensor:
        """A contiguous tensor with a storage of its own, as writers of files expect."""
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        assert self._memory is not None
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=start)
        return flat.view(like.shape)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def copy_bytes(state: Any) -> int:
    """Size of a copy."""
    return _size(unique_tensors(state).values())


def unique_tensors(state: Any) -> dict[tuple[object, ...], Tensor]:
    """The tensors of a nested state, each once, by the memory that they are in."""
    return {_key(tensor): tensor for tensor in _tensors(state)}


def free_memory() -> int:
    """Main memory that this process may still take: of the machine, or of its container where that has less."""
    return int(min(psutil.virtual_memory().available, *_free_in_cgroups(_CGROUP)))


def _free_in_cgroups(folder: Path) -> Iterator[float]:
    """Of the control group as a container sees it; caches of files are given up before memory runs out."""
    yield math.inf
    try:
        most = (folder / "memory.max").read_text().strip()
        if most != "max":
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / "memory.current").read_text()) - int(counts["inactive_file"])
            yield max(int(most) - used, 0)
    except (OSError, ValueError, KeyError):  # no such file system, or an older one
        return


def _tensors(state: Any) -> Iterator[Tensor]:
    match state:
        case Tensor():
            yield state.detach()
        case Mapping():
            for value in state.values():
                yield from _tensors(value)
        case list() | tuple():
            for value in state:
                yield from _tensors(value)


def _replaced(state: Any, copies: Mapping[tuple[object, ...], Tensor]) -> Any:
    match state:
        case Tensor():
            return copies[_key(state)]
        case Mapping():
            return {key: _replaced(value, copies) for key, value in state.items()}
        case list():
            return [_replaced(value, copies) for value in state]
        case tuple():
            return tuple(_replaced(value, copies) for value in state)
        case _:
            return state


def _key(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
