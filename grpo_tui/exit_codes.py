"""What the command line exits with."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Scripts rely on these numbers."""

    OK = 0
    FAILED = 1
    """A service failed, or a check found a problem."""
    USAGE = 2
    """The command line or the profile is wrong; nothing was started."""
    NOT_IN_TIME = 3
    """Not ready, finished or stopped within the time limit."""
    REFUSED = 4
    """A port or GPU is held by another process, a live run has other settings, or it does not take this command now."""
    NO_SUCH_RUN = 5
    INTERRUPTED = 130
    """Ctrl-C, as shells count it."""


TO_BOARD = -1
"""No exit code: the user left the screen of a run for the board."""
