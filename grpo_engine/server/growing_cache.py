"""A key-value cache with room to grow: a step writes one position instead of copying everything that is there.

transformers' own dynamic layer concatenates, which moves the whole cache at every token. Layers of other kinds (sliding
windows, indexed attention) stay as transformers makes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_LEAST_ROOM = 32
"""Positions; a third of the length where that is more, so that all growing together costs a few copies."""


_WORTH_ROOM = 2**19
"""Elements of a layer's keys; below it, copying is quicker than attending to views with gaps."""


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
        if self._buffers is None and key_states[..., 0, :].numel() * end < _WORTH_ROOM:
            return super().update(key_states, value_states)  # type: ignore[no-any-return]
        if self._buffers is None or self._buffers[0].shape[-2] < end:
            self._buffers = (
                _with_room(self.keys, key_states, length, end),
                _with_room(self.values, value_states, length, end),
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


def _with_room(old: Tensor, like: Tensor, length: int, end: int) -> Tensor:
    capacity = end + max(_LEAST_ROOM, end // 3)
    buffer = torch.empty(*like.shape[:2], capacity, like.shape[-1], dtype=like.dtype, device=like.device)
    if length:
        buffer[:, :, :length] = old
    return buffer
