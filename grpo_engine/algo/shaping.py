"""Overlong completions: what they cost, B of them.

A completion that ended at its length limit says little of its answer: it may be punished a little at a time as it nears
the limit, or not be trained on at all, which is for whoever chooses the rows. Both are DAPO's (arXiv 2503.14476,
section 3.4).
"""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (eq. 13), to be added to the rewards before advantages are taken.

    0 up to `max_length - buffer`, from there along a line to -1 at `max_length`, and -1 beyond; multiply it for
    another full penalty. A `buffer` of 0 punishes what is longer than `max_length`, and nothing else.

    Args:
        lengths: (B,) tokens of the completions.
        max_length: length at which the penalty is full.
        buffer: tokens below it over which the penalty grows.

    Returns:
        (B,) fp32, or float64 where `lengths` is.

    Raises:
        ValueError: a `buffer` that does not lie within 0..max_length.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer = {buffer} with max_length = {max_length}: must be 0 to max_length tokens")
    room = (max_length - buffer - lengths).to(torch.promote_types(lengths.dtype, torch.float32))
    if buffer == 0:
        return torch.where(room < 0, -1.0, 0.0).to(room.dtype)
    return (room / buffer).clamp(-1, 0)
