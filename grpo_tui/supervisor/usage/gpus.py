"""GPUs as NVML reports them, with the memory of each service; read in a thread, since a driver may hang.

No GPU, no driver, a hanging driver, or one that lists no processes: all are ordinary, each has its own note, and none
raises. Unknown is None, never 0. NVML is loaded with the first sample, not with this module.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from grpo_engine.wire.supervisor import GpuProcess, GpuStatus, MigInstance
from grpo_tui.supervisor.keeper import proc

LIMIT_S = 2.0
"""How long a sample waits for the driver before it returns older figures."""
RETRY_S = 60.0
"""After NVML failed: a driver is rarely installed during a run, and loading NVML costs milliseconds."""
MAX_COMMAND_CHARS = 200
P2P_READ = 0
"""The driver's number of the capability; in `pynvml` a stray comma makes it a tuple."""
Result = TypeVar("Result")
NO_INSTANCE = 0xFFFFFFFF
"""The driver's value for a process without a MIG instance."""


class Nvml(Protocol):
    """The functions of `pynvml` that are used here; its handles and return values are untyped."""

    NVMLError: type[Exception]
    NVMLError_LibraryNotFound: type[Exception]
    NVMLError_DriverNotLoaded: type[Exception]
    NVMLError_NotSupported: type[Exception]
    NVMLError_FunctionNotFound: type[Exception]
    NVMLError_NoPermission: type[Exception]
    nvmlMemory_v2: int
    """Version of the memory figures that separates used memory from what the driver reserves."""
    NVML_TEMPERATURE_GPU: int
    NVML_DEVICE_MIG_ENABLE: int
    NVML_P2P_CAPS_INDEX_NVLINK: int
    NVML_P2P_STATUS_OK: int

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetName(self, handle: Any) -> str: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Sequence[Any]: ...
    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> Sequence[Any]: ...
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int: ...
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...
    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int: ...
    def nvmlDeviceGetP2PStatus(self, handle: Any, other: Any, capability: int) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """The GPUs at one moment."""

    gpus: list[GpuStatus]
    note: str | None
    """Why there are none, or why the figures are old or incomplete; None otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """The memory of one GPU at one moment, by process as far as the driver reports it."""

    index: int
    uuid: str
    name: str
    free_bytes: int
    used_bytes: int
    bytes_by_pid: Mapping[int, int | None]
    """Empty when the driver lists no processes; None for a process whose share it withholds."""

    @property
    def usable_bytes(self) -> int:
        """What programs can use; the driver reserves a little of the card's total."""
        return self.free_bytes + self.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    """A listed process, as /proc shows it."""

    user: str | None
    command: str
    marker: proc.Marker | None
    gpu_instance: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """One GPU as read, before its memory is divided among services."""

    index: int
    uuid: str
    name: str
    used_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None
    utilization_percent: float | None
    bytes_by_pid: Mapping[int, int | None] | None
    """None when the driver lists no processes; None for a process whose share it withholds."""
    holders: Mapping[int, _Holder]
    """The listed processes, visible or not."""
    power_watts: float | None
    power_limit_watts: float | None
    temperature_celsius: float | None
    mig: Sequence[MigInstance] | None
    """None where MIG is off or unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    devices: Sequence[_Device]
    failure: str | None
    read_at: float


def load_pynvml() -> Nvml:
    """The real NVML bindings."""
    import pynvml

    return pynvml  # type: ignore[no-any-return]


class GpuReader:
    """Samples all GPUs; concurrent callers share one reading."""

    def __init__(
        self,
        load: Callable[[], Nvml] = load_pynvml,
        *,
        limit_s: float = LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
        is_visible: Callable[[int], bool] = lambda pid: os.path.exists(f"/proc/{pid}"),
    ) -> None:
        self._load = load
        self._limit_s = limit_s
        self._clock = clock
        self._is_visible = is_visible
        self._nvml: Nvml | None = None
        self._last = _Reading(devices=(), failure=None, read_at=clock())
        self._pending: asyncio.Future[_Reading] | None = None
        self._is_late = False

    async def sample(
        self, pids_by_service: Mapping[str, Set[int]], attempts: Mapping[str, int] = MappingProxyType({})
    ) -> GpuSample:
        """The GPUs now, or the last reading with a note of its age; `attempts` are by service."""
        await self._refresh(0 if self._is_late else self._limit_s)
        return self._sample(pids_by_service, attempts)

    async def memory(self, limit_s: float = LIMIT_S) -> list[GpuMemory]:
        """The memory of each GPU by process; empty when there is no driver, or it does not answer in time."""
        await self._refresh(limit_s)
        if self._is_late:
            return []
        return [
            GpuMemory(
                index=device.index,
                uuid=device.uuid,
                name=device.name,
                free_bytes=device.free_bytes,
                used_bytes=device.used_bytes,
                bytes_by_pid=device.bytes_by_pid or {},
            )
            for device in self._last.devices
            if device.free_bytes is not None and device.used_bytes is not None
        ]

    async def links(self, limit_s: float = LIMIT_S) -> dict[tuple[int, int], str]:
        """What connects each two GPUs, by their numbers; empty when there is no driver, or it does not answer."""
        await self._refresh(limit_s)
        nvml = self._nvml
        if self._is_late or nvml is None:
            return {}
        pairs = list(itertools.combinations((device.index for device in self._last.devices), 2))
        reading = asyncio.wrap_future(_in_daemon_thread(lambda: _read_links(nvml, pairs)))
        await asyncio.wait({reading}, timeout=limit_s)
        return reading.result() if reading.done() else {}

    async def _refresh(self, limit_s: float) -> None:
        """Start a reading unless one is pending, and wait for it until the limit."""
        if self._pending is None and (self._last.failure is None or self._clock() - self._last.read_at >= RETRY_S):
            self._pending = asyncio.wrap_future(_in_daemon_thread(self._read))
        pending = self._pending
        if pending is not None:
            await asyncio.wait({pending}, timeout=limit_s)
            self._is_late = not pending.done()
            if pending.done():
                self._last = pending.result()
                self._pending = None if self._pending is pending else self._pending

    def _sample(self, pids_by_service: Mapping[str, Set[int]], attempts: Mapping[str, int]) -> GpuSample:
        last = self._last
        ours = frozenset().union(*pids_by_service.values())
        note = last.failure
        if self._is_late:
            age = f"GPU figures are {self._clock() - last.read_at:.0f} s old" if last.devices else "no GPU figures yet"
            note = f"{age}: the driver does not answer"
        elif any(self._hides_processes(device, ours) for device in last.devices):
            note = "GPU memory by service is unknown: the driver does not report which process uses how much"
        gpus = [self._attributed(device, pids_by_service, attempts) for device in last.devices]
        return GpuSample(gpus=gpus, note=note)

    def _attributed(
        self, device: _Device, pids_by_service: Mapping[str, Set[int]], attempts: Mapping[str, int]
    ) -> GpuStatus:
        """One GPU with its memory attributed to services, unless shares are unknown."""
        ours = frozenset().union(*pids_by_service.values())
        by_service: dict[str, int] = {}
        by_user: dict[str, int] = {}
        other_bytes = None
        if device.bytes_by_pid is not None and not self._hides_processes(device, ours):
            for service, pids in pids_by_service.items():
                shares = [share for pid, share in device.bytes_by_pid.items() if pid in pids and share is not None]
                if shares:
                    by_service[service] = sum(shares)
            for pid, holder in device.holders.items():
                share = device.bytes_by_pid[pid]
                if pid not in ours and holder.user is not None and share is not None:
                    by_user[holder.user] = by_user.get(holder.user, 0) + share
            if device.used_bytes is not None:
                other_bytes = max(0, device.used_bytes - sum(by_service.values()))
        return GpuStatus(
            index=device.index,
            uuid=device.uuid,
            name=device.name,
            memory_used_bytes=device.used_bytes,
            memory_total_bytes=device.total_bytes,
            utilization_percent=device.utilization_percent,
            by_service=by_service,
            other_bytes=other_bytes,
            other_by_user=by_user,
            power_watts=device.power_watts,
            power_limit_watts=device.power_limit_watts,
            temperature_celsius=device.temperature_celsius,
            processes=self._processes(device, pids_by_service, attempts),
            are_shares_known=not self._hides_processes(device, ours),
            has_mig=device.mig is not None,
            mig=list(device.mig or ()),
            stale_s=self._clock() - self._last.read_at if self._is_late else None,
        )

    def _processes(
        self, device: _Device, pids_by_service: Mapping[str, Set[int]], attempts: Mapping[str, int]
    ) -> list[GpuProcess]:
        """The listed processes, largest share first."""
        service_of = {pid: service for service, pids in pids_by_service.items() for pid in pids}
        listed = []
        for pid, share in (device.bytes_by_pid or {}).items():
            holder = device.holders[pid]
            service = service_of.get(pid)
            marker = holder.marker if service is None else None
            listed.append(
                GpuProcess(
                    pid=pid,
                    is_visible=service is not None or self._is_visible(pid),
                    command=holder.command,
                    user=holder.user,
                    service=service or (marker and marker.service),
                    attempt=None if service is None else attempts.get(service),
                    run=marker and marker.run,
                    memory_bytes=share,
                    gpu_instance=holder.gpu_instance,
                )
            )
        return sorted(listed, key=lambda each: (-(each.memory_bytes or 0), each.pid))

    def _hides_processes(self, device: _Device, ours: Set[int]) -> bool:
        """Whether shares are unknown: some are withheld, or all pids belong to another pid namespace.

        A process that has exited while the driver still frees its memory is listed and not visible.
        """
        listed = device.bytes_by_pid
        if listed is None:
            return True
        return None in listed.values() or (
            bool(listed) and not any(pid in ours or self._is_visible(pid) for pid in listed)
        )

    # --- in the thread ---------------------------------------------------------------------------------------------

    def _read(self) -> _Reading:
        try:
            nvml = self._nvml or self._load()
        except ImportError:
            return self._failed("GPU figures need the package nvidia-ml-py")
        try:
            if self._nvml is None:
                nvml.nvmlInit()
                self._nvml = nvml
            devices = [_read_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
            return self._failed("no NVIDIA driver")
        except (nvml.NVMLError, OSError) as error:  # OSError: /proc cannot be read
            return self._failed(f"NVML failed: {error}")
        return _Reading(devices=devices, failure=None, read_at=self._clock())

    def _failed(self, words: str) -> _Reading:
        self._nvml = None  # the next attempt loads NVML again, as needed after a driver update
        return _Reading(devices=(), failure=words, read_at=self._clock())


def _read_links(nvml: Nvml, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """Pairs of which the driver does not say it are left out."""
    links: dict[tuple[int, int], str] = {}
    for first, second in pairs:
        with suppress(nvml.NVMLError):
            one, other = (nvml.nvmlDeviceGetHandleByIndex(index) for index in (first, second))
            if nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
                links[first, second] = "NVLink"
            elif nvml.nvmlDeviceGetP2PStatus(one, other, P2P_READ) == nvml.NVML_P2P_STATUS_OK:
                links[first, second] = "PCIe"
            else:
                links[first, second] = "main memory (no peer access)"
    return links


def _read_device(nvml: Nvml, index: int) -> _Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _if_supported(nvml, functools.partial(_memory, nvml), handle)
    rates = _if_supported(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    mig_handles = _mig_handles(nvml, handle)
    listed = _Listed()
    for each in (handle, *(mig_handles or ())):  # without privileges MIG lists processes only per instance
        listed.add(_if_supported(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, each))
        listed.add(_if_supported(nvml, nvml.nvmlDeviceGetGraphicsRunningProcesses, each))
    watts = _if_supported(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    most_watts = _if_supported(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    celsius = _if_supported(nvml, lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU), handle)
    return _Device(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        used_bytes=None if memory is None else int(memory.used),
        free_bytes=None if memory is None else int(memory.free),
        total_bytes=None if memory is None else int(memory.total),
        utilization_percent=None if rates is None else float(rates.gpu),
        bytes_by_pid=listed.bytes_by_pid if listed.is_reported else None,
        holders={pid: _holder(pid, listed.instances.get(pid)) for pid in listed.bytes_by_pid},
        power_watts=None if watts is None else watts / 1000,
        power_limit_watts=None if most_watts is None else most_watts / 1000,
        temperature_celsius=None if celsius is None else float(celsius),
        mig=None if mig_handles is None else [_mig_instance(nvml, each) for each in mig_handles],
    )


@dataclass(slots=True)
class _Listed:
    """Processes of a GPU from several lists; a process in two lists has the same memory in both."""

    bytes_by_pid: dict[int, int | None] = field(default_factory=dict)
    instances: dict[int, int] = field(default_factory=dict)
    is_reported: bool = False

    def add(self, processes: Iterable[Any] | None) -> None:
        """Add a list; None is one that the driver does not report."""
        self.is_reported = self.is_reported or processes is not None
        for process in processes or ():
            known = self.bytes_by_pid.get(process.pid)
            used = None if process.usedGpuMemory is None else int(process.usedGpuMemory)
            self.bytes_by_pid[process.pid] = used if known is None else max(known, used or 0)
            instance = getattr(process, "gpuInstanceId", None)  # unknown to drivers before 450
            if instance is not None and instance != NO_INSTANCE:
                self.instances[process.pid] = int(instance)


def _holder(pid: int, gpu_instance: int | None) -> _Holder:
    """Read a process from /proc; in the thread, since a user directory (LDAP) may be slow."""
    uid = proc.uid_of(pid)
    if uid is None:
        return _Holder(user=None, command="", marker=None, gpu_instance=gpu_instance)
    return _Holder(user=proc.user_name(uid), command=_command(pid), marker=proc.marker(pid), gpu_instance=gpu_instance)


def _command(pid: int) -> str:
    line = proc.command_line(pid)
    argv = [line] if line.startswith("[") else shlex.split(line)
    command = argv[0] if len(argv) == 1 else line  # the process title that vLLM sets is one word
    return command if len(command) <= MAX_COMMAND_CHARS else command[: MAX_COMMAND_CHARS - 1] + "…"


def _mig_handles(nvml: Nvml, handle: Any) -> list[Any] | None:
    """Handles of the MIG instances; None where MIG is off."""
    mode = _if_supported(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    found = []
    for number in range(_if_supported(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        with suppress(nvml.NVMLError):  # numbers have gaps
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
    return found


def _mig_instance(nvml: Nvml, handle: Any) -> MigInstance:
    memory = _if_supported(nvml, functools.partial(_memory, nvml), handle)
    return MigInstance(
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        gpu_instance=_if_supported(nvml, nvml.nvmlDeviceGetGpuInstanceId, handle),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
    )


def _memory(nvml: Nvml, handle: Any) -> Any:
    """Memory figures as nvidia-smi shows them: an idle H200 uses 0 bytes, not the 0.6 GB that its driver reserves."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError_FunctionNotFound:  # drivers before 510
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _if_supported(nvml: Nvml, function: Callable[[Any], Any], handle: Any) -> Any:
    """The result of a query; None where the driver or GPU does not support it, or permission is missing."""
    try:
        return function(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
        return None


def _in_daemon_thread(function: Callable[[], Result]) -> Future[Result]:
    """Run it in a thread that does not keep the process alive: a hanging driver must not block the exit."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # any exception is raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=run, name="nvml", daemon=True).start()
    return future
