"""`fold_tile` and `tile_gradient` of `tiles` as Triton kernels: each reads a tile of fp32 products once.

One program owns a row (fold) or a stretch of one (gradient): nothing is shared, so results do not depend on the order
in which programs run. Comparisons are written so that NaN passes through: `tl.maximum` would drop it.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from grpo_engine.algo.tiles import Running, Softmax, Tile

WORDS = 4096
"""Words that a program holds at a time."""
FLOOR: tl.constexpr = tl.constexpr(-1e4)
"""`NEVER` of `tiles`."""


def fold_tile(tile: Tile, running: Running) -> None:
    """Add the tile's words to its tokens' softmax; the products are unchanged."""
    products = tile.products
    num_rows, num_columns = products.shape
    with torch.cuda.device_of(products):  # type: ignore[no-untyped-call]
        _fold[(num_rows,)](
            products,
            products.stride(0),
            num_columns,
            tile.labels,
            tile.bias,
            tile.temperature,
            tile.soft_cap,
            *running,
            BLOCK=min(WORDS, triton.next_power_of_2(num_columns)),
            num_warps=8,
        )


def tile_gradient(
    tile: Tile, softmax: Softmax, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(C, W) gradient for `tile.products`, in the dtype in which it will be multiplied; over them if that is theirs."""
    products = tile.products
    num_rows, num_columns = products.shape
    gradient = products
    if dtype is not products.dtype:
        # A matrix product is slow where rows of halves do not start at a multiple of 16 bytes.
        gradient = products.new_empty(num_rows, -(-num_columns // 8) * 8, dtype=dtype)[:, :num_columns]
    block = min(WORDS, triton.next_power_of_2(num_columns))
    with torch.cuda.device_of(products):  # type: ignore[no-untyped-call]
        _gradient[(num_rows, triton.cdiv(num_columns, block))](
            products,
            products.stride(0),
            gradient,
            gradient.stride(0),
            num_columns,
            tile.labels,
            tile.bias,
            tile.temperature,
            tile.soft_cap,
            *softmax,
            grad_logprobs,
            grad_entropy,
            BLOCK=block,
            num_warps=8,
        )
    return gradient


@triton.jit
def _logits(products, at, is_word, bias, divisor, soft_cap):  # type: ignore[no-untyped-def]
    """fp32 z of some words, and tanh of the soft cap's argument where there is one."""
    logits = tl.load(products + at, mask=is_word, other=0.0)
    if bias is not None:
        logits += tl.load(bias + at, mask=is_word, other=0.0).to(tl.float32)
    squashed = logits
    if soft_cap is not None:
        decay = tl.exp(-2 * tl.abs(logits / soft_cap))
        squashed = (1 - decay) / (1 + decay)
        squashed = tl.where(logits < 0, -squashed, squashed)
        logits = squashed * soft_cap
    return logits / divisor, squashed


@triton.jit  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    products,
    stride,
    num_columns,
    labels,
    bias,
    temperature,
    soft_cap,
    maxima,
    totals,
    weighteds,
    chosens,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    divisor = 1.0
    if temperature is not None:
        divisor = tl.load(temperature + row)
    maximum = tl.load(maxima + row)
    total = tl.load(totals + row)
    weighted = tl.load(weighteds + row)
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_word = at < num_columns
        logits, _ = _logits(products, at, is_word, bias, divisor, soft_cap)
        logits = tl.where(is_word, logits, -float("inf"))
        highest = tl.max(logits)
        highest = tl.where(highest > maximum, highest, maximum)
        depth = logits - highest
        depth = tl.where(depth < FLOOR, FLOOR, depth)
        share = tl.exp(depth)
        shift = tl.where(maximum - highest < FLOOR, FLOOR, maximum - highest)
        weighted = (weighted + shift * total) * tl.exp(shift) + tl.sum(share * depth)
        total = total * tl.exp(shift) + tl.sum(share)
        maximum = highest
    tl.store(maxima + row, maximum)
    tl.store(totals + row, total)
    tl.store(weighteds + row, weighted)
    label = tl.load(labels + row)
    if (label >= 0) & (label < num_columns):
        own, _ = _logits(products, label, label < num_columns, bias, divisor, soft_cap)
        tl.store(chosens + row, own)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    products,
    stride,
    gradient,
    gradient_stride,
    num_columns,
    labels,
    bias,
    temperature,
    soft_cap,
    maxima,
    log_totals,
    entropies,
    grad_logprobs,
    grad_entropy,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_word = at < num_columns
    divisor = 1.0
    if temperature is not None:
        divisor = tl.load(temperature + row)
    logits, squashed = _logits(products + row * stride, at, is_word, bias, divisor, soft_cap)
    log_p = (logits - tl.load(maxima + row)) - tl.load(log_totals + row)
    log_p = tl.where(log_p < FLOOR, FLOOR, log_p)
    pull = tl.zeros_like(log_p)
    if grad_entropy is not None:
        pull += (log_p + tl.load(entropies + row)) * tl.load(grad_entropy + row)
    if grad_logprobs is not None:
        pull += tl.load(grad_logprobs + row)
    slope = -tl.exp(log_p) * pull
    if grad_logprobs is not None:
        slope += tl.where(at == tl.load(labels + row), tl.load(grad_logprobs + row), 0.0)
    slope /= divisor
    if soft_cap is not None:
        slope *= 1 - squashed * squashed
    tl.store(gradient + row * gradient_stride + at, slope.to(gradient.dtype.element_ty), mask=is_word)
