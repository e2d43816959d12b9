"""GPU figures from a driver that is absent, complete, without process lists, or hanging.

The driver is a short fake of the functions that are used: what it returns is what the real one returns on those
machines, and dividing memory among services, messages and time limits are ours.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Set
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_engine.wire.supervisor import GpuProcess, GpuStatus
from grpo_tui.supervisor.keeper.proc import ProcessId, uid_of, user_name
from grpo_tui.supervisor.usage.cpu_memory import Usage
from grpo_tui.supervisor.usage.gpus import GpuReader, Nvml, load_pynvml
from grpo_tui.supervisor.usage.sampling import pids_by_service, rank_usage, with_ranks

GB = 10**9


class NvmlError(Exception):
    pass


class NotSupported(NvmlError):
    pass


class FunctionNotFound(NvmlError):
    pass


class LibraryNotFound(NvmlError):
    pass


class NoPermission(NvmlError):
    pass


@dataclass
class FakeSlice:
    """A MIG instance; `processes` run on it."""

    number: int
    processes: list[tuple[int, int | None]] = field(default_factory=list)


@dataclass
class FakeNvml:
    """One GPU of 141 GB, with processes as (pid, bytes or None); without lists where they are None."""

    compute: list[tuple[int, int | None]] | None = field(default_factory=list)
    graphics: list[tuple[int, int | None]] | None = field(default_factory=list)
    init_error: Exception | None = None
    responds: threading.Event = field(default_factory=threading.Event)
    is_old: bool = False
    num_inits: int = 0
    num_gpus: int = 1
    slices: list[FakeSlice] = field(default_factory=list)
    has_sensors: bool = True
    connected: Set[tuple[int, int, int]] = frozenset()
    """Two GPUs and what connects them: 2 is NVLink, 0 any access of one to the memory of the other."""

    NVMLError: type[Exception] = NvmlError
    NVMLError_LibraryNotFound: type[Exception] = LibraryNotFound
    NVMLError_DriverNotLoaded: type[Exception] = LibraryNotFound
    NVMLError_NotSupported: type[Exception] = NotSupported
    NVMLError_FunctionNotFound: type[Exception] = FunctionNotFound
    NVMLError_NoPermission: type[Exception] = NoPermission
    nvmlMemory_v2: int = 2
    NVML_TEMPERATURE_GPU: int = 0
    NVML_DEVICE_MIG_ENABLE: int = 1
    NVML_P2P_CAPS_INDEX_NVLINK: int = 2
    NVML_P2P_STATUS_OK: int = 0

    def __post_init__(self) -> None:
        self.responds.set()

    def nvmlInit(self) -> None:
        self.num_inits += 1
        if self.init_error:
            raise self.init_error

    def nvmlDeviceGetCount(self) -> int:
        self.responds.wait()
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return index

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return f"MIG-{handle.number}" if isinstance(handle, FakeSlice) else f"GPU-{handle + 1}"

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return "NVIDIA H200 MIG 3g.71gb" if isinstance(handle, FakeSlice) else "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        if isinstance(handle, FakeSlice):
            return SimpleNamespace(used=30 * GB, free=41 * GB, total=71 * GB)
        if version is None:
            return SimpleNamespace(used=81 * GB, free=60 * GB, total=141 * GB)  # with what the driver keeps for itself
        if self.is_old:
            raise FunctionNotFound
        return SimpleNamespace(used=80 * GB, free=60 * GB, total=141 * GB)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        if self.slices:
            raise NotSupported("Not Supported")
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        if isinstance(handle, FakeSlice):
            return self._listed(handle.processes, handle.number)
        return self._listed(self.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:
        return self._listed(self.graphics)

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._sensor(512_345)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        return self._sensor(700_000)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return self._sensor(61)

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        if self.is_old:
            raise FunctionNotFound
        return [int(bool(self.slices)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        if index >= len(self.slices):
            raise NvmlError("Not Found")
        return self.slices[index]

    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int:
        return int(handle.number)

    def nvmlDeviceGetP2PStatus(self, handle: Any, other: Any, capability: int) -> int:
        if self.is_old:
            raise NotSupported("Not Supported")
        return int((handle, other, capability) not in self.connected)

    def _sensor(self, value: int) -> int:
        if not self.has_sensors:
            raise NotSupported("Not Supported")
        return value

    def _listed(self, processes: list[tuple[int, int | None]] | None, instance: int = 0xFFFFFFFF) -> list[Any]:
        if processes is None:
            raise NoPermission("Insufficient Permissions") if self.slices else NotSupported("Not Supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used, gpuInstanceId=instance) for pid, used in processes]


def reader_of(nvml: FakeNvml, **more: Any) -> GpuReader:
    return GpuReader(lambda: nvml, is_visible=lambda pid: pid < 1000, **more)


async def test_memory_is_divided_among_services_and_the_rest_is_others() -> None:
    nvml = FakeNvml(compute=[(10, 50 * GB), (11, 10 * GB), (12, 15 * GB), (99, 4 * GB)], graphics=[(12, 15 * GB)])
    sample = await reader_of(nvml).sample({"vllm": {10, 11}, "trainer": {12, 13}, "env": {14}})
    [gpu] = sample.gpus
    assert sample.note is None
    assert gpu.by_service == {"vllm": 60 * GB, "trainer": 15 * GB}
    assert gpu.other_bytes == 5 * GB
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes, gpu.utilization_percent) == (80 * GB, 141 * GB, 97.0)
    assert (gpu.index, gpu.uuid, gpu.name) == (0, "GPU-1", "NVIDIA H200")


@pytest.mark.parametrize(
    ("nvml", "by_service", "other_gb", "used_gb"),
    [
        pytest.param(FakeNvml(), {}, 80, 80, id="without services all is of others"),
        pytest.param(FakeNvml(compute=[(5000, 50 * GB)]), {"vllm": 50 * GB}, 30, 80, id="a process that has exited"),
        pytest.param(FakeNvml(is_old=True), {}, 81, 81, id="an old driver includes its reserved memory"),
    ],
)
async def test_memory_counts_until_the_driver_has_freed_it(
    nvml: FakeNvml, by_service: dict[str, int], other_gb: int, used_gb: int
) -> None:
    [gpu] = (await reader_of(nvml).sample({"vllm": {5000}})).gpus
    assert gpu.by_service == by_service
    assert (gpu.other_bytes, gpu.memory_used_bytes) == (other_gb * GB, used_gb * GB)


@pytest.mark.parametrize(
    ("compute", "listed"),
    [
        (None, []),
        ([(10, None)], [(10, True, None)]),
        ([(4_000_000, 50 * GB), (4_000_001, None)], [(4_000_000, False, 50 * GB), (4_000_001, False, None)]),
    ],
    ids=["no lists", "no shares", "pids of another namespace"],
)
async def test_a_driver_that_reports_no_usable_shares_leaves_them_unknown_not_0(
    compute: list[tuple[int, int | None]] | None, listed: list[tuple[int, bool, int | None]]
) -> None:
    sample = await reader_of(FakeNvml(compute=compute, graphics=None)).sample({"vllm": {10}})
    [gpu] = sample.gpus
    assert [(each.pid, each.is_visible, each.memory_bytes) for each in gpu.processes] == listed
    assert not gpu.are_shares_known
    assert (gpu.by_service, gpu.other_bytes, gpu.memory_used_bytes) == ({}, None, 80 * GB)
    assert sample.note is not None
    assert sample.note.startswith("GPU memory by service is unknown")


async def test_memory_is_by_process_and_without_what_the_driver_reserves() -> None:
    [memory] = await reader_of(FakeNvml(compute=[(10, 50 * GB), (11, None)])).memory()
    assert (memory.index, memory.uuid, memory.name) == (0, "GPU-1", "NVIDIA H200")
    assert (memory.free_bytes, memory.used_bytes, memory.usable_bytes) == (60 * GB, 80 * GB, 140 * GB)
    assert memory.bytes_by_pid == {10: 50 * GB, 11: None}
    [memory] = await reader_of(FakeNvml(compute=None)).memory()
    assert memory.bytes_by_pid == {}


async def test_memory_is_never_taken_from_an_older_reading() -> None:
    nvml = FakeNvml()
    reader = reader_of(nvml, limit_s=0.02)
    assert len(await reader.memory(limit_s=60)) == 1
    nvml.responds.clear()
    assert await reader.memory(limit_s=0.02) == []
    assert (await reader.sample({})).note is not None
    nvml.responds.set()
    assert len(await reader.memory(limit_s=60)) == 1
    assert await reader_of(FakeNvml(init_error=LibraryNotFound())).memory() == []


async def test_without_a_driver_the_note_says_so_and_it_is_tried_again_only_after_a_minute() -> None:
    now = [0.0]
    nvml = FakeNvml(init_error=LibraryNotFound())
    reader = reader_of(nvml, clock=lambda: now[0])
    for _ in range(3):
        sample = await reader.sample({})
        assert (sample.gpus, sample.note) == ([], "no NVIDIA driver")
    assert nvml.num_inits == 1
    now[0], nvml.init_error = 60.0, None
    assert len((await reader.sample({})).gpus) == 1
    assert nvml.num_inits == 2
    failed = await reader_of(FakeNvml(init_error=NvmlError("GPU is lost"))).sample({})
    assert (failed.gpus, failed.note) == ([], "NVML failed: GPU is lost")


async def test_a_hanging_driver_leaves_the_last_figures_with_their_age_until_it_answers_again() -> None:
    now = [100.0]
    nvml = FakeNvml(compute=[(10, 50 * GB)])
    reader = reader_of(nvml, clock=lambda: now[0], limit_s=60)
    assert (await reader.sample({"vllm": {10}})).note is None
    nvml.responds.clear()
    reader._limit_s = 0.02  # of the first sample a thread that starts late is no hanging driver
    fresh = await reader_of(nvml, limit_s=0.02).sample({})
    assert (fresh.gpus, fresh.note) == ([], "no GPU figures yet: the driver does not answer")
    now[0] = 107.0
    for _ in range(2):
        sample = await reader.sample({"vllm": {10}})
        assert sample.note == "GPU figures are 7 s old: the driver does not answer"
        assert sample.gpus[0].by_service == {"vllm": 50 * GB}
        assert sample.gpus[0].stale_s == 7.0
    nvml.responds.set()
    while (sample := await reader.sample({"vllm": {10}})).note is not None:
        pass
    assert sample.gpus[0].stale_s is None
    assert sample.gpus[0].by_service == {"vllm": 50 * GB}


async def test_power_and_temperature_are_in_watts_and_degrees_and_none_without_sensors() -> None:
    [gpu] = (await reader_of(FakeNvml()).sample({})).gpus
    assert (gpu.power_watts, gpu.power_limit_watts, gpu.temperature_celsius) == (512.345, 700.0, 61.0)
    [gpu] = (await reader_of(FakeNvml(has_sensors=False)).sample({})).gpus
    assert (gpu.power_watts, gpu.power_limit_watts, gpu.temperature_celsius) == (None, None, None)


async def test_processes_are_listed_by_service_and_attempt_and_foreign_ones_by_user() -> None:
    us, parent, invisible = os.getpid(), os.getppid(), 2**22 + 1
    nvml = FakeNvml(compute=[(parent, 10 * GB), (us, 50 * GB), (1, 5 * GB), (invisible, 4 * GB)])
    [gpu] = (await GpuReader(lambda: nvml).sample({"vllm": {us}}, {"vllm": 3})).gpus
    ours, stranger, _, hidden = gpu.processes
    assert (ours.pid, ours.service, ours.attempt, ours.memory_bytes) == (us, "vllm", 3, 50 * GB)
    assert "pytest" in ours.command
    user, root = (user_name(uid_of(pid) or 0) for pid in (parent, 1))
    assert (stranger.service, stranger.attempt, stranger.user) == (None, None, user)
    assert (hidden.is_visible, hidden.user, hidden.command) == (False, None, "")
    assert gpu.are_shares_known
    assert (gpu.by_service, gpu.other_bytes) == ({"vllm": 50 * GB}, 30 * GB)
    assert gpu.other_by_user == ({root: 15 * GB} if user == root else {user: 10 * GB, root: 5 * GB})


async def test_a_process_of_another_run_is_known_by_its_marker_and_its_secrets_are_masked() -> None:
    marked = {**os.environ, "GRPO_TUI_RUN": "other-run-1", "GRPO_TUI_SERVICE": "vllm"}
    waiting = "import sys; print('started', flush=True); sys.stdin.read()"
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", waiting, "--api-key", "sk-12345678", env=marked, **pipes
    )
    try:
        assert child.stdout is not None
        await child.stdout.readline()  # in the middle of its exec a process has neither environment nor command line
        nvml = FakeNvml(compute=[(child.pid, 10 * GB)])
        [gpu] = (await GpuReader(lambda: nvml).sample({})).gpus
        [process] = gpu.processes
        assert (process.run, process.service) == ("other-run-1", "vllm")
        assert "--api-key" in process.command
        assert "sk-12345678" not in process.command
    finally:
        await child.communicate(b"")


async def test_mig_instances_are_listed_with_their_processes_and_whole_gpus_in_order() -> None:
    slices = [FakeSlice(1, [(10, 30 * GB)]), FakeSlice(5)]
    [gpu] = (await reader_of(FakeNvml(compute=None, graphics=None, slices=slices)).sample({"vllm": {10}})).gpus
    assert gpu.has_mig
    assert [(each.uuid, each.gpu_instance, each.memory_total_bytes) for each in gpu.mig] == [
        ("MIG-1", 1, 71 * GB),
        ("MIG-5", 5, 71 * GB),
    ]
    assert gpu.by_service == {"vllm": 30 * GB}
    assert gpu.processes[0].gpu_instance == 1
    assert gpu.utilization_percent is None
    plain = (await reader_of(FakeNvml(num_gpus=8)).sample({})).gpus
    assert [(gpu.index, gpu.has_mig, gpu.mig) for gpu in plain] == [(index, False, []) for index in range(8)]


def test_the_real_bindings_have_all_that_is_used() -> None:
    real = load_pynvml()
    used = [name for name in dir(Nvml) if name.startswith("nvml")] + list(Nvml.__annotations__)
    assert len(used) == 28
    assert all(hasattr(real, name) for name in used)


async def test_this_machine_is_read_without_an_exception() -> None:
    sample = await GpuReader().sample({})
    assert sample.gpus or sample.note


async def test_what_connects_two_gpus_is_told_as_far_as_the_driver_says() -> None:
    connected = {(0, 1, 0), (0, 1, 2), (0, 2, 0)}
    assert await reader_of(FakeNvml(num_gpus=3, connected=connected)).links() == {
        (0, 1): "NVLink",
        (0, 2): "PCIe",
        (1, 2): "main memory (no peer access)",
    }
    assert await reader_of(FakeNvml(num_gpus=2, is_old=True)).links() == {}
    assert await reader_of(FakeNvml(init_error=LibraryNotFound())).links() == {}


def test_what_a_private_cluster_has_placed_holds_gpu_memory_for_its_own_service() -> None:
    """On a machine with two GPUs all of them counted as Ray's, and once more as what an agent reported."""
    pids = [frozenset({ProcessId(pid, 1)}) for pid in (1, 7, 20)]
    usage = {
        "ray": Usage(cpu_percent=None, rss_bytes=0, own=pids[0], placed={"vllm": pids[1]}),
        "vllm": Usage(cpu_percent=None, rss_bytes=0, own=pids[2]),
    }
    assert pids_by_service(usage) == {"ray": {1}, "vllm": {7, 20}}


def test_processes_of_a_gpu_are_attributed_to_ranks_and_each_rank_has_its_figures() -> None:
    def part(*pids: int) -> Usage:
        processes = frozenset(ProcessId(pid, 1) for pid in pids)
        return Usage(cpu_percent=10.0 * len(pids), rss_bytes=len(pids) * GB, own=processes)

    usage = {"trainer": replace(part(1, 11, 12, 13), parts={11: part(11, 13), 12: part(12)}), "vllm": part(20)}
    ranks = {"trainer": {11: 0, 12: 1}, "vllm": {}}
    listed = [GpuProcess(pid=pid, service="trainer", memory_bytes=pid * GB) for pid in (11, 13)]
    gpu = GpuStatus(
        index=0,
        uuid="GPU-1",
        name="a card",
        memory_used_bytes=30 * GB,
        memory_total_bytes=80 * GB,
        utilization_percent=None,
        processes=[*listed, GpuProcess(pid=20, service="vllm", memory_bytes=GB)],
    )
    told = with_ranks(gpu, usage, ranks)
    assert [process.rank for process in told.processes] == [0, 0, None]
    first, second = rank_usage("trainer", usage, ranks["trainer"], [told])
    assert (first.rank, first.cpu_percent, first.rss_bytes, first.gpu_memory_bytes) == (0, 20.0, 2 * GB, 24 * GB)
    assert (second.rank, second.cpu_percent, second.rss_bytes, second.gpu_memory_bytes) == (1, 10.0, GB, None)
