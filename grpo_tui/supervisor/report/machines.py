"""The machines of a run's cluster, as its broker reported them last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from grpo_engine.wire.supervisor import MachinesReport, MachineStatus, PlacedUsage

Severity = Literal["info", "warning", "error"]


class Machines:
    """The newest report; empty for a run without a cluster."""

    def __init__(self) -> None:
        self.latest: list[MachineStatus] = []

    def take(self, report: MachinesReport) -> list[tuple[Severity, str]]:
        """Keep a report; returns what is new in it, for people."""
        before, self.latest = {each.name: each for each in self.latest}, report.machines
        return [line for each in self.latest for line in _news(before.get(each.name), each)]

    def of(self, service: str) -> tuple[str | None, PlacedUsage]:
        """The machine of a service, and what it uses there; None where it is not placed."""
        for machine in self.latest:
            if service in machine.services and machine.state != "lost":
                return machine.name, machine.services[service]
        return None, PlacedUsage()

    def usage(self) -> dict[str, PlacedUsage]:
        """What each placed service uses."""
        return {name: usage for machine in self.latest for name, usage in machine.services.items()}


def _news(before: MachineStatus | None, now: MachineStatus) -> Iterator[tuple[Severity, str]]:
    known = "ready" if before is None else before.state
    if now.state == known:
        return
    ran = ", ".join(now.services) or "no service"
    match now.state:
        case "silent":
            yield "warning", f"{now.name} ({now.address}) does not answer; it runs {ran}"
        case "lost":
            yield "error", f"{now.name} ({now.address}) is lost, and with it {ran}"
        case "ready":
            yield "info", f"{now.name} ({now.address}) answers again"
