"""Which machine of a cluster a service runs on. Pure.

Services take contiguous slices of devices, machine after machine, in the order trainer, inference, reference, others. A
service is on one machine; where it does not fit on what is left of one, it takes the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from grpo_engine.errors import GrpoError
from grpo_tui.services.base import Launch

ORDER = ("trainer", "inference", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A machine, with the devices of it that are free."""

    name: str
    num_free: int


class NoRoom(GrpoError):
    """No machine has as many free devices as a service needs."""


def in_order(launches: Iterable[Launch]) -> list[Launch]:
    """The services that take devices of a cluster, in the order in which they do."""
    placed = [launch for launch in launches if launch.num_devices]
    return sorted(placed, key=lambda each: ORDER.index(each.kind) if each.kind in ORDER else len(ORDER))


def assign(launches: Iterable[Launch], rooms: Iterable[Room]) -> dict[str, str]:
    """The machine of each service that takes devices.

    >>> launches: trainer takes 2, vllm and vllm-2 take 1 each; machines a and b have 2 devices each
    {"trainer": "a", "vllm": "b", "vllm-2": "b"}

    Raises:
        NoRoom: names the service, what it needs, and what the machines have.
    """
    rooms = list(rooms)
    free = {room.name: room.num_free for room in rooms}
    machines: dict[str, str] = {}
    for launch in in_order(launches):
        machines[launch.name] = found = _first_with_room(launch, free)
        free[found] -= launch.num_devices
    return machines


def _first_with_room(launch: Launch, free: Mapping[str, int]) -> str:
    for name, num_free in free.items():
        if num_free >= launch.num_devices:
            return name
    there = ", ".join(f"{name} has {count}" for name, count in free.items()) or "there is none"
    raise NoRoom(
        f"no machine has {launch.num_devices} free devices, which {launch.settings}.num_devices asks for: {there} "
        "free; lower it, or add a machine to the cluster"
    )
