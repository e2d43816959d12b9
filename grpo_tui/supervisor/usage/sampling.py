"""Samples CPU, memory and GPUs of all services: every second while a client watches or a limit is set, else every 5 s.

Reading happens in a thread; a hanging driver delays only the next sample.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from grpo_engine.wire.supervisor import GpuStatus, UsageSampled
from grpo_tui.run_files.log_file import written_so_far
from grpo_tui.supervisor.keeper.orphans import kill_adopted
from grpo_tui.supervisor.keeper.proc import ProcessId
from grpo_tui.supervisor.report.broadcast import Broadcast
from grpo_tui.supervisor.usage.cpu_memory import MemoryLimits, OverLimit, Usage, UsageReader
from grpo_tui.supervisor.usage.gpus import GpuReader

MAX_DEAD = 2000
"""Exited processes that are remembered, for the shared memory that they may have left."""
WATCHED_S = 1.0
UNWATCHED_S = 5.0


class Sampler:
    """Takes samples, holds the last one, and sends it to clients."""

    def __init__(
        self,
        broadcast: Broadcast,
        keepers: Callable[[], dict[str, int]],
        *,
        sampled: Callable[[], None],
        ledger_changed: Callable[[], None],
        limits: Mapping[str, int] | None = None,
        over_limit: OverLimit = lambda service, held_bytes: None,
        attempts: Callable[[], Mapping[str, int]] = dict,
        logs: Mapping[str, Path] | None = None,
    ) -> None:
        """Take no sample yet.

        Args:
            keepers: returns the pid of each running service's keeper.
            sampled: called after each sample while a client watches.
            ledger_changed: called when the processes of a service have changed.
            limits: of resident memory, in bytes, by service.
            over_limit: called with a service and its bytes, once per attempt.
            attempts: returns the number of each service's running attempt.
            logs: files whose length is part of a sample.
        """
        self._broadcast = broadcast
        self._keepers = keepers
        self._sampled = sampled
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
        """Per service, summed over all GPUs; services without GPU memory are left out."""
        total: dict[str, int] = {}
        for gpu in self.gpus:
            for service, held_bytes in gpu.by_service.items():
                total[service] = total.get(service, 0) + held_bytes
        return total

    @property
    def seen(self) -> frozenset[ProcessId]:
        """Every process that a sample found below this run's keepers; of those that have exited, the newest."""
        return frozenset(self._dead).union(*self._living.values())

    def processes(self, service: str) -> frozenset[ProcessId]:
        """The processes of a service in the last sample, including those whose keeper has exited since."""
        return self._living.get(service, frozenset())

    def remember(self, service: str, processes: Iterable[ProcessId]) -> None:
        """Add processes that an earlier supervisor recorded for a service."""
        self._living[service] = self.processes(service).union(processes)

    def gpu_memory_reader(self, service: str) -> Callable[[], Awaitable[int | None]] | None:
        """Returns a function that reads the GPU memory of the service's last known processes; None without a GPU."""
        pids = {service: frozenset(process.pid for process in self.processes(service))}

        async def held_bytes() -> int | None:
            sample = await self.gpu_reader.sample(pids)
            return sum(gpu.by_service.get(service, 0) for gpu in sample.gpus)

        return held_bytes if self.gpus and pids[service] else None

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self._broadcast.figures_wanted.clear()  # cleared first: a request during the sample needs another one
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
        await asyncio.to_thread(kill_adopted)
        await self._memory_limits.check(self.usage, keepers)
        pids = {name: usage.pids for name, usage in self.usage.items()}
        gpus = await self.gpu_reader.sample(pids, self._attempts())
        self.gpus, self.gpu_note = list(gpus.gpus), gpus.note
        log_bytes, at = await asyncio.to_thread(self._log_ends), time.time()
        self._broadcast.send(lambda number: self._event(number, at, log_bytes))
        if self._broadcast.is_watched:
            self._sampled()

    def _note(self, service: str) -> None:
        """Record the processes in the sample, and earlier ones that are still alive without a keeper."""
        usage, before = self.usage.get(service), self.processes(service)
        now = usage.processes if usage is not None else frozenset()
        lost = frozenset(process for process in before - now if process.is_alive())
        self._dead.extend(before - now - lost)
        self._living[service] = now | lost
        if self._living[service] != before:
            self._ledger_changed()

    def _log_ends(self) -> dict[str, int]:
        """Absolute offset of the end of each log; logs that cannot be read are left out."""
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
