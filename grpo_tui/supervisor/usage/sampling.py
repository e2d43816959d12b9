"""Samples CPU, memory and GPUs of all services: every second while a client watches or a limit is set, else every 5 s.

Reading happens in a thread; a hanging driver delays only the next sample.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from grpo_engine.wire.supervisor import (
    DiskSpace,
    GpuStatus,
    PlacedUsage,
    RanksReport,
    RankUsage,
    UsageSampled,
    WriteFault,
)
from grpo_tui.run_files.log_file import written_so_far
from grpo_tui.supervisor.keeper.orphans import kill_adopted
from grpo_tui.supervisor.keeper.proc import ProcessId
from grpo_tui.supervisor.report.broadcast import Broadcast
from grpo_tui.supervisor.report.machines import Machines
from grpo_tui.supervisor.usage.cpu_memory import MemoryLimits, OverLimit, Usage, UsageReader
from grpo_tui.supervisor.usage.disks import DiskWatch
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
        folders: Iterable[Path] = (),
        write_faults: Callable[[], list[WriteFault]] = list,
        ranks: Callable[[], Mapping[str, RanksReport]] = dict,
        placed: Collection[str] = (),
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
            folders: those whose file systems are watched for free space.
            write_faults: returns what the supervisor cannot write.
            ranks: returns the ranks of each service that has several.
            placed: services that agents of a cluster start.
        """
        self._broadcast = broadcast
        self._keepers = keepers
        self._sampled = sampled
        self._ledger_changed = ledger_changed
        self._memory_limits = MemoryLimits(limits or {}, over_limit)
        self._attempts = attempts
        self._logs = dict(logs or {})
        self._disks = DiskWatch(folders)
        self._write_faults = write_faults
        self._ranks = ranks
        self.low_disks: list[DiskSpace] = []
        self._usage_reader = UsageReader(placed)
        self.gpu_reader = GpuReader()
        self.usage: dict[str, Usage] = {}
        self.rank_usage: dict[str, list[RankUsage]] = {}
        self._living: dict[str, frozenset[ProcessId]] = {}
        self._dead: deque[ProcessId] = deque(maxlen=MAX_DEAD)
        self.gpus: list[GpuStatus] = []
        self.machines = Machines()
        """Those of a cluster, and what services use there."""
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
        ranks = {
            name: {each.pid: each.rank for each in report.ranks if each.machine is None}
            for name, report in self._ranks().items()
        }
        self.usage = await asyncio.to_thread(self._usage_reader.sample, keepers, parts=ranks)
        for service in {*self._living, *self.usage}:
            self._note(service)
        await asyncio.to_thread(kill_adopted)
        await self._memory_limits.check(self.usage, keepers)
        pids = pids_by_service(self.usage)
        gpus = await self.gpu_reader.sample(pids, self._attempts())
        self.gpus, self.gpu_note = [with_ranks(gpu, self.usage, ranks) for gpu in gpus.gpus], gpus.note
        self.rank_usage = {name: rank_usage(name, self.usage, ranks[name], self.gpus) for name in ranks if ranks[name]}
        self.low_disks = await asyncio.to_thread(self._disks.low)
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
        placed = self.machines.usage()
        usage: dict[str, Usage | PlacedUsage] = {**self.usage, **placed}
        held = {name: each.gpu_memory_bytes for name, each in placed.items()}
        return UsageSampled(
            number=number,
            time=at,
            cpu_percent={name: each.cpu_percent for name, each in usage.items() if each.cpu_percent is not None},
            rss_bytes={name: each.rss_bytes for name, each in usage.items() if each.rss_bytes is not None},
            gpu_memory_bytes={
                **self.gpu_memory_bytes,
                **{name: held_bytes for name, held_bytes in held.items() if held_bytes is not None},
            },
            gpus=self.gpus,
            gpu_note=self.gpu_note,
            log_bytes=log_bytes,
            low_disks=self.low_disks,
            write_faults=self._write_faults(),
            ranks={**self.rank_usage, **{name: each.ranks for name, each in placed.items() if each.ranks}},
            machines=self.machines.latest or None,
        )


def pids_by_service(usage: Mapping[str, Usage]) -> dict[str, set[int]]:
    """The processes whose GPU memory is that of a service, wherever in the tree of this run they are."""
    pids = {name: set(each.pids) for name, each in usage.items()}
    for each in usage.values():
        for name, processes in each.placed.items():
            pids.setdefault(name, set()).update(process.pid for process in processes)
    return pids


def with_ranks(gpu: GpuStatus, usage: Mapping[str, Usage], ranks: Mapping[str, Mapping[int, int]]) -> GpuStatus:
    """A GPU whose processes know which rank they belong to."""
    rank_of = {
        pid: ranks[service][root]
        for service, each in usage.items()
        for root, part in each.parts.items()
        for pid in part.pids
    }
    if rank_of.keys().isdisjoint(process.pid for process in gpu.processes):
        return gpu
    processes = [each.model_copy(update={"rank": rank_of.get(each.pid)}) for each in gpu.processes]
    return gpu.model_copy(update={"processes": processes})


def rank_usage(
    service: str, usage: Mapping[str, Usage], ranks: Mapping[int, int], gpus: Iterable[GpuStatus]
) -> list[RankUsage]:
    """The figures of the ranks of a service; those of GPUs from the processes that the driver lists."""
    held: dict[int, int] = {}
    for gpu in gpus:
        for process in gpu.processes:
            if process.service == service and process.rank is not None and process.memory_bytes is not None:
                held[process.rank] = held.get(process.rank, 0) + process.memory_bytes
    parts = usage[service].parts if service in usage else {}
    return [
        RankUsage(
            rank=rank,
            cpu_percent=parts[pid].cpu_percent if pid in parts else None,
            rss_bytes=parts[pid].rss_bytes if pid in parts else None,
            gpu_memory_bytes=held.get(rank),
        )
        for pid, rank in ranks.items()
    ]
