"""The machines of a run on a cluster: which services each has, its GPUs, and its state in words. Pure.

A run without a cluster has no rows of machines, and is shown as if this module were not there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from grpo_engine.wire.supervisor import (
    ENDED_RUN_STATES,
    GpuProcess,
    GpuStatus,
    MachineStatus,
    RunStatus,
    ServiceState,
    ServiceStatus,
)
from grpo_tui.view.format import UNKNOWN, bytes_text, clock_text, count_text, percent_text

HERE = "supervisor"
"""The row of the machine that the supervisor runs on, with the services that were not placed."""
SHORT_NAME = 6
UP = frozenset({ServiceState.READY, ServiceState.FINISHED})


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """A machine, with what runs there."""

    machine: MachineStatus | None
    """None: the one that the supervisor runs on."""
    services: tuple[ServiceStatus, ...]
    gpus: tuple[GpuStatus, ...]
    parts: tuple[str, ...] = ()
    """Services that run here too, and have their row below another machine."""
    is_over: bool = False
    """Whether the run has ended: the machine is given back, and its last figures are of no use."""

    @property
    def name(self) -> str:
        """How it is called; no machine of a cluster is called like that of the supervisor."""
        return HERE if self.machine is None else self.machine.name

    @property
    def num_ready(self) -> int:
        """Services that are up."""
        return sum(service.state in UP for service in self.services)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGpu:
    """A GPU, and the machine that it is in."""

    machine: str | None
    """None: that of the supervisor, or of a run without a cluster."""
    gpu: GpuStatus

    @property
    def label(self) -> str:
        """`GPU 0`, `machine-2 GPU 0`."""
        return f"GPU {self.gpu.index}" if self.machine is None else f"{self.machine} GPU {self.gpu.index}"

    @property
    def short_label(self) -> str:
        """`GPU 0`, `2:0` of the machine whose name ends in 2; where there is little room."""
        if self.machine is None:
            return f"GPU {self.gpu.index}"
        return f"{self.machine.rpartition('-')[2][-SHORT_NAME:]}:{self.gpu.index}"


def machine_rows(status: RunStatus | None) -> tuple[MachineRow, ...]:
    """The machines in their order, that of the supervisor first; none without a cluster."""
    if status is None or not status.machines:
        return ()
    places = _places(status)
    gpus: dict[str | None, list[GpuStatus]] = {}
    is_over = status.state in ENDED_RUN_STATES and status.ended_at is not None
    for each in [] if is_over else all_gpus(status):
        gpus.setdefault(each.machine, []).append(each.gpu)
    services: dict[str | None, list[ServiceStatus]] = {}
    for service in status.services:
        services.setdefault(places.get(service.name), []).append(service)
    last = {"cpu_percent": None, "memory_used_bytes": None} if is_over else {}
    return tuple(
        MachineRow(
            machine=machine and machine.model_copy(update=last),
            services=tuple(services.get(name, ())),
            gpus=tuple(gpus.get(name, ())),
            parts=tuple(each for each in (machine.services if machine else ()) if places.get(each) != name),
            is_over=is_over,
        )
        for name, machine in ((None, None), *((each.name, each) for each in status.machines))
    )


def _places(status: RunStatus) -> Mapping[str, str]:
    """The machine of each service that has one, or had one that was lost."""
    places: dict[str, str] = {}
    for machine in sorted(status.machines, key=lambda each: each.state == "lost"):
        for name in machine.services:
            places.setdefault(name, machine.name)
    for service in status.services:
        if service.machine is not None:
            places[service.name] = service.machine
    for machine in status.machines:
        for name in machine.lost_services:
            places.setdefault(name, machine.name)
    return places


def all_gpus(status: RunStatus) -> list[PlacedGpu]:
    """The GPUs of the supervisor's machine and of all others, as `gpus_of` has them."""
    return gpus_of(status.gpus, status.machines)


def gpus_of(here: Sequence[GpuStatus], machines: Sequence[MachineStatus]) -> list[PlacedGpu]:
    """The GPUs of the supervisor's machine and of all others.

    Machines of a private cluster, and a supervisor on a machine of its cluster, see the same GPUs: each is told once,
    as that of the first machine that has services there, with what all of them hold of it.
    """
    if not machines:
        return [PlacedGpu(machine=None, gpu=gpu) for gpu in here]
    seen: dict[str, list[PlacedGpu]] = {}
    for machine in machines:
        for gpu in machine.gpus:
            seen.setdefault(gpu.uuid, []).append(PlacedGpu(machine=machine.name, gpu=gpu))
    for gpu in here:
        seen.setdefault(gpu.uuid, []).append(PlacedGpu(machine=None, gpu=gpu))
    merged = [_merged(group) for group in seen.values()]
    order: dict[str | None, int] = {machine.name: place for place, machine in enumerate(machines)}
    order[None] = -1
    return sorted(merged, key=lambda each: (order[each.machine], each.gpu.index))


def _merged(views: list[PlacedGpu]) -> PlacedGpu:
    if len(views) == 1:
        return views[0]
    holder = max(views, key=lambda view: (bool(view.gpu.by_service), view.machine is not None))
    held: dict[str, int] = {}
    known: dict[int, GpuProcess] = {}
    for view in views:
        held |= view.gpu.by_service
        known |= {process.pid: process for process in view.gpu.processes if process.service and process.run is None}
    hidden = sum(held.values()) - sum(holder.gpu.by_service.values())
    others = None if holder.gpu.other_bytes is None else max(0, holder.gpu.other_bytes - hidden)
    processes = [known.get(process.pid, process) for process in holder.gpu.processes]
    merged = holder.gpu.model_copy(update={"by_service": held, "other_bytes": others, "processes": processes})
    return PlacedGpu(machine=holder.machine, gpu=merged)


def services_elsewhere(status: RunStatus | None) -> frozenset[str]:
    """Services whose memory is not that of the supervisor's machine; those of a private cluster are on it."""
    if status is None:
        return frozenset()
    far = [machine for machine in status.machines if not machine.address.startswith("127.")]
    return frozenset(name for machine in far for name in machine.services)


def shown_rows(status: RunStatus | None, folded: Collection[str] = ()) -> tuple[MachineRow | ServiceStatus, ...]:
    """The rows of the table: each machine, and its services unless it is folded; without a cluster the services."""
    if status is None:
        return ()
    rows: list[MachineRow | ServiceStatus] = []
    for row in machine_rows(status):
        rows += [row, *(() if row.name in folded else row.services)]
    return tuple(rows or status.services)


# --- words -----------------------------------------------------------------------------------------------------------


def state_words(row: MachineRow, now: float) -> str:
    """`ready`, `silent 12s`, `joining 3s`, `lost 12s`; how long it has been so where that matters.

    Of a run that has ended `released`; on the machine of the supervisor nothing was reserved.
    """
    machine = row.machine
    if row.is_over:
        return "ended" if machine is None else "released"
    if machine is None or machine.state == "ready":
        return "ready"
    word = "joining" if machine.is_joining else machine.state
    return f"{word} {clock_text(max(0.0, now - machine.since))}"


def ready_words(row: MachineRow) -> str:
    """`1 of 2 ready`, `part of trainer`; of a machine without services that it is spare, or has none; once over their
    number."""
    if row.is_over:
        return count_text(len(row.services), "service")
    parts = f"part of {', '.join(row.parts)}" if row.parts else ""
    if row.services:
        return f"{row.num_ready} of {len(row.services)} ready" + (f", {parts}" if parts else "")
    if parts:
        return parts
    if row.machine is None or row.machine.state != "ready":
        return "no service"
    free = row.machine.num_free
    return "spare" if free is None else f"spare, {count_text(free, 'free device')}"


def gpu_words(row: MachineRow) -> str:
    """`8 GPUs 412.0G of 640.0G, 93% busy`; nothing without a GPU."""
    if not row.gpus:
        return ""
    used, total, busy = gpu_sums(row)
    num = count_text(len(row.gpus), "GPU")
    amounts = "" if used is None or total is None else f" {bytes_text(used)} of {bytes_text(total)}"
    return f"{num}{amounts}" + (f", {percent_text(busy)} busy" if busy is not None else "")


def gpu_sums(row: MachineRow) -> tuple[int | None, int | None, float | None]:
    """Memory used and there, and the mean of how busy the GPUs are; None where no GPU says."""
    used = [gpu.memory_used_bytes for gpu in row.gpus if gpu.memory_used_bytes is not None]
    total = [gpu.memory_total_bytes for gpu in row.gpus if gpu.memory_total_bytes is not None]
    busy = [gpu.utilization_percent for gpu in row.gpus if gpu.utilization_percent is not None]
    return sum(used) if used else None, sum(total) if total else None, sum(busy) / len(busy) if busy else None


def memory_words(machine: MachineStatus | None) -> str:
    """`7.1G of 23.4G`."""
    if machine is None or machine.memory_used_bytes is None:
        return UNKNOWN
    return f"{bytes_text(machine.memory_used_bytes)} of {bytes_text(machine.memory_total_bytes)}"


def cpu_of_one_core(machine: MachineStatus | None) -> float | None:
    """How busy its cores are, in percent of one core, as for services."""
    if machine is None or machine.cpu_percent is None or machine.num_cpus is None:
        return None
    return machine.cpu_percent * machine.num_cpus


def machine_facts(row: MachineRow, now: float, clock: str) -> Iterator[tuple[str, str]]:
    """All that is known of a machine, by headings; `clock` is the time of day since when it is in its state."""
    machine = row.machine
    if machine is None:
        yield "machine", "that of the supervisor; services that take no devices run here"
    else:
        yield "address", machine.address
        yield "state", state_words(row, now) if row.is_over else f"{state_words(row, now)}, since {clock}"
        if machine.lost_services:
            yield "lost", ", ".join(machine.lost_services)
        if machine.next is not None:
            yield "next", machine.next
        yield (
            "devices",
            f"{machine.num_devices} reserved" + ("" if machine.num_free is None else f", {machine.num_free} free"),
        )
        cores = "" if machine.num_cpus is None else f" of {count_text(machine.num_cpus, 'core')}"
        yield "CPU", f"{percent_text(machine.cpu_percent)}{cores}"
        yield "memory", memory_words(machine)
    yield "GPUs", gpu_words(row) or "none reported"
    services = [f"{each.name} {each.state}" for each in row.services] + [f"part of {name}" for name in row.parts]
    yield "services", ", ".join(services) or "none"
