"""A fake supervisor that sends busy GPUs: new utilisation, power and temperature every second.

It speaks the protocol on the run's socket; services and memory stay as they are.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.run_folder import ADDRESS_FILE, PLAN_FILE
from grpo_engine.wire.supervisor import (
    Address,
    GpuProcess,
    GpuStatus,
    Hello,
    RunState,
    RunStatus,
    ServiceState,
    ServiceStatus,
    Snapshot,
    SupervisorInfo,
    UsageSampled,
)

GIB = 1 << 30
SAMPLE_S = 1.0
NAMES = ("api", "vllm", "env", "trainer")


@contextmanager
def busy_gpus(folder: Path, socket: Path, num_gpus: int) -> Iterator[None]:
    """A run in `folder` whose GPUs are all busy, sent to every client."""
    folder.mkdir(parents=True)
    for name in NAMES:
        (folder / f"{name}.log").write_text("up\n")
    (folder / PLAN_FILE).write_text("{}\n")  # marks the folder as a run
    (folder / ADDRESS_FILE).write_bytes(to_line(Address(pid=os.getpid(), socket=str(socket))))
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        await asyncio.start_unix_server(lambda reader, writer: _tell(folder, num_gpus, reader, writer), socket)

    async def end() -> None:
        talking = asyncio.all_tasks() - {asyncio.current_task()}
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(serve(), loop).result()
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _tell(folder: Path, num_gpus: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    chance, began = random.Random(0), time.time() - 700
    writer.write(to_line(Hello(run=folder.name, pid=os.getpid())))
    await reader.readline()
    await reader.readline()
    services = [
        ServiceStatus(
            name=name, kind="command", state=ServiceState.READY, pid=4000, started_at=began, ready_at=began + 5,
            attempt=1, cpu_percent=3.2, rss_bytes=GIB, log=f"{name}.log",
        )
        for name in NAMES
    ]  # fmt: skip
    status = RunStatus(
        run=folder.name, profile="busy", state=RunState.RUNNING, services=services, started_at=began,
        supervisor=SupervisorInfo(pid=os.getpid(), started_at=began), gpus=_gpus(num_gpus, chance),
    )  # fmt: skip
    writer.write(to_line(Snapshot(number=0, status=status)))
    number = 0
    with suppress(asyncio.CancelledError):  # the run ends while viewers are connected
        while not reader.at_eof():
            number += 1
            sample = UsageSampled(
                number=number, time=time.time(),
                cpu_percent={name: chance.uniform(0, 100) for name in NAMES},
                rss_bytes={name: GIB + chance.randrange(1 << 24) for name in NAMES},
                gpu_memory_bytes={"vllm": 36 * GIB, "trainer": 22 * GIB},
                gpus=_gpus(num_gpus, chance),
            )  # fmt: skip
            writer.write(to_line(sample))
            await writer.drain()
            await asyncio.sleep(SAMPLE_S)


def _gpus(num: int, chance: random.Random) -> list[GpuStatus]:
    held = {"vllm": 36 * GIB, "trainer": 22 * GIB}
    processes = [
        GpuProcess(pid=4004, command="VLLM::EngineCore", user="me", service="vllm", memory_bytes=36 * GIB),
        GpuProcess(pid=4007, command="python -m grpo_engine train", service="trainer", memory_bytes=22 * GIB),
    ]
    return [
        GpuStatus(
            index=index, uuid=f"GPU-{index}", name="NVIDIA H100 80GB HBM3",
            memory_used_bytes=sum(held.values()) + chance.randrange(GIB), memory_total_bytes=80 * GIB, by_service=held,
            other_bytes=0, utilization_percent=float(chance.randint(60, 100)), power_watts=chance.uniform(400, 700),
            power_limit_watts=700.0, temperature_celsius=float(chance.randint(55, 70)), processes=processes,
        )
        for index in range(num)
    ]  # fmt: skip
