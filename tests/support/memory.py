"""Memory on a CPU: bytes that autograd saves, and peak bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def saved_bytes(run: Callable[[], object], known: Iterable[Tensor]) -> int:
    """Bytes that autograd saves for `run`, each storage once, without those of the `known` tensors."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, Tensor] = {}

    def record(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in seen:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        result = run()
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del result
    return num_bytes


class PeakMemory(TorchDispatchMode):
    """Counts the storages that operations in the block allocate, while they are alive."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """`known` tensors are not counted."""
        super().__init__()
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, bool] = weakref.WeakKeyDictionary()
        for tensor in known:
            self._seen[tensor.untyped_storage()] = True
        self._live_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._seen:
                storage = tensor.untyped_storage()
                self._seen[storage] = True
                self._live_bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        return result

    def _free(self, num_bytes: int) -> None:
        self._live_bytes -= num_bytes
