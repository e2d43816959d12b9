"""Ctrl-C and SIGTERM between the start of a run and the moment from which its command watches it.

In between they would end the command alone, and the run that it was to end with would go on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class HeldInterrupts:
    """Of this process; nothing is held at first."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def have_come(self) -> bool:
        """Whether any was sent since `hold`."""
        return bool(self._held)

    def hold(self) -> None:
        """Note them from here on."""
        for number in INTERRUPTS:
            self._before[number] = signal.signal(number, lambda number, _: self._held.append(number))

    def release(self) -> None:
        """Have them do again what they did before, and those that were held too."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        while self._held:
            os.kill(os.getpid(), self._held.pop())


@contextmanager
def held_interrupts() -> Iterator[HeldInterrupts]:
    """Those of a start; released where it fails."""
    interrupts = HeldInterrupts()
    try:
        yield interrupts
    except BaseException:
        interrupts.release()
        raise
