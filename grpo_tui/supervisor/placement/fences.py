"""Services that may still run on machines that do not answer, and that are started nowhere else until they do not."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from grpo_engine.wire.codec import Message, Time
from grpo_engine.wire.run_folder import MACHINE_ENDED
from grpo_tui.supervisor.placement.agent import FENCE_S
from grpo_tui.supervisor.placement.machine_report import Held

FENCE_ROUND_S = 0.25
log = logging.getLogger(__name__)


class Fence(Message):
    """A machine that does not answer, on which services of the run may still be running."""

    machine: str
    services: list[str]
    until: Time
    """By then its agent has ended them."""


class Fences:
    """Those of a run."""

    def __init__(self, run_folder: Path, changed: Callable[[], object]) -> None:
        """
        Args:
            run_folder: where agents leave a note when they have ended what ran.
            changed: called when one has gone.
        """
        self._run_folder = run_folder
        self._changed = changed
        self.by_node: dict[str, Fence] = {}

    def put(self, held: Held, services: list[str]) -> None:
        """Keep what ran on a machine that does not answer from being started elsewhere while it may run there."""
        if services:
            until = time.time() + held.leased_at_s + FENCE_S - time.monotonic()
            self.by_node[held.node.id] = Fence(machine=held.node.name, services=services, until=until)

    def stands(self, node: str) -> bool:
        """Whether services may still run there; ends with the time, or when the agent has left its note."""
        note = self._run_folder / f"{node}{MACHINE_ENDED}"
        if node not in self.by_node or (not note.exists() and time.time() < self.by_node[node].until):
            return node in self.by_node
        note.unlink(missing_ok=True)
        del self.by_node[node]
        self._changed()
        return False

    @property
    def until(self) -> Mapping[str, float]:
        """By service; in Unix seconds."""
        return {name: fence.until for fence in self.by_node.values() for name in fence.services}

    async def wait_for(self, name: str, reader: asyncio.StreamReader) -> int | None:
        """Return when no earlier attempt of a service can run on a machine that does not answer.

        Args:
            reader: from its process on the supervisor's side.

        Returns:
            The signal that stopped it meanwhile, if one did.

        Raises:
            ConnectionError: that process is gone.
        """
        for node, fence in list(self.by_node.items()):
            if name not in fence.services or not self.stands(node):
                continue
            by = time.strftime("%H:%M:%S", time.localtime(fence.until))
            log.warning(
                "%s may still run on %s: it is started when its agent has ended it, by %s", name, fence.machine, by
            )
            while self.stands(node):
                try:
                    line = await asyncio.wait_for(reader.readline(), FENCE_ROUND_S)
                except TimeoutError:
                    continue
                if not line:
                    raise ConnectionError(f"the process of {name} on this side is gone")
                return int(json.loads(line)["signal"])
        return None
