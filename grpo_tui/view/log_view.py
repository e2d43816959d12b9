"""What the log screen knows. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSearchView:
    """What the log screen knows."""


class LogChange:
    """Base of all that changes it."""


def after(logs: LogSearchView, change: LogChange) -> LogSearchView:
    """What it is after a change."""
    return logs
