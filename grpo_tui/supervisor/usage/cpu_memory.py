"""CPU and memory per service, of all processes below its keeper, read from /proc.

Runs every second for days on machines with thousands of processes: only pids that are new or known to be below a keeper
are read, since a process that does not start below a keeper never gets there.

Limits on resident memory are checked here with every sample. Kernel limits are not used: a limit on address space
breaks CUDA, which maps more than it uses, and creating a control group needs privileges.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from grpo_tui.supervisor.keeper.proc import ProcessId, Stat, below, identify, marker, read_stat

FULL_LOOK_S = 60.0
"""A pid that is reused between two samples hides a process for at most this long."""
WAIT_FACTOR = 10.0
"""Wait this many times as long as the last exact measurement took: at most a tenth of a core."""
OverLimit = Callable[[str, int], None]
"""Called with a service and its bytes, once per attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a service, or a rank of one, uses at one moment."""

    cpu_percent: float | None
    """Of one core, since the previous sample; None in the first."""
    rss_bytes: int
    """Resident; shared pages count once for each process."""
    own: frozenset[ProcessId]
    """The processes that these figures are of."""
    placed: Mapping[str, frozenset[ProcessId]] = field(default_factory=dict)
    """By placed service, those that an agent below this one (of a private cluster) has started for it."""
    parts: Mapping[int, Usage] = field(default_factory=dict)
    """By the pid of a rank: of that process and those below it."""

    @property
    def processes(self) -> frozenset[ProcessId]:
        """All below its keeper: the ledger of `teardown.sweep`."""
        return self.own.union(*self.placed.values())

    @property
    def pids(self) -> frozenset[int]:
        """Of `own`, to attribute GPU memory."""
        return frozenset(process.pid for process in self.own)


class UsageReader:
    """Samples all services in one pass over /proc."""

    def __init__(self, placed: Collection[str] = ()) -> None:
        """Read nothing yet.

        Args:
            placed: services that agents of a cluster start; those of a private one are below another service here.
        """
        self._placed = placed
        self._started_for: dict[ProcessId, str] = {}
        self._keepers: set[int] = set()
        self._unrelated: set[int] = set()
        self._cpu_ticks: dict[ProcessId, int] = {}
        self._sampled_at: float | None = None
        self._looked_at = -FULL_LOOK_S
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def sample(
        self,
        keepers: Mapping[str, int],
        now: float | None = None,
        *,
        parts: Mapping[str, Collection[int]] = MappingProxyType({}),
    ) -> dict[str, Usage]:
        """Usage by service name, from the pids of their keepers, which are not counted.

        A service whose keeper is gone has no processes. `now` is on the monotonic clock.

        Args:
            parts: by service, processes of it whose part is wanted.
        """
        now = time.monotonic() if now is None else now
        listed = self._visible(set(keepers.values()), now)
        elapsed_s = None if self._sampled_at is None else now - self._sampled_at
        before, self._cpu_ticks, self._sampled_at = self._cpu_ticks, {}, now
        ours = {service: below(keeper, listed) for service, keeper in keepers.items()}
        known = set(keepers.values()).union(*({process.pid for process in group} for group in ours.values()))
        # A process whose parent exited meanwhile is left undecided: its keeper may be about to adopt it.
        parents = {0, *self._unrelated, *(process.pid for process in listed)}
        self._unrelated.update(each.pid for each in listed if each.pid not in known and each.parent in parents)
        usage = {
            service: self._usage(
                group,
                before,
                elapsed_s,
                parts.get(service, ()),
                {} if service in self._placed else self._placed_among(group),
            )
            for service, group in ours.items()
        }
        self._started_for = {each: name for each, name in self._started_for.items() if each in self._cpu_ticks}
        return usage

    def _visible(self, keepers: set[int], now: float) -> list[Stat]:
        """Every process that may be below a keeper."""
        if now - self._looked_at >= FULL_LOOK_S or keepers != self._keepers:
            self._unrelated.clear()
            self._looked_at, self._keepers = now, keepers
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._unrelated &= pids - keepers
        stats = map(read_stat, pids - self._unrelated)
        return [stat for stat in stats if stat is not None and not stat.is_dead]

    def _usage(
        self,
        group: list[Stat],
        before: Mapping[ProcessId, int],
        elapsed_s: float | None,
        parts: Collection[int] = (),
        placed: Mapping[int, str] = MappingProxyType({}),
    ) -> Usage:
        own = [process for process in group if process.pid not in placed]
        ticks = {_identity(process): process.cpu_ticks for process in own}
        self._cpu_ticks.update({_identity(process): process.cpu_ticks for process in group})
        spent = sum(count - before.get(process, 0) for process, count in ticks.items())
        return Usage(
            cpu_percent=100 * spent / self._ticks_per_s / elapsed_s if elapsed_s else None,
            rss_bytes=sum(process.rss_pages for process in own) * self._page_bytes,
            own=frozenset(ticks),
            placed={
                name: frozenset(_identity(process) for process in group if placed.get(process.pid) == name)
                for name in set(placed.values())
            },
            parts={
                pid: self._usage([each for each in group if each.pid == pid] + below(pid, group), before, elapsed_s)
                for pid in parts
            },
        )

    def _placed_among(self, group: list[Stat]) -> dict[int, str]:
        """By pid, the placed service of those, parents first, that are marked for one or below a marked one."""
        found: dict[int, str] = {}
        for process in group if self._placed else ():
            if (name := found.get(process.parent) or self._placed_service(process)) is not None:
                found[process.pid] = name
        return found

    def _placed_service(self, process: Stat) -> str | None:
        """None is asked again: a process has the mark of its parent until its `exec`. A title may hide it later."""
        identity = _identity(process)
        mark = None if identity in self._started_for else marker(process.pid)
        if mark is not None and mark.service is not None and mark.service in self._placed:
            self._started_for[identity] = mark.service
        return self._started_for.get(identity)


def _identity(process: Stat) -> ProcessId:
    return ProcessId(process.pid, process.start_ticks)


def proportional_bytes(processes: Iterable[ProcessId]) -> int:
    """Resident memory with shared pages divided among the processes that share them (PSS).

    The kernel walks page tables for it, about 10 ms per GB, so it is not part of every sample.
    """
    return sum(_proportional_bytes(process.pid) for process in processes)


def _proportional_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith(b"Pss:"))
    except (PermissionError, StopIteration):  # another user's (sudo)
        stat = read_stat(pid)
        return 0 if stat is None else stat.rss_pages * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


class MemoryLimits:
    """Compares every sample with the limits, in bytes by service."""

    def __init__(self, limits: Mapping[str, int], over_limit: OverLimit) -> None:
        self._limits = limits
        self._over_limit = over_limit
        self._reported: dict[str, ProcessId] = {}
        """By service, the keeper of the last attempt that was over its limit."""
        self._waits_until: dict[str, float] = {}

    @property
    def are_set(self) -> bool:
        """Whether any service has a limit."""
        return bool(self._limits)

    async def check(self, usage: Mapping[str, Usage], keepers: Mapping[str, int]) -> None:
        """Report every service that is over its limit, once per attempt; `keepers` are the keepers' pids."""
        for service in self._limits.keys() & usage.keys() & keepers.keys():
            if usage[service].rss_bytes > self._limits[service]:
                await self._check(service, usage[service], identify(keepers[service]))

    async def _check(self, service: str, usage: Usage, keeper: ProcessId | None) -> None:
        """Report it if it is over the limit also with shared memory counted once."""
        started = time.monotonic()
        if keeper is None or self._reported.get(service) == keeper or started < self._waits_until.get(service, started):
            return
        held_bytes = await asyncio.to_thread(proportional_bytes, usage.own)
        if held_bytes > self._limits[service]:
            self._reported[service] = keeper
            self._over_limit(service, held_bytes)
        else:
            self._waits_until[service] = time.monotonic() + WAIT_FACTOR * (time.monotonic() - started)
