"""Detects an engine that hangs: it has work (requests, or commands such as a pause) and produces nothing for too long.

The engine reports when work enters, when it produced something, and when work leaves. Requests that wait outside, at a
closed gate or in a queue, do not count as work. Time is an argument, in seconds.
"""

from __future__ import annotations

from grpo_engine.server.engine import EngineStalled


class StallDetector:
    """The stall detector of one engine."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._silent_since: float | None = None
        """Since when the engine has had work and produced nothing."""
        self._num_requests = 0
        self._num_commands = 0
        self._is_paused = False
        """Requests in the engine are frozen."""

    @property
    def num_pending(self) -> int:
        """Requests and commands in the engine."""
        return self._num_requests + self._num_commands

    def add_request(self, now: float) -> None:
        """Record that a request enters the engine."""
        self._num_requests += 1
        self._begin(now)

    def remove_request(self, now: float) -> None:
        """Record that a request left, finished or aborted. This does not end a stall: only output does."""
        self._num_requests -= 1
        self._end(now)

    def add_command(self, now: float) -> None:
        """Record that a command enters the engine: it is work even while requests are paused."""
        self._num_commands += 1
        self._begin(now)

    def remove_command(self, now: float) -> None:
        """Record that a command left, answered or abandoned."""
        self._num_commands -= 1
        self._end(now)

    def record_output(self, now: float) -> None:
        """Record that the engine produced something."""
        self._silent_since = now if self._is_busy() else None

    def pause(self) -> None:
        """Record that requests in the engine are frozen."""
        self._is_paused, self._silent_since = True, None

    def resume(self, now: float) -> None:
        """Record that frozen requests continue."""
        self._is_paused = False
        self.record_output(now)

    def is_stalled(self, now: float) -> bool:
        """Whether the engine has had work and produced nothing for too long."""
        return self._silence_s(now) >= self._limit_s

    def check(self, now: float) -> None:
        """Return while the engine works.

        Raises:
            EngineStalled: it hangs.
        """
        silence_s = self._silence_s(now)
        if silence_s >= self._limit_s:
            raise EngineStalled(
                f"the engine hangs: it has work and has produced nothing for {silence_s:.0f} s; restart the server"
            )

    def _silence_s(self, now: float) -> float:
        since = self._silent_since  # read once: torch's worker thread writes it
        return -1.0 if since is None else now - since

    def _is_busy(self) -> bool:
        return bool(self._num_commands or (self._num_requests and not self._is_paused))

    def _begin(self, now: float) -> None:
        if self._silent_since is None and self._is_busy():
            self._silent_since = now

    def _end(self, now: float) -> None:
        if not self._is_busy() and not self.is_stalled(now):
            self._silent_since = None
