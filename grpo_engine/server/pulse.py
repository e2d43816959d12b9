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
        self._num_requests = 0
        self._num_questions = 0
        self._is_resting = False
        """Requests were told to wait in the engine for a while."""

    @property
    def num_inside(self) -> int:
        """Pieces of work in the engine."""
        return self._num_requests + self._num_questions

    def enter(self, now: float) -> None:
        """A request goes in."""
        self._num_requests += 1
        self._begin(now)

    def leave(self, now: float) -> None:
        """A request is out, done or given up. A stall outlasts those who gave up over it: only a beat ends it."""
        self._num_requests -= 1
        self._end(now)

    def ask(self, now: float) -> None:
        """A question goes in: it does not rest."""
        self._num_questions += 1
        self._begin(now)

    def answer(self, now: float) -> None:
        """A question is out, answered or given up."""
        self._num_questions -= 1
        self._end(now)

    def beat(self, now: float) -> None:
        """The engine has given something."""
        self._silent_since = now if self._is_busy() else None

    def rest(self) -> None:
        """Requests in the engine are to wait there."""
        self._is_resting, self._silent_since = True, None

    def go_on(self, now: float) -> None:
        """What rests may go on."""
        self._is_resting = False
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

    def _is_busy(self) -> bool:
        return bool(self._num_questions or (self._num_requests and not self._is_resting))

    def _begin(self, now: float) -> None:
        if self._silent_since is None and self._is_busy():
            self._silent_since = now

    def _end(self, now: float) -> None:
        if not self._is_busy() and not self.is_stalled(now):
            self._silent_since = None
