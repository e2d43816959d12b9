"""What the metrics screen knows beyond the history. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotView:
    """What the metrics screen knows beyond the history."""


class PlotChange:
    """Base of all that changes it."""


def after(plots: PlotView, change: PlotChange) -> PlotView:
    """What it is after a change."""
    return plots
