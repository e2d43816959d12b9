"""What the rollout screen knows. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """What the rollout screen knows."""


class RolloutChange:
    """Base of all that changes it."""


def after(rollouts: RolloutView, change: RolloutChange) -> RolloutView:
    """What it is after a change."""
    return rollouts
