"""A machine as the supervisor uses it: check what a service needs, start it, watch and stop it, clean up after it.

`LocalMachine` is the machine of this process: a keeper for each attempt. A started attempt is a `Keeper`, whatever the
machine: `exited()` watches it, `stop()` and `kill()` end it, and its log is in the run folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from grpo_engine.wire.supervisor import Refusal
from grpo_tui.services.base import Launch
from grpo_tui.supervisor import preflight, teardown
from grpo_tui.supervisor.keeper.client import Keeper, start_keeper
from grpo_tui.supervisor.keeper.proc import ProcessId
from grpo_tui.supervisor.teardown import GpuMemory, Report
from grpo_tui.supervisor.usage.gpus import GpuReader


class Machine(Protocol):
    """Where the attempts of services are started."""

    async def free_resources(self, launch: Launch, *, report: Report, take_ports: bool) -> list[Refusal]:
        """End what is ours on the ports and GPUs of a launch; one refusal for each that it cannot have."""

    async def start(self, launch: Launch, attempt: int, *, is_held: bool = False) -> Keeper:
        """Start an attempt; return once its process runs, or could not be started.

        Args:
            is_held: whether it prepares and then waits for `Keeper.open_gate`; only on the supervisor's machine.

        Raises:
            GrpoError: no keeper could be started.
        """

    async def sweep(
        self, launch: Launch, *, report: Report, ledger: Iterable[ProcessId], gpu_memory: GpuMemory | None
    ) -> None:
        """End what an attempt left after its exit, and report what could not be ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMachine:
    """The machine of this process."""

    run: str
    run_folder: Path
    gpu_reader: GpuReader

    async def free_resources(self, launch: Launch, *, report: Report, take_ports: bool) -> list[Refusal]:
        """Check ports and GPU memory; see `preflight`."""
        return await preflight.free_resources(
            launch, run=self.run, report=report, gpu_reader=self.gpu_reader, take_ports=take_ports
        )

    async def start(self, launch: Launch, attempt: int, *, is_held: bool = False) -> Keeper:
        """Start a keeper, which starts the service."""
        return await start_keeper(launch, run=self.run, attempt=attempt, run_folder=self.run_folder, is_held=is_held)

    async def sweep(
        self, launch: Launch, *, report: Report, ledger: Iterable[ProcessId], gpu_memory: GpuMemory | None
    ) -> None:
        """Search by marker, ledger, ports and GPU memory; see `teardown`."""
        await teardown.sweep(
            self.run,
            launch.name,
            ports=launch.ports,
            report=report,
            ledger=ledger,
            gpu_memory=gpu_memory,
            run_folder=self.run_folder,
        )
