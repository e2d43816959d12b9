"""Alignment: how far the trainer's log-probabilities are from inference's, for the same tokens.

Measures only. Before the first update of a step both come from the same weights, so what differs is arithmetic, or a
fault: weights that did not arrive, labels shifted by one, another temperature.
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
