"""Whether an engine that has work (requests, or questions such as a pause) gives any sign: a long answer, or a hang.

Whoever runs the engine says when work goes in, that something came out, and when work leaves. Requests that wait
outside, at a closed gate or in a queue while weights are handed over, are no work. Time comes in as an argument, in
seconds.
"""

from __future__ import annotations

from grpo_engine.server.engine import EngineStalled


class Pulse:
    """Of one engine."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._silent_since: float | None = None
        """Since when it has had work and given nothing."""
        self._num_resting = 0
        """Pieces of work that the engine was told to leave for a while."""
        self.num_inside = 0
        """Pieces of work in the engine."""

    def enter(self, now: float) -> None:
        """Work goes in."""
        self.num_inside += 1
        if self._silent_since is None:
            self._silent_since = now

    def beat(self, now: float) -> None:
        """The engine has given something."""
        self._silent_since = now if self.num_inside > self._num_resting else None

    def leave(self, now: float) -> None:
        """Work is out, done or given up. A stall outlasts those who gave up over it: only a beat ends it."""
        self.num_inside -= 1
        self._num_resting = min(self._num_resting, self.num_inside)
        if self.num_inside == self._num_resting and not self.is_stalled(now):
            self._silent_since = None

    def rest(self) -> None:
        """What is in the engine is to wait there; only what comes in after it counts."""
        self._num_resting, self._silent_since = self.num_inside, None

    def go_on(self, now: float) -> None:
        """What rests may go on."""
        self._num_resting = 0
        self.beat(now)

    def is_stalled(self, now: float) -> bool:
        """Whether the engine has had work and given nothing for too long."""
        return self._silence_s(now) >= self._limit_s

    def check(self, now: float) -> None:
        """Return while the engine is well, raise `EngineStalled` otherwise."""
        silence_s = self._silence_s(now)
        if silence_s >= self._limit_s:
            raise EngineStalled(
                f"the engine hangs: it has had work and given no sign of life for {silence_s:.0f} s; restart the server"
            )

    def _silence_s(self, now: float) -> float:
        since = self._silent_since  # read once: torch's worker thread writes it
        return -1.0 if since is None else now - since
