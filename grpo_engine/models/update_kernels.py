"""Triton kernels of an update: gradients of micro-batches added up, and AdamW with 8-bit states.

Both are limited by the card's memory. torch adds bf16 to fp32 at 2.7 TB/s on an H200, copies it to fp32 at 2.0, and
rounds stochastically in passes over fp32 copies. bitsandbytes finds each 8-bit code by a search of eight dependent
steps, so that its kernel takes 222 ms for 8 B parameters, where reading and writing all of it takes 30; here a code is
computed.

Stochastic rounding is that of `rounding`, with Philox numbers from a seed: numbers of the CPU's generator give seeds,
so that a resumed trainer repeats them.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

BLOCK = 256
"""Numbers that share a scale, as in bitsandbytes."""
ROWS = 4
"""Blocks of a program of `adamw_8bit_`."""
ADDED = 4096
"""Numbers of a program of `add`."""
LOG2_10: tl.constexpr = tl.constexpr(3.321928094887362)


def add(total: Tensor | None, gradient: Tensor) -> Tensor:
    """The `total` with a gradient in 16 bits added, in place: in fp32, and rounded stochastically if it is bf16.

    Without a total, the gradient in fp32.
    """
    gradient, is_first = gradient.contiguous(), total is None
    total = torch.empty_like(gradient, dtype=torch.float32) if total is None else total
    rounds, numel = total.dtype is torch.bfloat16, gradient.numel()
    with torch.cuda.device_of(gradient):  # type: ignore[no-untyped-call]
        _add[(triton.cdiv(numel, ADDED),)](
            total, gradient, numel, _seed() if rounds else 0, IS_FIRST=is_first, ROUNDS=rounds, BLOCK=ADDED, num_warps=8
        )
    return total


def _seed() -> int:
    return int(torch.randint(1 << 31, ()))


def adamw_8bit_(
    parameter: Tensor,
    gradient: Tensor,
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    maps: tuple[Tensor, Tensor],
    *,
    gradient_scale: float,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update a parameter and its states in place.

    Args:
        parameter: contiguous, of N numbers: fp32, or bf16, which is rounded stochastically.
        gradient: contiguous, of any float type; finite.
        codes: (N,) uint8 of both moments.
        scales: (N / 256,) fp32 of both, rounded up: the largest magnitude in each block.
        maps: (256,) fp32: the value of each code, signed for the first moment, from 0 on for the second.
        step: number of this update, from 1 on.
    """
    numel, rounds = parameter.numel(), parameter.dtype is torch.bfloat16
    correction2 = (1.0 - betas[1] ** step) ** 0.5
    with torch.cuda.device_of(parameter):  # type: ignore[no-untyped-call]
        _update[(triton.cdiv(numel, ROWS * BLOCK),)](
            parameter,
            gradient,
            *codes,
            *scales,
            *maps,
            numel,
            gradient_scale,
            betas[0],
            betas[1],
            eps * correction2,
            lr * correction2 / (1.0 - betas[0] ** step),
            1.0 - lr * weight_decay,
            _seed() if rounds else 0,
            ROUNDS=rounds,
            ROWS=ROWS,
            BLOCK=BLOCK,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    total_at, gradient_at, numel, seed, IS_FIRST: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = places < numel
    value = tl.load(gradient_at + places, is_there).to(tl.float32)
    if not IS_FIRST:
        value += tl.load(total_at + places, is_there).to(tl.float32)
    if ROUNDS:
        value = _rounded(value, seed, places)
    tl.store(total_at + places, value, is_there)


@triton.jit
def _rounded(value, seed, places):  # type: ignore[no-untyped-def]
    """fp32 numbers as bf16, stochastically: random bits are added to the lower half, which is then cut off."""
    bits = value.to(tl.uint32, bitcast=True) + (tl.randint(seed, places) & 0xFFFF).to(tl.uint32)
    rounded = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(value == value, rounded, value).to(tl.bfloat16)  # a carry could make infinity of NaN


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    parameter_at,
    gradient_at,
    codes1_at,
    codes2_at,
    scales1_at,
    scales2_at,
    map1_at,
    map2_at,
    numel,
    gradient_scale,
    beta1,
    beta2,
    eps,
    step_size,
    decay,
    seed,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_there, has_row = places < numel, rows * BLOCK < numel
    gradient = tl.load(gradient_at + places, is_there, other=0.0).to(tl.float32) * gradient_scale
    code1 = tl.load(codes1_at + places, is_there, other=127).to(tl.int32)  # 0 in either map
    code2 = tl.load(codes2_at + places, is_there, other=0).to(tl.int32)
    parameter = tl.load(parameter_at + places, is_there, other=0.0).to(tl.float32)
    scale1 = tl.load(scales1_at + rows, has_row, other=0.0)
    scale2 = tl.load(scales2_at + rows, has_row, other=0.0)
    first = tl.load(map1_at + code1) * scale1[:, None] * beta1 + (1.0 - beta1) * gradient
    second = tl.load(map2_at + code2) * scale2[:, None] * beta2 + (1.0 - beta2) * gradient * gradient
    parameter = (parameter - step_size * (first / (tl.sqrt(second) + eps))) * decay
    if ROUNDS:
        parameter = _rounded(parameter, seed, places)
    tl.store(parameter_at + places, parameter, is_there)

    largest1, largest2 = tl.max(tl.abs(first), axis=1), tl.max(second, axis=1)
    tl.store(scales1_at + rows, largest1, has_row)
    tl.store(scales2_at + rows, largest2, has_row)
    share1 = tl.abs(first) / tl.where(largest1 > 0.0, largest1, 1.0)[:, None]
    share2 = second / tl.where(largest2 > 0.0, largest2, 1.0)[:, None]
    # Codes of the first moment: 127 is 0, larger ones are positive, 255 is 1. There is no -1, and a negative number
    # never becomes 0, as in bitsandbytes.
    rank1 = _rank(share1, map1_at + 127, 0)
    negative = 127 - tl.minimum(tl.maximum(rank1, 1), 127)
    tl.store(codes1_at + places, tl.where(first < 0.0, negative, 127 + rank1).to(tl.uint8), is_there)
    tl.store(codes2_at + places, _rank(share2, map2_at, 1).to(tl.uint8), is_there)


@triton.jit  # type: ignore[untyped-decorator]
def _rank(share, map_at, ONE_MORE_BIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of the nearest value in a map of values from 0 to 1, for shares from 0 to 1.

    Decade d, from 10^(d - 7) to 10^(d - 6), has 2^d equal bins, or twice as many; values are their centers. Before the
    decades is 0, after them 1, so that the first bin of decade d has rank 2^d, or 2^(d + 1) - 1.
    """
    decade = tl.floor(tl.log2(tl.maximum(share, 1e-7)) / LOG2_10) + 7.0
    decade = tl.minimum(tl.maximum(decade, 0.0), 6.0)
    bins = tl.exp2(decade + ONE_MORE_BIT)
    place = (share * tl.exp2((6.0 - decade) * LOG2_10) - 0.1) * (bins / 0.9)
    rank = (bins + tl.minimum(tl.maximum(tl.floor(place), 0.0), bins - 1.0)).to(tl.int32) - ONE_MORE_BIT
    # At the ends of a decade, and of the map, the neighbour may be nearer.
    own = tl.load(map_at + rank)
    above = tl.load(map_at + tl.minimum(rank + 1, 255 if ONE_MORE_BIT else 128))
    below = tl.load(map_at + rank - 1)
    rank = tl.where(share > 0.5 * (own + above), rank + 1, rank)
    return tl.where(share < 0.5 * (own + below), rank - 1, rank)
