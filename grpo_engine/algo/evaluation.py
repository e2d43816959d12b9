"""Metrics of held-out answers: avg@k, pass@k, and their standard errors. Pure.

P prompts, G completions of each. Prompts are the random draw, and completions of one prompt are correlated, so errors
are computed over prompts: the standard deviation of the P per-prompt values over sqrt(P) (Miller 2024, arXiv
2411.00640, who calls it clustered; clusters have equal size here).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """A mean over prompts and its standard error; float64 scalars."""

    mean: Tensor
    standard_error: Tensor
    """NaN for a single prompt."""


def avg_at_k(rewards_PG: Tensor) -> Tensor:
    """Mean reward of each prompt's completions, (P, G) → (P,) float64."""
    return rewards_PG.double().mean(dim=1)


def pass_at_k(solved_PG: Tensor, k: int) -> Tensor:
    """The chance that at least one of k completions solves the prompt, (P, G) bool → (P,) float64.

    Chen et al. 2021, arXiv 2107.03374, eq. 1: the share of the k-subsets of the G completions that hold a solution,
    1 − C(G − c, k) / C(G, k) with c solutions; unbiased for every k up to G. The quotient is taken as the product of
    1 − k / i over i = G − c + 1 … G, as they do, because the binomials themselves overflow.

    Raises:
        ValueError: k is not between 1 and G.
    """
    num_samples = solved_PG.shape[1]
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} completions: k must be between 1 and {num_samples}")
    num_solved_P = solved_PG.sum(dim=1)
    i_G = torch.arange(1, num_samples + 1, dtype=torch.float64, device=solved_PG.device)
    counts_PG = i_G > (num_samples - num_solved_P)[:, None]
    none_solves_P = torch.where(counts_PG, (1 - k / i_G).clamp(min=0), 1.0).prod(dim=1)
    return 1 - none_solves_P


def over_prompts(values_P: Tensor) -> Estimate:
    """Mean and standard error of per-prompt values, (P,)."""
    values_P = values_P.double()
    deviation = values_P.std(correction=1) if len(values_P) > 1 else values_P.new_tensor(torch.nan)
    return Estimate(values_P.mean(), deviation / len(values_P) ** 0.5)


def ks_up_to(num_samples: int) -> list[int]:
    """The k for which pass@k is reported: 1, 2, 4, … and `num_samples` itself."""
    return sorted({*(2**power for power in range(num_samples.bit_length())), num_samples})
