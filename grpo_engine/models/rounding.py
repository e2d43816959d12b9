"""Rounding fp32 to bf16 at random, so that what is below bf16's last bit adds up on average instead of vanishing."""

from __future__ import annotations

import torch
from torch import Tensor

LOWER_HALF = 1 << 16
"""What the bits of an fp32 number hold that bf16 leaves away: bf16 is its upper half."""

ROUNDED_AT_ONCE = 1 << 24
"""Numbers a pass, so that the random bits of a large parameter take 64 MB and not as much as itself."""


@torch.no_grad()
def round_to_bf16_(values: Tensor) -> Tensor:
    """Round contiguous fp32 `values` in place to numbers that bf16 has; a copy to bf16 is exact then.

    Of the two bf16 neighbours each is taken with the probability of the other's distance, so the expected value is
    the value itself (Gupta et al. 2015, arXiv:1502.02551, section 3.1). A number that bf16 has stays as it is, and so
    do infinities and NaN; beyond bf16's largest number the neighbour is infinity, as in rounding to nearest.

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
    """Add to a contiguous bf16 `total` in fp32 and round the sum at random, so that many small addends are not lost.

    The expected value of the total is the sum of all that was added; a sum that bf16 has is exact.
    """
    for part, added in zip(
        torch.split(total.view(-1), ROUNDED_AT_ONCE), torch.split(addend.reshape(-1), ROUNDED_AT_ONCE), strict=True
    ):
        part.copy_(round_to_bf16_(part.to(torch.float32).add_(added)))
    return total
