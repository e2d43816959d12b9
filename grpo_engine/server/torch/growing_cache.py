"""A key-value cache with spare capacity: a step writes one position instead of copying the whole cache.

transformers' dynamic layer concatenates, which copies the whole cache for every token. Layers of other kinds (sliding
windows, indexed attention) are left as transformers creates them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_MIN_SPARE = 32
"""Spare positions; a third of the length if that is more, so that the cache is copied only a few times."""
_MIN_BUFFERED = 2**19
"""Elements of a layer's keys; below it, copying is faster than attention over strided views."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values (B, heads, T, head_dim), as views of buffers that are longer."""

    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append positions and return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        if self._buffers is None and key_states[..., 0, :].numel() * end < _MIN_BUFFERED:
            return super().update(key_states, value_states)  # type: ignore[no-any-return]
        if self._buffers is None or self._buffers[0].shape[-2] < end:
            self._buffers = (
                _with_spare(self.keys, key_states, length, end),
                _with_spare(self.values, value_states, length, end),
            )
        keys, values = self._buffers
        keys[:, :, length:end] = key_states
        values[:, :, length:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of `indices`, which may repeat."""
        super().batch_select_indices(indices)
        self._buffers = None


def new_cache(config: Any) -> DynamicCache:
    """An empty cache for a model of this configuration."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _with_spare(old: Tensor, like: Tensor, length: int, end: int) -> Tensor:
    capacity = end + max(_MIN_SPARE, end // 3)
    buffer = torch.empty(*like.shape[:2], capacity, like.shape[-1], dtype=like.dtype, device=like.device)
    if length:
        buffer[:, :, :length] = old
    return buffer
