"""Simulated time: what happens at which second, in order. A heap of calls is all that a simulation needs of simpy."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """Calls in order of time; those of the same time in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Plan a call."""
        heapq.heappush(self._planned, (self.now + seconds, next(self._number), call))

    def run_until(self, is_over: Callable[[], bool]) -> bool:
        """Make the calls until `is_over()`; False where none is planned before."""
        while not is_over():
            if not self._planned:
                return False
            self.now, _, call = heapq.heappop(self._planned)
            call()
        return True
