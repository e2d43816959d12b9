"""What workers and widgets tell the app. Workers never touch widgets, and widgets never touch the state.

Each carries one change of the view's state; one handler takes them all, in the order in which they come.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from grpo_tui.view.state import Change


@dataclass
class Came(Message):
    """Base: something came that changes the state."""

    change: Change


class RunSpoke(Came):
    """The daemon sent a snapshot or an event."""


class RunFellSilent(Came):
    """The daemon does not answer any more, or not yet."""


class StatusArrived(Came):
    """The state file was read in the daemon's place."""


class MetricsArrived(Came):
    """The trainer finished steps."""


class LogArrived(Came):
    """The selected service wrote to its log."""


class CommandFailed(Came):
    """The daemon refused a command, or could not be asked."""


class SecondPassed(Came):
    """The clock moved on; a late one replaces the one before it."""

    def can_replace(self, message: Message) -> bool:
        """An older tick that still waits is of no use."""
        return isinstance(message, SecondPassed)


class Travelled(Came):
    """Somebody moved in the time of the run."""


class TimelineArrived(Came):
    """More is known of the time of the run, or of the moment that is looked at."""


class ServiceClicked(Came):
    """A row of the table was clicked."""


class FollowingChanged(Came):
    """The log was scrolled away from its end, or back to it."""
