"""Where in the time of the run the screen is. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Travel:
    """Where in the time of the run the screen is."""


class TravelChange:
    """Base of all that changes it."""


def after(travel: Travel, change: TravelChange) -> Travel:
    """What it is after a change."""
    return travel
