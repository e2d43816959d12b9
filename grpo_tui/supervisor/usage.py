"""CPU and memory per service: its main process and everything below its keeper, read from /proc.

Made to run every second for days on a machine with thousands of processes: only a pid that was not there before is
looked at, since what does not start below a keeper never gets there. Samples are kept by nobody but the caller.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from grpo_tui.supervisor.proc import ProcessId, Stat, below, read_stat

FULL_LOOK_S = 60.0
"""A pid used again between two samples hides a process of ours for at most so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a service takes at the moment."""

    cpu_percent: float | None
    """Of one core, since the sample before; None in the first."""
    rss_bytes: int
    """Resident, with what several processes share counted once for each of them."""
    processes: frozenset[ProcessId]
    """Its processes: for attributing GPU memory, and as the ledger of `teardown.sweep`."""

    @property
    def pids(self) -> frozenset[int]:
        """The same by pid alone."""
        return frozenset(process.pid for process in self.processes)


class UsageReader:
    """Samples all services in one pass over /proc."""

    def __init__(self) -> None:
        self._keepers: set[int] = set()
        self._strangers: set[int] = set()
        self._cpu_ticks: dict[ProcessId, int] = {}
        self._sampled_at: float | None = None
        self._looked_at = -FULL_LOOK_S
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def sample(self, keepers: Mapping[str, int], now: float | None = None) -> dict[str, Usage]:
        """Usage by service name, from the pids of their keepers, which themselves do not count.

        A service whose keeper is gone has no processes. `now` is on the monotonic clock.
        """
        now = time.monotonic() if now is None else now
        listed = self._visible(set(keepers.values()), now)
        elapsed_s = None if self._sampled_at is None else now - self._sampled_at
        before, self._cpu_ticks, self._sampled_at = self._cpu_ticks, {}, now
        ours = {service: below(keeper, listed) for service, keeper in keepers.items()}
        known = set(keepers.values()).union(*({process.pid for process in group} for group in ours.values()))
        # One whose parent died while we looked is not judged: it may be on its way to become its keeper's child.
        parents = {0, *self._strangers, *(process.pid for process in listed)}
        self._strangers.update(each.pid for each in listed if each.pid not in known and each.parent in parents)
        return {service: self._usage(group, before, elapsed_s) for service, group in ours.items()}

    def _visible(self, keepers: set[int], now: float) -> list[Stat]:
        """Every process that may be one of ours."""
        if now - self._looked_at >= FULL_LOOK_S or keepers != self._keepers:
            self._strangers.clear()
            self._looked_at, self._keepers = now, keepers
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._strangers &= pids - keepers
        stats = map(read_stat, pids - self._strangers)
        return [stat for stat in stats if stat is not None and not stat.is_dead]

    def _usage(self, group: list[Stat], before: Mapping[ProcessId, int], elapsed_s: float | None) -> Usage:
        ticks = {ProcessId(process.pid, process.start_ticks): process.cpu_ticks for process in group}
        self._cpu_ticks.update(ticks)
        spent = sum(count - before.get(process, 0) for process, count in ticks.items())
        return Usage(
            cpu_percent=100 * spent / self._ticks_per_s / elapsed_s if elapsed_s else None,
            rss_bytes=sum(process.rss_pages for process in group) * self._page_bytes,
            processes=frozenset(ticks),
        )


def fair_bytes(processes: Iterable[ProcessId]) -> int:
    """Resident memory with shared pages divided among those who share them; 0 for whoever is gone.

    The kernel walks page tables for it, some 10 ms a GB: to be asked when it matters.
    """
    return sum(_fair_bytes(process.pid) for process in processes)


def _fair_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith(b"Pss:"))
    except (PermissionError, StopIteration):  # another user's (sudo)
        stat = read_stat(pid)
        return 0 if stat is None else stat.rss_pages * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0
