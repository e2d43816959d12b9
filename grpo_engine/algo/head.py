"""The output layer, computed in tiles: C tokens × W words of logits at a time, of N × V in all; H is the hidden size.
size.

Logits are fp32 whatever the model's dtype (bf16 rounds a logit of 20 to the nearest 1/8); float64 stays float64. A tile
is read by the Triton kernels of `logprobs_kernels` on CUDA, and by the eager functions of `tiles` elsewhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_engine.algo.tiles import Running, Softmax, Tile, fold_tile, tile_gradient
from grpo_engine.compilers import has_compiler

TILES = {"cpu": (2**11, 2**10), "cuda": (2**15, 2**12)}
"""The most tokens of a tile, and its words when it has so many; fewer tokens have more words. 8 MB of logits stay in
a CPU's caches; 512 MB let a GPU read and write the gradient of `hidden` seldom enough not to notice."""


def logits_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Of logits and of every sum over them: fp32, or float64 where an operand is."""
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


class Head:
    """The output layer, walked in tiles, its operands in the dtype in which they are multiplied."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: Tensor | None,
        chunk_size: int | None,
        soft_cap: float | None,
    ) -> None:
        self.dtype = logits_dtype(hidden, weight)
        # A GPU multiplies halves with an fp32 result; elsewhere that takes fp32 operands.
        self.operand = torch.promote_types(hidden.dtype, weight.dtype) if hidden.is_cuda else self.dtype
        self.has_kernels = _has_kernels(hidden.device, self.dtype)
        self.hidden = hidden.detach().to(self.operand)
        self._weight, self._bias = weight.detach(), bias
        self._labels, self._temperature, self._soft_cap = labels, temperature, soft_cap
        most_rows, fewest_columns = TILES.get(hidden.device.type, TILES["cpu"])
        self._num_rows = max(min(chunk_size or most_rows, len(labels)), 1)
        num_columns = most_rows * fewest_columns // self._num_rows
        self._num_columns = max(num_columns // 64 * 64, 64)  # rows of a tile then start where a GPU likes them to

    def blocks(self) -> Iterator[slice]:
        """The vocabulary, block by block."""
        for start in range(0, len(self._weight), self._num_columns):
            yield slice(start, min(start + self._num_columns, len(self._weight)))

    def block(self, columns: slice) -> Tensor:
        """(W, H) of the weight."""
        return self._weight[columns].to(self.operand)

    def tokens(self) -> Iterator[slice]:
        """The tokens, as many at a time as a tile has."""
        for start in range(0, len(self._labels), self._num_rows):
            yield slice(start, min(start + self._num_rows, len(self._labels)))

    def tile(self, rows: slice, columns: slice, products: Tensor) -> Tile:
        """Some tokens × some words, with their products (C, W)."""
        return Tile(
            products=products,
            labels=self._labels[rows] - columns.start,
            bias=None if self._bias is None else self._bias[columns],
            temperature=None if self._temperature is None else self._temperature[rows],
            soft_cap=self._soft_cap,
        )

    def fold(self, tile: Tile, running: Running) -> None:
        """Add the tile's words to its tokens' softmax; overwrites the tile's products."""
        fold = _kernels().fold_tile if self.has_kernels else fold_tile
        fold(tile, running)

    def gradient(
        self, tile: Tile, softmax: Softmax, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> Tensor:
        """(C, W) gradient for the tile's products, ready to be multiplied; the products are lost."""
        of = _kernels().tile_gradient if self.has_kernels else tile_gradient
        gradient: Tensor = of(tile, softmax, grad_logprobs, grad_entropy, self.operand)
        return gradient


def check_shapes(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    chunk_size: int | None,
    soft_cap: float | None,
    num_words: int,
) -> None:
    """Refuse what does not fit.

    Args:
        num_words: in the vocabulary, of which `weight` may have a part.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of hidden {tuple(hidden.shape)} less its last"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight {tuple(weight.shape)} must be (V, {hidden.shape[-1]}) for hidden {tuple(hidden.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must be {tuple(weight.shape[:1])}, one a row of weight")
    if labels.is_floating_point() or labels.dtype is torch.bool:
        raise ValueError(f"labels is {labels.dtype}: expected token ids of an integer dtype")
    if labels.device.type == "cpu" and labels.numel() > 0:
        lowest, highest = (int(bound) for bound in labels.aminmax())
        if lowest < 0 or highest >= num_words:
            raise ValueError(
                f"labels go from {lowest} to {highest}, the vocabulary from 0 to {num_words - 1}: "
                "pass trained tokens only, as `labels[mask]`"
            )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size}: must be at least 1 token")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap = {soft_cap}: must be above 0; None switches it off")


def flat_temperature(temperature: float | Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor | None:
    """(N,) temperatures, or None where all are 1."""
    if not isinstance(temperature, Tensor):
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature = {temperature}: must be a finite number above 0")
        if temperature == 1.0:
            return None
        return torch.full((labels.numel(),), temperature, dtype=dtype, device=labels.device)
    if temperature.ndim not in (0, labels.ndim):
        raise ValueError(
            f"temperature {tuple(temperature.shape)} must have {labels.ndim} dimensions as labels "
            f"{tuple(labels.shape)}: unsqueeze it, as (B, 1) for one a row"
        )
    return temperature.detach().to(labels.device, dtype).broadcast_to(labels.shape).reshape(-1).contiguous()


def product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product with an fp32 (float64) result; autocast would make it bf16 again."""
    with torch.autocast(left.device.type, enabled=False):
        if left.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.mm(left, right)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, summed by the product itself: no second tensor of the size of `total`."""
    with torch.autocast(left.device.type, enabled=False):
        if left.dtype in (torch.bfloat16, torch.float16):
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        else:
            total.addmm_(left, right)


def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    is_for_them = device.type == "cuda" and dtype is torch.float32
    return is_for_them and importlib.util.find_spec("triton") is not None and has_compiler()


def _kernels() -> Any:
    """The Triton kernels: imported only where they run."""
    from grpo_engine.algo import logprobs_kernels

    return logprobs_kernels
