"""CPU, memory and GPUs of all services: every second while somebody watches or a limit is set, now and then otherwise.

The reading happens in a thread; a driver that hangs holds up nothing but the next sample.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from grpo_engine.wire.supervisor import GpuStatus, UsageSampled
from grpo_tui.supervisor.broadcast import Broadcast
from grpo_tui.supervisor.capped_log import written_so_far
from grpo_tui.supervisor.gpus import GpuReader
from grpo_tui.supervisor.memory_limits import MemoryLimits, OverLimit
from grpo_tui.supervisor.orphans import end_adopted
from grpo_tui.supervisor.proc import ProcessId
from grpo_tui.supervisor.usage import Usage, UsageReader

MAX_DEAD = 2000
"""Ended processes that are remembered, for the shared memory that they may have left."""
WATCHED_S = 1.0
UNWATCHED_S = 5.0


class Sampler:
    """Holds the last sample, and tells it."""

    def __init__(
        self,
        broadcast: Broadcast,
        keepers: Callable[[], dict[str, int]],
        *,
        told: Callable[[], None],
        ledger_changed: Callable[[], None],
        limits: Mapping[str, int] | None = None,
        over_limit: OverLimit = lambda service, held_bytes: None,
        attempts: Callable[[], Mapping[str, int]] = dict,
        logs: Mapping[str, Path] | None = None,
    ) -> None:
        """`limits` of resident memory are in bytes, by service; `over_limit` is called once in an attempt.

        `attempts` tells which attempt of each service runs.
        `logs` are files of which a sample tells how long they were.
        """
        self._broadcast = broadcast
        self._keepers = keepers
        self._told = told
        self._ledger_changed = ledger_changed
        self._memory_limits = MemoryLimits(limits or {}, over_limit)
        self._attempts = attempts
        self._logs = dict(logs or {})
        self._usage_reader = UsageReader()
        self.gpu_reader = GpuReader()
        self.usage: dict[str, Usage] = {}
        self._living: dict[str, frozenset[ProcessId]] = {}
        self._dead: deque[ProcessId] = deque(maxlen=MAX_DEAD)
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

    @property
    def seen(self) -> frozenset[ProcessId]:
        """Every process that a sample found below this run's keepers; of those that have ended, the latest."""
        return frozenset(self._dead).union(*self._living.values())

    def processes(self, service: str) -> frozenset[ProcessId]:
        """What the service consisted of when it was last looked at, whoever has lost its keeper since included."""
        return self._living.get(service, frozenset())

    def remember(self, service: str, processes: Iterable[ProcessId]) -> None:
        """Take over what an earlier daemon saw of a service."""
        self._living[service] = self.processes(service).union(processes)

    def gpu_memory_reader(self, service: str) -> Callable[[], Awaitable[int | None]] | None:
        """Reads what the service's last known processes still hold; None where there is no GPU to ask."""
        pids = {service: frozenset(process.pid for process in self.processes(service))}

        async def held_bytes() -> int | None:
            sample = await self.gpu_reader.sample(pids)
            return sum(gpu.by_service.get(service, 0) for gpu in sample.gpus)

        return held_bytes if self.gpus and pids[service] else None

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self._broadcast.figures_wanted.clear()  # before: what is asked for meanwhile needs another sample
            await self._sample()
            is_urgent = self._broadcast.is_watched or self._memory_limits.are_set or not self.usage
            wait_s = WATCHED_S if is_urgent else UNWATCHED_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._broadcast.figures_wanted.wait()
            except TimeoutError:
                continue

    async def _sample(self) -> None:
        keepers = self._keepers()
        self.usage = await asyncio.to_thread(self._usage_reader.sample, keepers)
        for service in {*self._living, *self.usage}:
            self._note(service)
        await asyncio.to_thread(end_adopted)
        await self._memory_limits.look(self.usage, keepers)
        pids = {name: usage.pids for name, usage in self.usage.items()}
        gpus = await self.gpu_reader.sample(pids, self._attempts())
        self.gpus, self.gpu_note = list(gpus.gpus), gpus.note
        log_bytes, at = await asyncio.to_thread(self._log_ends), time.time()
        self._broadcast.send(lambda number: self._event(number, at, log_bytes))
        if self._broadcast.is_watched:
            self._told()

    def _note(self, service: str) -> None:
        """Keep what the sample found, and whoever was found before and lives on without a keeper."""
        usage, before = self.usage.get(service), self.processes(service)
        now = usage.processes if usage is not None else frozenset()
        lost = frozenset(process for process in before - now if process.is_alive())
        self._dead.extend(before - now - lost)
        self._living[service] = now | lost
        if self._living[service] != before:
            self._ledger_changed()

    def _log_ends(self) -> dict[str, int]:
        """Where each log ends; one that cannot be read is left out."""
        ends: dict[str, int] = {}
        for service, path in self._logs.items():
            with suppress(OSError):
                ends[service] = written_so_far(path)
        return ends

    def _event(self, number: int, at: float, log_bytes: dict[str, int]) -> UsageSampled:
        usage = self.usage.items()
        return UsageSampled(
            number=number,
            time=at,
            cpu_percent={name: each.cpu_percent for name, each in usage if each.cpu_percent is not None},
            rss_bytes={name: each.rss_bytes for name, each in usage},
            gpu_memory_bytes=self.gpu_memory_bytes,
            gpus=self.gpus,
            gpu_note=self.gpu_note,
            log_bytes=log_bytes,
        )
