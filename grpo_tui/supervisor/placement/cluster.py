"""What the broker needs of a cluster; `ray_cluster.py` has it from Ray, tests from this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from grpo_engine.errors import GrpoError


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster that is alive."""

    id: str
    """Of the cluster; another one when the machine has left and come back."""
    name: str
    address: str
    num_free: int
    """Devices that nobody has reserved."""
    num_devices: int
    """All that it has."""


class MachineLost(GrpoError):
    """The cluster has given a machine up."""


class NoAnswer(GrpoError):
    """A machine has not answered in time."""


class Cluster(Protocol):
    """The machines of a cluster, and a way to ask the agent of each."""

    def address(self) -> str:
        """Of this machine, as other machines reach it."""

    async def nodes(self) -> list[Node]:
        """The machines that are alive."""

    async def reserve(self, node: Node, num_devices: int) -> tuple[int, ...]:
        """Reserve devices of a machine for this run; returns their numbers on it.

        Raises:
            MachineLost: the cluster has given the machine up.
            GrpoError: they cannot be had.
        """

    async def ask(self, node_id: str, request: bytes, *, timeout_s: float) -> bytes:
        """Send a line to the agent of a machine with reserved devices, which is started if there is none.

        Raises:
            MachineLost: the cluster has given the machine up.
            NoAnswer: not in time; the request may have been carried out.
        """

    async def check(self, node_id: str, *, timeout_s: float) -> None:
        """Ask what the cluster itself runs on a machine, which decides about actors and devices there.

        Raises:
            NoAnswer: not in time.
        """

    async def release(self, node_id: str) -> None:
        """Give the devices of a machine back; does nothing when it is lost."""
