"""What the alignment screen knows. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentView:
    """What the alignment screen knows."""


class AlignmentChange:
    """Base of all that changes it."""


def after(alignment: AlignmentView, change: AlignmentChange) -> AlignmentView:
    """What it is after a change."""
    return alignment
