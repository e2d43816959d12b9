"""The machines of a run's cluster, as its broker reported them last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from grpo_engine.wire.supervisor import MachinesReport, MachineStatus, PlacedUsage

Severity = Literal["info", "warning", "error"]


class Machines:
    """The newest report; empty for a run without a cluster."""

    def __init__(self) -> None:
        self.latest: list[MachineStatus] = []

    def take(self, report: MachinesReport) -> list[tuple[Severity, str]]:
        """Keep a report; returns what is new in it, for people."""
        before, self.latest = {each.name: each for each in self.latest}, report.machines
        gone = before.keys() - {each.name for each in self.latest}
        left = [_departure(before[name]) for name in sorted(gone) if before[name].state != "lost"]
        return [*left, *(line for each in self.latest for line in _news(before.get(each.name), each))]

    def of(self, service: str) -> tuple[str, ...]:
        """The machines of a service; none where it is not placed."""
        return tuple(each.name for each in self.latest if service in each.services and each.state != "lost")

    def usage(self) -> dict[str, PlacedUsage]:
        """What each placed service uses, on all of its machines together."""
        used: dict[str, list[PlacedUsage]] = {}
        for machine in self.latest:
            for name, usage in machine.services.items() if machine.state != "lost" else ():
                used.setdefault(name, []).append(usage)
        return {name: _sum(each) for name, each in used.items()}


def _sum(usage: list[PlacedUsage]) -> PlacedUsage:
    def total(name: str) -> Any:
        known = [value for each in usage if (value := getattr(each, name)) is not None]
        return sum(known) if known else None

    figures = {name: total(name) for name in ("cpu_percent", "rss_bytes", "gpu_memory_bytes")}
    return PlacedUsage(**figures, ranks=[rank for each in usage for rank in each.ranks])


def _departure(machine: MachineStatus) -> tuple[Severity, str]:
    """Of a machine that a broker no longer tells of: a new one knows no losses from before its start."""
    where = f"{machine.name} ({machine.address}) has left the cluster"
    if machine.services:
        return "error", f"{where}, and with it {', '.join(machine.services)}"
    return "warning", f"{where}; nothing of the run was there"


def _news(before: MachineStatus | None, now: MachineStatus) -> Iterator[tuple[Severity, str]]:
    """What a person has to know of a machine: a loss is told although it came back before the next report."""
    where, then = f"{now.name} ({now.address})", f"; {now.next}" if now.next else ""
    is_news = now.state == "lost" if before is None else now.lost_at != before.lost_at
    if now.lost_at is not None and is_news:
        yield "error", f"{where} is lost, and with it {', '.join(now.lost_services) or 'no service'}{then}"
    known = ("ready", False) if before is None else (before.state, before.is_joining)
    if (now.state, now.is_joining) == known:
        return
    if now.state == "silent" and now.is_joining:
        yield "info", f"{where} joins{then}"
    elif now.state == "silent":
        yield "warning", f"{where} does not answer; it runs {', '.join(now.services) or 'no service'}{then}"
    elif now.state == "ready" and before is not None:
        yield "info", f"{where} {'has joined' if before.is_joining or before.state == 'lost' else 'answers again'}"
