"""CPU, memory and GPUs of all services: every second while somebody watches, now and then otherwise.

The reading happens in a thread; a driver that hangs holds up nothing but the next sample.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from grpo_engine.wire.supervisor import GpuStatus, UsageSampled
from grpo_tui.supervisor.broadcast import Broadcast
from grpo_tui.supervisor.gpus import GpuReader
from grpo_tui.supervisor.proc import ProcessId
from grpo_tui.supervisor.usage import Usage, UsageReader

WATCHED_S = 1.0
UNWATCHED_S = 5.0


class Sampler:
    """Holds the last sample, and tells it."""

    def __init__(self, broadcast: Broadcast, keepers: Callable[[], dict[str, int]], told: Callable[[], None]) -> None:
        self._broadcast = broadcast
        self._keepers = keepers
        self._told = told
        self._usage_reader = UsageReader()
        self._gpu_reader = GpuReader()
        self.usage: dict[str, Usage] = {}
        self.seen: set[ProcessId] = set()
        """Every process that a sample found below this run's keepers."""
        self.gpus: list[GpuStatus] = []
        self.gpu_note: str | None = None

    @property
    def gpu_memory_bytes(self) -> dict[str, int]:
        """Per service, over all GPUs; a service that no driver knows of is left out."""
        total: dict[str, int] = {}
        for gpu in self.gpus:
            for service, held_bytes in gpu.by_service.items():
                total[service] = total.get(service, 0) + held_bytes
        return total

    def processes(self, service: str) -> frozenset[ProcessId]:
        """What the service consisted of when it was last looked at."""
        usage = self.usage.get(service)
        return frozenset() if usage is None else usage.processes

    def gpu_memory_reader(self, service: str) -> Callable[[], Awaitable[int | None]] | None:
        """Reads what the service's last known processes still hold; None where there is no GPU to ask."""
        pids = {service: frozenset(process.pid for process in self.processes(service))}

        async def held_bytes() -> int | None:
            sample = await self._gpu_reader.sample(pids)
            return sum(gpu.by_service.get(service, 0) for gpu in sample.gpus)

        return held_bytes if self.gpus and pids[service] else None

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await self._sample()
            wait_s = WATCHED_S if self._broadcast.is_watched or not self.usage else UNWATCHED_S
            self._broadcast.figures_wanted.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._broadcast.figures_wanted.wait()
            except TimeoutError:
                continue

    async def _sample(self) -> None:
        keepers = self._keepers()
        self.usage = await asyncio.to_thread(self._usage_reader.sample, keepers)
        for usage in self.usage.values():
            self.seen |= usage.processes
        pids = {name: usage.pids for name, usage in self.usage.items()}
        gpus = await self._gpu_reader.sample(pids)
        self.gpus, self.gpu_note = list(gpus.gpus), gpus.note
        at = time.time()
        self._broadcast.send(lambda number: self._event(number, at))
        if self._broadcast.is_watched:
            self._told()

    def _event(self, number: int, at: float) -> UsageSampled:
        usage = self.usage.items()
        return UsageSampled(
            number=number,
            time=at,
            cpu_percent={name: each.cpu_percent for name, each in usage if each.cpu_percent is not None},
            rss_bytes={name: each.rss_bytes for name, each in usage},
            gpu_memory_bytes=self.gpu_memory_bytes,
            gpus=self.gpus,
            gpu_note=self.gpu_note,
        )
