"""Stochastic rounding of fp32 to bf16: updates below bf16's last bit accumulate on average instead of vanishing."""

from __future__ import annotations

import torch
from torch import Tensor

LOWER_HALF = 1 << 16
"""Range of the 16 bits of an fp32 number that bf16 drops: bf16 is the upper half."""

ROUNDED_AT_ONCE = 1 << 24
"""Elements per pass, so that the random bits of a large parameter take 64 MB, not as much as itself."""


@torch.no_grad()
def round_to_bf16_(values: Tensor) -> Tensor:
    """Round contiguous fp32 `values` in place to values of bf16, so that a copy to bf16 is exact.

    Of the two bf16 neighbours each is taken with the probability of the other's distance, so the expected value is
    the value itself (Gupta et al. 2015, arXiv:1502.02551, section 3.1). Values of bf16, infinities and NaN are
    unchanged; beyond bf16's largest number the neighbour is infinity, as in rounding to nearest.

    Randomness comes from torch's generator of the device.
    """
    for part in torch.split(values.view(-1), ROUNDED_AT_ONCE):
        is_nan = part.isnan()
        noise = torch.randint(LOWER_HALF, part.shape, dtype=torch.int32, device=part.device)
        # The lower half plus as many random bits carries into the upper half as often as the lower half is large.
        part.view(torch.int32).add_(noise).bitwise_and_(-LOWER_HALF)
        part.masked_fill_(is_nan, torch.nan)  # a carry could have made infinity or -0 of it
    return values


@torch.no_grad()
def add_rounded_(total: Tensor, addend: Tensor) -> Tensor:
    """Add to a contiguous bf16 `total` in fp32 and round the sum stochastically, so that small addends are not lost.

    The expected value of the total is the exact sum; a sum that bf16 can represent is exact.
    """
    for part, added in zip(
        torch.split(total.view(-1), ROUNDED_AT_ONCE), torch.split(addend.reshape(-1), ROUNDED_AT_ONCE), strict=True
    ):
        part.copy_(round_to_bf16_(part.to(torch.float32).add_(added)))
    return total
