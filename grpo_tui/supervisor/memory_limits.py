"""Limits on the resident memory of whole services, held by looking: growth between two looks is seen late.

The kernel's own limits do not serve: a limit on address space breaks CUDA, which maps more than it uses, and a control
group is seldom ours to make.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from grpo_tui.supervisor.proc import ProcessId, identify
from grpo_tui.supervisor.usage import Usage, fair_bytes

REST = 10.0
"""Times as long as it took to find out who shares what, before that is asked again: a tenth of a core at most."""
OverLimit = Callable[[str, int], None]
"""Takes a service and the bytes it holds; called once in an attempt."""


class MemoryLimits:
    """Compares every sample with the limits, in bytes by service."""

    def __init__(self, limits: Mapping[str, int], over_limit: OverLimit) -> None:
        self._limits = limits
        self._over_limit = over_limit
        self._told: dict[str, ProcessId] = {}
        """By service, the keeper of the last attempt that was over its limit."""
        self._rests_until: dict[str, float] = {}

    @property
    def are_set(self) -> bool:
        """Whether any service has one."""
        return bool(self._limits)

    async def look(self, usage: Mapping[str, Usage], keepers: Mapping[str, int]) -> None:
        """Tell of every service that is over its limit, and was not in this attempt; `keepers` are their pids."""
        for service in self._limits.keys() & usage.keys() & keepers.keys():
            if usage[service].rss_bytes > self._limits[service]:
                await self._judge(service, usage[service], identify(keepers[service]))

    async def _judge(self, service: str, usage: Usage, keeper: ProcessId | None) -> None:
        """Tell of it if it is still too much when memory that its processes share is counted once."""
        started = time.monotonic()
        if keeper is None or self._told.get(service) == keeper or started < self._rests_until.get(service, started):
            return
        held_bytes = await asyncio.to_thread(fair_bytes, usage.processes)
        if held_bytes > self._limits[service]:
            self._told[service] = keeper
            self._over_limit(service, held_bytes)
        else:
            self._rests_until[service] = time.monotonic() + REST * (time.monotonic() - started)
