"""A broker with a cluster of agents in this process, and programs as its services."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

from cluster_fakes import ClusterOfAgents
from launches import launch
from stage import Stage

from grpo_engine.wire.environment_variables import ATTEMPT_VARIABLE, SERVICE_VARIABLE
from grpo_engine.wire.supervisor import MachinesReport, MachineStatus, RanksReport, ServiceReport
from grpo_tui.services.base import Launch
from grpo_tui.supervisor.keeper.proc import identify
from grpo_tui.supervisor.placement.broker import Broker
from grpo_tui.supervisor.placement.remote import standing_for

DEADLINE_S = 60.0
DOORS = "127.0.0.3"
"""Where ports of services on another machine are reachable: another address of loopback, since that machine is this."""
PRINTS = "import os; print('devices', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
WAITS = f"{PRINTS}; import os, signal; print('pid', os.getpid(), flush=True); signal.pause()"


def program(name: str, code: str, *, num_devices: int = 1) -> Launch:
    """A service that runs a Python program."""
    return launch(name, argv=(sys.executable, "-I", "-S", "-c", code), num_devices=num_devices, stop_grace_s=5.0)


_kept_lines: WeakKeyDictionary[asyncio.subprocess.Process, list[str]] = WeakKeyDictionary()
"""Of each process, what was read and not asked for yet."""


class Bench:
    """A broker with its cluster."""

    def __init__(self, stage: Stage, tmp_path: Path, launches: list[Launch], **num_devices: int) -> None:
        self.run_folder = tmp_path / stage.run
        self.run_folder.mkdir()
        self.launches = {each.name: replace(each, argv=(*each.argv, stage.token)) for each in launches}
        self.cluster = ClusterOfAgents(run_folder=self.run_folder, folder=tmp_path, num_devices=num_devices)
        self.reports: list[MachinesReport] = []
        self.passed_on: list[ServiceReport | RanksReport] = []
        self.started: list[asyncio.subprocess.Process] = []
        self.socket = tmp_path / "b.sock"

    @asynccontextmanager
    async def broker(self, *, ends_all: bool = True) -> AsyncIterator[Broker]:
        """A broker that serves; as if it was killed unless `ends_all`."""
        broker = Broker(
            self.cluster,
            self.launches.values(),
            run_folder=self.run_folder,
            report=self.reports.append,
            pass_on=self._pass_on,
            door_host=DOORS,
        )
        await broker.open()
        ready = asyncio.Event()
        serving = asyncio.create_task(broker.serve(self.socket, ready.set))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await ready.wait()
                yield broker
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            if ends_all:
                await broker.close()
                for process in self.started:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.communicate()

    async def _pass_on(self, report: ServiceReport | RanksReport) -> None:
        self.passed_on.append(report)

    async def start(self, name: str, attempt: int = 1) -> asyncio.subprocess.Process:
        """The process that stands for a service."""
        environment = {**os.environ, SERVICE_VARIABLE: name, ATTEMPT_VARIABLE: str(attempt)}
        argv = standing_for(self.launches[name], self.run_folder).argv
        process = await asyncio.create_subprocess_exec(*argv, env=environment, stdout=asyncio.subprocess.PIPE)
        self.started.append(process)
        return process


async def line_of(process: asyncio.subprocess.Process, start: str) -> str:
    """The next line that starts so; those before it are kept, since the lines of several parts come in any order."""
    assert process.stdout is not None
    kept = _kept_lines.setdefault(process, [])
    for line in kept:
        if line.startswith(start):
            kept.remove(line)
            return line.strip()
    while line := (await process.stdout.readline()).decode():
        if line.startswith(start):
            return line.strip()
        kept.append(line)
    raise AssertionError(f"no line starts with {start}")


def lost_machine(bench: Bench) -> MachineStatus:
    """The machine `left`, as it was reported last."""
    return next(each for each in bench.reports[-1].machines if each.name == "left")


async def until_gone(pid: int) -> None:
    """Wait until a process has ended."""
    async with asyncio.timeout(DEADLINE_S):
        while identify(pid) is not None:  # noqa: ASYNC110 - the process is no child of this one
            await asyncio.sleep(0.01)
