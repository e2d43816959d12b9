"""Advantages: how much better a completion is than others of the same prompt; and the penalty of overlong ones.

B completions. Inputs are rewards, group ids and lengths only; the caller overrides single sequences.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]
Baseline = Literal["mean", "leave_one_out"]


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    scale: Scale = "group",
    ddof: int = 1,
    epsilon: float = 1e-4,
    baseline: Baseline = "mean",
) -> Tensor:
    """Rewards minus their group's baseline, in units of a standard deviation.

    A group whose rewards are all equal has no signal and gets exactly 0. So does a group of one (the raw reward, which
    some implementations keep, would be an uncentred advantage).

    Args:
        rewards: (B,) of any float dtype.
        group_ids: (B,) arbitrary integers, in any order.
        scale: `group` divides by the group's standard deviation plus `epsilon` (DeepSeekMath, arXiv 2402.03300,
            section 4.1.2), `batch` by that of all rewards (Lite PPO, arXiv 2508.08221; REINFORCE++-baseline takes that
            of the centred ones), `none` by nothing (Dr. GRPO, arXiv 2503.20783: dividing favours prompts that are
            nearly solved or nearly hopeless).
        ddof: 1 for the unbiased standard deviation, 0 for the population's.
        epsilon: keeps nearly equal rewards from exploding.
        baseline: `leave_one_out` is the mean of the other members (RLOO, arXiv 2402.14740), which makes the mean of
            the gradient independent of the group's size.

    Returns:
        (B,) of the rewards' dtype, without a graph.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit.
    """
    _check(rewards, group_ids, scale, ddof, epsilon, baseline)
    values = rewards.detach().to(torch.float64)  # sums then do not depend on the order of the rows
    is_equal, group = equal_groups(rewards, group_ids)
    zeros = values.new_zeros(len(is_equal))
    counts = zeros.index_add(0, group, torch.ones_like(values))  # (G,)
    means = zeros.index_add(0, group, values) / counts

    centred = values - means[group]
    advantages = centred
    if baseline == "leave_one_out":
        advantages = centred * (counts / (counts - 1).clamp(min=1))[group]
    if scale == "group":
        variances = zeros.index_add(0, group, centred.square()) / (counts - ddof).clamp(min=1)
        advantages = advantages / (variances.sqrt()[group] + epsilon)
    elif scale == "batch":
        variance = (values - values.mean()).square().sum() / max(len(values) - ddof, 1)
        advantages = advantages / (variance.sqrt() + epsilon)
    return torch.where(is_equal[group], 0.0, advantages).to(rewards.dtype)


def equal_groups(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Which groups have nothing to teach, since all their rewards are equal; a group of one is such a group.

    DAPO (arXiv 2503.14476, eq. 11) leaves them out and samples others in their place.

    Args:
        rewards: (B,) of any float dtype.
        group_ids: (B,) arbitrary integers, in any order.

    Returns:
        `(is_equal, group)`: (G,) bool in ascending order of the ids, and (B,) the place of each row's group in it.
        `is_equal.float().mean()` is their share, `is_equal[group]` says it of each row.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check_rewards(rewards, group_ids)
    ids, group = torch.unique(group_ids, return_inverse=True)
    zeros = rewards.detach().new_zeros(len(ids))
    # Compared, not subtracted: the mean of equal floats may differ from them in the last bit.
    lowest, highest = (
        zeros.scatter_reduce(0, group, rewards.detach(), how, include_self=False) for how in ("amin", "amax")
    )
    return lowest == highest, group


def _check(rewards: Tensor, group_ids: Tensor, scale: str, ddof: int, epsilon: float, baseline: str) -> None:
    _check_rewards(rewards, group_ids)
    if scale not in get_args(Scale):
        raise ValueError(f"scale = {scale!r}: choose one of {', '.join(get_args(Scale))}")
    if baseline not in get_args(Baseline):
        raise ValueError(f"baseline = {baseline!r}: choose one of {', '.join(get_args(Baseline))}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof = {ddof!r}: 0 for the population's standard deviation, 1 for the unbiased one")
    if not 0 <= epsilon < float("inf"):
        raise ValueError(f"epsilon = {epsilon!r}: must be a finite number of at least 0")


def _check_rewards(rewards: Tensor, group_ids: Tensor) -> None:
    if rewards.ndim != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards is {rewards.dtype} of shape {tuple(rewards.shape)}: expected (B,) of a float dtype")
    if group_ids.shape != rewards.shape or group_ids.is_floating_point():
        raise ValueError(
            f"group_ids is {group_ids.dtype} of shape {tuple(group_ids.shape)}: "
            f"expected one integer for each of the {len(rewards)} rewards"
        )


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
