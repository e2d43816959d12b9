"""How long a rank is in collective operations: their transfer, and the wait for ranks that come later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CollectiveClock:
    """Adds up the seconds; on a GPU between events on the stream of the operation, since the call returns at once."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.Event, torch.Event]] = []

    @contextmanager
    def timed(self, device: str) -> Iterator[None]:
        """Around an operation that is done, or queued on the present stream of the device."""
        if device == "cpu":
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def take_s(self) -> float:
        """The seconds since the last call; waits for the operations that are queued on a GPU."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds
