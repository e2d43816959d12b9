"""Which machines of a cluster a service runs on. Pure.

Services take contiguous slices of devices, machine after machine, in the order trainer, inference, reference, others. A
service is on one machine, the first with room. One that asks for more devices than any machine has, and that can be on
several, is on the fewest that take equal shares of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from grpo_engine.errors import GrpoError
from grpo_tui.profile.cluster import num_machines_for
from grpo_tui.services.base import Launch

ORDER = ("trainer", "inference", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A machine, with the devices of it that are free."""

    name: str
    num_free: int
    num_devices: int
    """All that it has."""


class NoRoom(GrpoError):
    """No machine has as many free devices as a service needs."""


def in_order(launches: Iterable[Launch]) -> list[Launch]:
    """The services that take devices of a cluster, in the order in which they do."""
    placed = [launch for launch in launches if launch.num_devices]
    return sorted(placed, key=lambda each: ORDER.index(each.kind) if each.kind in ORDER else len(ORDER))


def assign(launches: Iterable[Launch], rooms: Iterable[Room]) -> dict[str, tuple[str, ...]]:
    """The machines of each service that takes devices, each with an equal share of them.

    >>> launches: trainer takes 4 devices, vllm and vllm-2 take 1 each; machines a, b and c have 2 devices each
    {"trainer": ("a", "b"), "vllm": ("c",), "vllm-2": ("c",)}

    Raises:
        NoRoom: names the service, what it needs, and what the machines have.
    """
    rooms = list(rooms)
    free = {room.name: room.num_free for room in rooms}
    sizes = [room.num_devices for room in rooms]
    machines: dict[str, tuple[str, ...]] = {}
    for launch in in_order(launches):
        machines[launch.name] = found = _with_room(launch, free, sizes)
        for name in found:
            free[name] -= launch.num_devices // len(found)
    return machines


def _with_room(launch: Launch, free: Mapping[str, int], sizes: Collection[int]) -> tuple[str, ...]:
    count = launch.num_machines or 1
    if launch.num_machines is None and launch.part_arguments and max(sizes, default=0) < launch.num_devices:
        count = num_machines_for(launch.num_devices, list(free.values()))
    share = launch.num_devices // count if count else 0
    found = [name for name, num_free in free.items() if num_free >= share][:count]
    if count and len(found) == count:
        return tuple(found)
    there = ", ".join(f"{name} has {count}" for name, count in free.items()) or "there is none"
    if count == 1:
        what, where = f"no machine has {launch.num_devices} free devices", ""
    elif count:
        what, where = f"no {count} machines have {share} free devices each", f" on {count} machines"
    else:
        what, where = f"no machines have equal shares of {launch.num_devices} free devices", ""
    raise NoRoom(
        f"{what}, which {launch.settings}.num_devices asks for{where}: {there} free; lower it, or add a machine to the "
        "cluster"
    )
