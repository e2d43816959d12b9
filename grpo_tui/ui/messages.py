"""Messages of workers and widgets to the app; workers never touch widgets, and widgets never change the state.

Each carries one change of the view state; one handler applies them in the order of arrival.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from textual.message import Message

from grpo_tui.view.state import Change


@dataclass
class StateChanged(Message):
    """Base: a change of the view state."""

    change: Change


@dataclass
class EventReceived(StateChanged):
    """The supervisor sent a snapshot or an event."""

    applied: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the state has it: the next one is read then, so that keys wait for no queue of them."""


class SupervisorLost(StateChanged):
    """The supervisor does not answer."""


class StatusArrived(StateChanged):
    """The state file was read because no supervisor answers."""


class MetricsArrived(StateChanged):
    """The trainer wrote metrics."""


class LogArrived(StateChanged):
    """The selected service wrote to its log."""


class CommandFailed(StateChanged):
    """The supervisor refused a command, or could not be reached."""


class SecondPassed(StateChanged):
    """One second passed; a later tick replaces one that is still queued."""

    def can_replace(self, message: Message) -> bool:
        """Replace an older tick."""
        return isinstance(message, SecondPassed)


class MovedInTime(StateChanged):
    """The user moved on the timeline."""


class TimelineArrived(StateChanged):
    """The timeline file, or the state at a moment of it, was read."""


class ServiceClicked(StateChanged):
    """A row of the table was clicked."""


class FollowingChanged(StateChanged):
    """The log was scrolled away from its end, or back to it."""
