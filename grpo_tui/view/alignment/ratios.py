"""Ratios of the loss beside its clip, and counts for their histogram. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """The ratios that the loss sees, beside its clip."""

    num: int
    mean: float
    low_edge: float
    high_edge: float
    num_below: int
    num_above: int

    @property
    def share_outside(self) -> float:
        """Of the tokens (or completions), those that the clip may act on."""
        return (self.num_below + self.num_above) / self.num if self.num else 0.0


def ratios(differences: Sequence[float], clip_low: float, clip_high: float) -> Ratios:
    """Ratios beside the clip `1 − clip_low … 1 + clip_high`, of differences in rising order."""
    low_edge, high_edge = 1 - clip_low, 1 + clip_high
    below = bisect_left(differences, math.log(low_edge)) if low_edge > 0 else 0
    above = len(differences) - bisect_right(differences, math.log(high_edge))
    mean = math.fsum(math.exp(min(difference, 50.0)) for difference in differences) / max(1, len(differences))
    return Ratios(
        num=len(differences), mean=mean, low_edge=low_edge, high_edge=high_edge, num_below=below, num_above=above
    )


def counts_between(rising: Sequence[float], edges: Sequence[float]) -> list[int]:
    """How many of the values lie from each edge up to the next; the last edge belongs to the last bin."""
    places = [bisect_left(rising, edge) for edge in edges[:-1]] + [bisect_right(rising, edges[-1])]
    return [high - low for low, high in pairwise(places)]


def round_up(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 5, 7.5, 10 … times a power of ten: an end of a scale."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        (factor * power for factor in (1, 1.5, 2, 3, 5, 7.5) if factor * power >= value * (1 - 1e-9)), 10 * power
    )
