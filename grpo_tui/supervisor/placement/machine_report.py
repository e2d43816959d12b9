"""What the broker says of its machines: which answers, what ran on one that is lost, and what happens next. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from grpo_engine.wire.supervisor import MachineStatus, PlacedUsage
from grpo_tui.services.base import Launch, RestartPolicy
from grpo_tui.supervisor.placement import wire
from grpo_tui.supervisor.placement.cluster import Node

ROOM_WITHIN_S = 60.0
"""For a machine with free devices: one that was lost may come back."""
MAX_SPARES = 16
"""Machines without anything of the run that are told of; a cluster may have hundreds."""


@dataclass(slots=True, kw_only=True)
class Held:
    """A machine of which the run has reserved devices."""

    node: Node
    devices: tuple[int, ...]
    heard_at_s: float = field(default_factory=time.monotonic)
    answered_at: float | None = None
    """The same in Unix seconds; None before its first answer."""
    since: float = field(default_factory=time.time)
    state: Literal["ready", "silent", "lost"] = "silent"
    usage: wire.Usage | None = None
    leased_at_s: float = field(default_factory=time.monotonic)
    """When its agent answered last: the lease of the agent counts from there at the latest."""
    last_answer: int | None = None
    """The number of that answer."""
    is_watched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A machine of the cluster of which the run has no devices, or not yet."""

    node: Node
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The last loss of a machine."""

    at: float
    services: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What is known of all machines at a moment."""

    held: tuple[Held, ...]
    joining: tuple[Seen, ...]
    """Machines on which devices are being reserved."""
    spares: tuple[Seen, ...]
    losses: Mapping[str, Loss]
    """By the name of the machine."""
    nodes_of: Mapping[str, tuple[str, ...]]
    """The nodes of each service."""
    launches: Mapping[str, Launch]
    listed_at: float | None
    """When the cluster said last which machines are alive."""
    decides_within_s: float | None
    """How long the cluster waits for a machine before it gives it up; None where that is not known."""
    restarts_machines: bool
    """Whether a lost machine is started again, as in a private cluster."""
    fenced: Mapping[str, float] = field(default_factory=dict)
    """Until when a service may still run on a machine that does not answer; in Unix seconds."""

    @property
    def num_free(self) -> Mapping[str, int]:
        """The devices of each machine that nobody has reserved, as the cluster said last."""
        nodes = [seen.node for seen in (*self.joining, *self.spares)]
        nodes += [held.node for held in self.held if held.state != "lost"]
        return {node.name: node.num_free for node in sorted(nodes, key=lambda node: (len(node.name), node.name))}


def machine_statuses(cluster: Machines) -> list[MachineStatus]:
    """A status for each machine by its name; of one that left and came back, what it is now."""
    statuses: dict[str, MachineStatus] = {}
    order = {"lost": 0, "silent": 2, "ready": 3}
    spares = sorted(cluster.spares, key=lambda each: (len(each.node.name), each.node.name))
    rows = [(order[each.state], _of_held(each, cluster)) for each in cluster.held]
    rows += [(1, _of_seen(each, cluster, is_joining=False)) for each in spares[:MAX_SPARES]]
    rows += [(1, _of_seen(each, cluster, is_joining=True)) for each in cluster.joining]
    for _, status in sorted(rows, key=lambda row: row[0]):
        statuses[status.name] = status
    return sorted(statuses.values(), key=lambda each: (len(each.name), each.name))


def _of_held(held: Held, cluster: Machines) -> MachineStatus:
    usage = held.usage or wire.Usage(sees_run=True)
    here = [name for name, nodes in cluster.nodes_of.items() if held.node.id in nodes]
    loss = cluster.losses.get(held.node.name)
    is_joining = held.state == "silent" and held.answered_at is None
    return MachineStatus(
        name=held.node.name,
        address=held.node.address,
        state=held.state,
        since=held.since,
        is_joining=is_joining,
        answered_at=held.answered_at,
        num_devices=len(held.devices),
        num_free=None if held.state == "lost" else held.node.num_free,
        services={name: usage.services.get(name, PlacedUsage()) for name in here},
        lost_services=list(loss.services) if loss else [],
        lost_at=loss.at if loss else None,
        next=_next(held.state, loss, cluster, is_joining=is_joining),
        gpus=usage.gpus,
        cpu_percent=usage.cpu_percent,
        num_cpus=usage.num_cpus,
        memory_used_bytes=usage.memory_used_bytes,
        memory_total_bytes=usage.memory_total_bytes,
    )


def _of_seen(seen: Seen, cluster: Machines, *, is_joining: bool) -> MachineStatus:
    loss = cluster.losses.get(seen.node.name)
    state: Literal["ready", "silent"] = "silent" if is_joining else "ready"
    return MachineStatus(
        name=seen.node.name,
        address=seen.node.address,
        state=state,
        since=seen.since,
        is_joining=is_joining,
        answered_at=None if is_joining else cluster.listed_at,
        num_free=seen.node.num_free,
        lost_services=list(loss.services) if loss else [],
        lost_at=loss.at if loss else None,
        next=_next(state, loss, cluster, is_joining=is_joining),
    )


def _next(
    state: Literal["ready", "silent", "lost"], loss: Loss | None, cluster: Machines, *, is_joining: bool
) -> str | None:
    """`vllm waits up to 60 s for a machine with 1 free device; the machine is started again`."""
    told: list[str] = []
    if is_joining:
        told.append("devices are reserved and the agent is started there")
    elif state == "silent":
        limit = "" if cluster.decides_within_s is None else f" within {cluster.decides_within_s:g} s"
        told.append(f"nothing is restarted yet: the cluster decides{limit} whether it is lost")
    if loss is not None:
        told += _outlook(loss.services, cluster, is_lost=state == "lost")
    if state == "lost" and cluster.restarts_machines:
        told.append("the machine is started again")
    return "; ".join(told) or None


def _outlook(services: Iterable[str], cluster: Machines, *, is_lost: bool) -> Iterator[str]:
    """What becomes of services that ran on a lost machine; where it is back, only of those that have no place yet."""
    names = {held.node.id: held.node.name for held in cluster.held if held.state != "lost"}
    for name in services:
        nodes = cluster.nodes_of.get(name, ())
        machines = [names[node] for node in nodes if node in names]
        launch = cluster.launches[name]
        if nodes and len(machines) == len(nodes):
            if name in cluster.fenced:
                by = time.strftime("%H:%M:%S", time.localtime(cluster.fenced[name]))
                yield f"{name} is started on {' and '.join(machines)} by {by}, when it runs nowhere else for certain"
            elif is_lost:
                yield f"{name} is placed on {' and '.join(machines)}"
        elif launch.restart is RestartPolicy.NEVER:
            yield f'{name} is not restarted (restart = "never"): `grpo-tui resume` goes on from its newest checkpoint'
        else:
            num_free = {machine: free for machine, free in cluster.num_free.items() if machine not in machines}
            yield _restarted(name, launch.num_devices // max(1, len(nodes)), machines, num_free)


def _restarted(name: str, num_devices: int, machines: list[str], num_free: Mapping[str, int]) -> str:
    """Of a service that takes so many devices of a machine, and keeps these machines."""
    room = [machine for machine, free in num_free.items() if free >= num_devices]
    devices = f"{num_devices} free device{'' if num_devices == 1 else 's'}"
    if room:
        return f"{name} is restarted on {' and '.join([*machines, room[0]])}, which has {devices}"
    beside = f" beside {' and '.join(machines)}" if machines else ""
    return f"{name} waits up to {ROOM_WITHIN_S:g} s for a machine with {devices}{beside}"
