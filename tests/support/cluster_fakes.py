"""A cluster whose machines are agents in this process; what they start are real processes under real keepers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from grpo_tui.supervisor.placement.agent import Agent
from grpo_tui.supervisor.placement.cluster import MachineLost, NoAnswer, Node


@dataclass(slots=True, kw_only=True)
class ClusterOfAgents:
    """Machines by name; `lose` takes one away, as a cluster does that has not heard of it."""

    run_folder: Path
    folder: Path
    num_devices: dict[str, int]
    agents: dict[str, Agent] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    """Never answer."""
    num_unanswered: int = 0
    """So many more questions that follow a service are not answered: as where an actor is killed meanwhile."""
    unchecked: set[str] = field(default_factory=set)
    """Agents answer, and the cluster's own process does not."""
    dying: set[str] = field(default_factory=set)
    """Are listed until devices of theirs are reserved; then they are lost."""
    addresses: dict[str, str] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)

    def address(self) -> str:
        """Of the machine that the broker runs on."""
        return "127.0.0.1"

    async def nodes(self) -> list[Node]:
        """Those that are not lost."""
        return [
            Node(
                id=name,
                name=name,
                address=self.addresses.get(name, "127.0.0.1"),
                num_free=count - self.reserved.get(name, 0),
                num_devices=count,
            )
            for name, count in self.num_devices.items()
            if name not in self.lost
        ]

    async def reserve(self, node: Node, num_devices: int) -> tuple[int, ...]:
        """The first that are free."""
        if node.id in self.dying:
            self.lost.add(node.id)
            raise MachineLost(f"{node.id} is lost")
        first = self.reserved.get(node.id, 0)
        self.reserved[node.id] = first + num_devices
        return tuple(range(first, first + num_devices))

    async def ask(self, node_id: str, request: bytes, *, timeout_s: float) -> bytes:
        """Ask the agent, which is made at the first request."""
        if node_id in self.lost:
            raise MachineLost(f"{node_id} is lost")
        if self.num_unanswered and b'"follow"' in request:
            self.num_unanswered -= 1
            raise NoAnswer(f"{node_id}: its actor has died")
        if node_id in self.silent:
            await asyncio.Event().wait()
        if node_id not in self.agents:
            folder = self.folder / node_id
            folder.mkdir(exist_ok=True)
            self.agents[node_id] = Agent(self.run_folder, folder, None, node=node_id)
        return await self.agents[node_id].answer(request)

    async def check(self, node_id: str, *, timeout_s: float) -> None:
        """Whether the cluster's own process answers."""
        if node_id in self.unchecked:
            raise NoAnswer(f"{node_id} does not answer")

    async def release(self, node_id: str) -> None:
        """Give its devices back."""
        self.reserved.pop(node_id, None)

    def lose(self, name: str) -> None:
        """The machine is gone; what ran there is ended by the caller."""
        self.lost.add(name)
