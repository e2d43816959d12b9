"""How long environments have nothing to do, because they have sampled as far ahead of the trainer as they may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpo_engine.wire.rollouts import IdleTimes


class IdleClock:
    """Adds up the idle time of each environment from batch to batch.

    An environment of ours holds its request for news while it has nothing to do, and asks at once otherwise. Stock ones
    never say, and are left out.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin now, on a clock in seconds."""
        self._clock = clock
        self._began = clock()
        self._idle_s: dict[int, float] = {}
        """Of the environments that have asked since the last batch."""
        self._since: dict[int, float] = {}
        """When those began to wait that do."""

    def note(self, env_id: int) -> None:
        """An environment that says when it is idle has asked for its status."""
        self._idle_s.setdefault(env_id, 0.0)

    @contextmanager
    def waiting(self, env_id: int) -> Iterator[None]:
        """Within, the environment has nothing to do."""
        self._since[env_id] = self._clock()
        try:
            yield
        finally:
            self._add(env_id, self._clock())
            self._since.pop(env_id, None)

    def take(self) -> IdleTimes:
        """The times since the last call."""
        now = self._clock()
        for env_id in self._since:
            self._add(env_id, now)
            self._since[env_id] = now
        taken = IdleTimes(since_s=now - self._began, idle_s=self._idle_s)
        self._began, self._idle_s = now, {}
        return taken

    def _add(self, env_id: int, now: float) -> None:
        self._idle_s[env_id] = self._idle_s.get(env_id, 0.0) + now - self._since.get(env_id, now)
