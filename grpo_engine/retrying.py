"""Repeats a call to another process that does not answer yet: pauses between attempts, time limit, stop condition.

The caller decides which exception is temporary; any other ends the attempts at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

ResultT = TypeVar("ResultT")

_GROWTH = 1.5
"""Each pause is this much longer than the one before."""


class Stopped(Exception):
    """The stop condition was met after a failed attempt; says why that one failed."""


def never() -> bool:
    """A stop condition that is never met."""
    return False


def _ignore(error: Exception) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When an attempt is repeated, and when its error is raised."""

    retried: type[Exception]
    """The temporary error."""
    first_pause_s: float
    longest_pause_s: float
    """Pauses count from the start of an attempt, so that a slow one is repeated at once."""
    limit_s: float = math.inf
    """The first failure after this time is raised."""
    is_stopping: Callable[[], bool] = never
    """Checked after each failed attempt."""
    on_failure: Callable[[Exception], None] = _ignore
    """Called with each error that is followed by another attempt."""


def retry(attempt: Callable[[], ResultT], policy: RetryPolicy) -> ResultT:
    """Call `attempt` until it succeeds.

    Raises:
        policy.retried: the last one, after the time limit; other errors of `attempt` at once.
        Stopped: `policy.is_stopping` became true.
    """
    schedule = _Schedule(policy)
    while True:
        schedule.begin_attempt()
        try:
            return attempt()
        except policy.retried as error:
            pause_s = schedule.pause_after(error)
        time.sleep(pause_s)


async def retry_async(attempt: Callable[[], Awaitable[ResultT]], policy: RetryPolicy) -> ResultT:
    """As `retry`, for coroutines."""
    schedule = _Schedule(policy)
    while True:
        schedule.begin_attempt()
        try:
            return await attempt()
        except policy.retried as error:
            pause_s = schedule.pause_after(error)
        await asyncio.sleep(pause_s)


class _Schedule:
    """The pauses of one call of `retry`."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._pause_s = policy.first_pause_s
        self._until = time.monotonic() + policy.limit_s
        self._began = 0.0

    def begin_attempt(self) -> None:
        self._began = time.monotonic()

    def pause_after(self, error: Exception) -> float:
        """How long to pause, in seconds; raises where there is no further attempt."""
        if self._policy.is_stopping():
            raise Stopped(str(error)) from error
        now = time.monotonic()
        if now >= self._until:
            raise error
        self._policy.on_failure(error)
        pause_s, self._pause_s = self._pause_s, min(_GROWTH * self._pause_s, self._policy.longest_pause_s)
        return max(0.0, pause_s - (now - self._began))
