"""Alignment: how far the trainer's log-probabilities are from inference's, for the same tokens; and how old these are.

Measures only. Before the first update of a step both come from the same weights, so what differs is arithmetic, or a
fault: weights that did not arrive, labels shifted by one, another temperature. B rows, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def alignment_metrics(training: Tensor, inference: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Detached scalars over the trained tokens; all 0 where there are none.

    Args:
        training: log-probabilities of the trainer, any shape; outside the mask anything, NaN included.
        inference: as inference reported them, same shape.
        mask: bool, same shape: which tokens count.

    Returns:
        `diff_mean`, `diff_abs_mean` and `diff_max` (the largest magnitude) of training minus inference, and
        `training_mean`, `inference_mean`; fp32, or float64 where `training` is.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if training.shape != mask.shape or inference.shape != mask.shape:
        raise ValueError(
            f"training {tuple(training.shape)}, inference {tuple(inference.shape)} and mask {tuple(mask.shape)} "
            "differ in shape: align all three to the labels"
        )
    if mask.dtype is not torch.bool:
        raise ValueError(f"mask is {mask.dtype}: expected torch.bool")
    dtype = torch.promote_types(training.dtype, torch.float32)
    training = torch.where(mask, training.to(dtype), 0.0)
    inference = torch.where(mask, inference.to(dtype), 0.0)
    difference = training - inference
    num_tokens = mask.sum().clamp(min=1)
    return {
        "diff_mean": difference.sum() / num_tokens,
        "diff_abs_mean": difference.abs().sum() / num_tokens,
        # The appended zero makes an empty tensor's maximum 0, and is never above a magnitude.
        "diff_max": torch.cat([difference.abs().flatten(), difference.new_zeros(1)]).max(),
        "training_mean": training.sum() / num_tokens,
        "inference_mean": inference.sum() / num_tokens,
    }


def row_staleness(policy_versions: Tensor, mask: Tensor, version: int) -> Tensor:
    """(B,) int64 of each row's oldest token: how many policy versions ago it was sampled; 0 where none counts.

    Args:
        policy_versions: (B, T) int64 version of the weights that sampled each token; outside the mask anything.
        mask: (B, T) bool: tokens that are trained and whose version is known.
        version: the trainer's version now. Tokens of a later one, sampled during a weight update, count as fresh.
    """
    return torch.where(mask, version - policy_versions, 0).clamp(min=0).amax(dim=-1)


def staleness_metrics(policy_versions: Tensor, mask: Tensor, version: int) -> dict[str, Tensor]:
    """`staleness_mean` over the tokens that count, and `staleness_max`; arguments as of `row_staleness`, 0 for none."""
    rows = row_staleness(policy_versions, mask, version)
    age = torch.where(mask, version - policy_versions, 0).clamp(min=0)
    return {
        "staleness_mean": age.sum() / mask.sum().clamp(min=1),
        "staleness_max": torch.cat([rows, rows.new_zeros(1)]).max(),  # 0 for no rows
    }
