"""What the log screen knows. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsView:
    """What the log screen knows."""


class LogChange:
    """Base of all that changes it."""


def after(logs: LogsView, change: LogChange) -> LogsView:
    """What it is after a change."""
    return logs
