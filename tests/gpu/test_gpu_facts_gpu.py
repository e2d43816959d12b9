"""What our reader reports of the real driver, while a child process holds some memory of the first GPU.

In a container the driver may list pids of the host, or none: then the sample has a note, and no figure per service. The
samples are in the log (`-o log_cli=true --log-cli-level=INFO`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import pytest
import torch

from grpo_engine.wire.supervisor import GpuProcess, GpuStatus
from grpo_tui.supervisor.usage.gpus import GpuReader, GpuSample

HELD_BYTES = 1 << 30
CHILD = f"""
import sys, torch
held = torch.empty({HELD_BYTES}, dtype=torch.uint8, device="cuda:0").fill_(1)
for _ in range(50):
    a = torch.ones(2048, 2048, device="cuda:0"); a = a @ a
torch.cuda.synchronize()
print("holding", flush=True)
sys.stdin.read()
"""
READ_LIMIT_S = 10.0

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


async def test_the_memory_of_a_child_is_reported_or_that_the_driver_hides_it_and_all_sensors() -> None:
    reader = GpuReader(limit_s=READ_LIMIT_S)
    before = first_gpu(await reader.sample({}))
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHILD,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=numbered_like_the_driver(),
    )
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"holding\n"
        sample = await reader.sample({"trainer": {child.pid}}, {"trainer": 2})
        during = first_gpu(sample)
        logger.info("%s %s", during.model_dump_json(indent=1), sample.note)
        assert during.memory_used_bytes is not None
        assert before.memory_used_bytes is not None
        assert during.memory_used_bytes - before.memory_used_bytes >= HELD_BYTES
        assert during.stale_s is None
        assert during.power_watts is None or 10 < during.power_watts < 2000
        assert during.power_limit_watts is None or 50 < during.power_limit_watts < 2000
        assert during.temperature_celsius is None or 10 < during.temperature_celsius < 110
        assert during.has_mig == bool(during.mig)
        if during.are_shares_known and during.processes:
            [ours] = [each for each in during.processes if each.pid == child.pid]
            assert_is_child(ours)
            assert during.by_service["trainer"] >= HELD_BYTES
        else:
            assert during.by_service == {}
            assert sample.note is not None or not during.processes
    finally:
        await child.communicate(b"")
    after = first_gpu(await reader.sample({}))
    assert child.pid not in [each.pid for each in after.processes]


def first_gpu(sample: GpuSample) -> GpuStatus:
    assert sample.gpus, sample.note
    return sample.gpus[0]


def numbered_like_the_driver() -> dict[str, str]:
    """An environment in which CUDA numbers the GPUs as the driver does."""
    return {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def assert_is_child(process: GpuProcess) -> None:
    assert (process.service, process.attempt, process.is_visible) == ("trainer", 2, True)
    assert process.memory_bytes is not None
    assert process.memory_bytes >= HELD_BYTES
    assert "torch" in process.command
