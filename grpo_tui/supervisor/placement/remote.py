"""Machines of a cluster as the supervisor uses them: a process of this machine stands for each service there.

Ports and GPU memory are checked on the machine itself, by its agent, before the service starts there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_engine.wire.run_folder import BROKER_FILE
from grpo_engine.wire.supervisor import Refusal
from grpo_tui import remote_process
from grpo_tui.services.base import Launch
from grpo_tui.supervisor import teardown
from grpo_tui.supervisor.keeper.client import Keeper, start_keeper
from grpo_tui.supervisor.keeper.proc import ProcessId
from grpo_tui.supervisor.teardown import GpuMemory, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMachine:
    """Whichever machine the broker chooses for a service."""

    run: str
    run_folder: Path

    async def free_resources(self, launch: Launch, *, report: Report, take_ports: bool) -> list[Refusal]:
        """Nothing here."""
        return []

    async def start(self, launch: Launch, attempt: int, *, is_held: bool = False) -> Keeper:
        """Start the process that stands for the service; its exit code and its log are those of the service."""
        assert not is_held, "a gate is a pipe of one machine: `profile/cluster.py` lets no placed service prepare"
        return await start_keeper(
            standing_for(launch, self.run_folder), run=self.run, attempt=attempt, run_folder=self.run_folder
        )

    async def sweep(
        self, launch: Launch, *, report: Report, ledger: Iterable[ProcessId], gpu_memory: GpuMemory | None
    ) -> None:
        """End what is left of the process that stood for the service; its machine has a keeper for the service."""
        await teardown.sweep(self.run, launch.name, ports=(), report=report, ledger=ledger, run_folder=self.run_folder)


def standing_for(launch: Launch, run_folder: Path) -> Launch:
    """The launch of the process that stands for a service."""
    script = [sys.executable, "-I", "-S", remote_process.__file__, str(run_folder.resolve() / BROKER_FILE), "--"]
    return replace(
        launch,
        argv=(*script, *launch.argv),
        cwd=Path("/"),
        cpus=None,
        nice=0,
        stop_grace_s=launch.stop_grace_s + remote_process.ENDED_WITHIN_S,
    )
