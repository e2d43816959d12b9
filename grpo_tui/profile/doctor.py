"""Checks before a start: of the machine, and of one profile on it. Each finding says what to do.

Reads only; starts, ends and downloads nothing. GPUs and holders of ports come in as arguments. Checks of GPU software
are in `doctor_gpu`, those of models and checkpoints in `doctor_model`, those of several ranks in `doctor_ranks`.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_engine.diagnosis.finding import Finding, Severity
from grpo_engine.installed import installed_version
from grpo_tui.profile import mps
from grpo_tui.profile.doctor_gpu import examine_software
from grpo_tui.profile.doctor_model import examine_model
from grpo_tui.profile.doctor_ranks import Links, examine_ranks
from grpo_tui.profile.loaded import LoadedProfile
from grpo_tui.profile.plan import Plan
from grpo_tui.profile.start_checks import needs_of
from grpo_tui.services.base import Launch
from grpo_tui.services.inference import Inference
from grpo_tui.services.visible_gpus import gpus_of

GIB = 1 << 30
ENOUGH_DISK_BYTES = 5 * GIB
ENOUGH_OPEN_FILES = 1024
START_ENDS = "a start ends these stale processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU, as NVML reports it."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    uuid: str = ""
    holders: Sequence[str] = ()
    """Processes that hold its memory, one sentence each."""
    left_over_bytes: int = 0
    """Memory held by stale processes, which a start ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine, as the caller has examined it."""

    gpus: Sequence[GpuFacts]
    gpu_note: str | None
    """Why no GPU is visible."""
    driver: str | None = None
    """Version of the NVIDIA driver, where one is loaded."""
    port_holders: Callable[[Sequence[int]], Sequence[str]]
    """Processes that listen on these ports, one sentence each; stale ones left out."""
    port_leftovers: Callable[[Sequence[int]], Sequence[str]] = lambda ports: ()
    """Stale processes that listen on these ports, one sentence each."""
    mps_refusal: Callable[[Sequence[int]], str | None] = lambda gpus: None
    """Why MPS cannot use one of these GPUs."""
    links: Links = field(default_factory=dict)
    """What connects the GPUs, as far as the driver says."""


def examine(machine: Machine, loaded: LoadedProfile | None, plan: Plan | None, logs: Path) -> list[Finding]:
    """Every finding, the machine's first."""
    findings = [*_python(), *_gpus(machine), *_room(logs), *_limits()]
    if loaded is not None and plan is not None:
        findings += [
            *_needs(loaded),
            *examine_software(loaded.profile, machine.driver, installed_version),
        ]
        findings += [*_ports(machine, plan), *_gpu_use(machine, loaded, plan), *_mps(machine, plan)]
        gpus = [gpu.index for gpu in machine.gpus]
        findings += examine_ranks(loaded.profile, plan, gpus, machine.links, machine.port_holders)
        findings += examine_model(loaded.profile, logs)
    return findings


def _python() -> Iterator[Finding]:
    yield Finding(id="python", severity="ok", text=f"Python {platform.python_version()} on {platform.system()}")
    if platform.system() != "Linux":
        yield Finding(
            id="system",
            severity="error",
            text=f"{platform.system()} has no /proc, which keepers and teardown need",
            hint="run on Linux; the screen works over SSH",
        )


def _gpus(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        text = machine.gpu_note or "no GPU"
        yield Finding(id="gpu", severity="warning", text=text, hint="the tiny-… profiles and smollm-cpu need none")
    for gpu in machine.gpus:
        text = f"{gpu.index}: {gpu.name}, {gpu.free_bytes / 1e9:.0f} of {gpu.total_bytes / 1e9:.0f} GB free"
        yield Finding(id="gpu", severity="ok", text=text)


def _room(logs: Path) -> Iterator[Finding]:
    folder = logs if logs.is_dir() else Path.cwd()
    free = shutil.disk_usage(folder).free
    severity: Severity = "ok" if free >= ENOUGH_DISK_BYTES else "error"
    hint = "" if severity == "ok" else f"free some: logs and checkpoints go to {folder.resolve()}"
    yield Finding(id="disk", severity=severity, text=f"{free / 1e9:.0f} GB free for logs and checkpoints", hint=hint)
    if not os.access(folder, os.W_OK):
        yield Finding(
            id="disk", severity="error", text=f"{folder.resolve()} is not writable", hint="start in a folder of yours"
        )
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        yield Finding(id="shared memory", severity="ok" if free > GIB else "warning", text=f"{free / 1e9:.1f} GB free")


def _limits() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < ENOUGH_OPEN_FILES:
        yield Finding(
            id="open files",
            severity="error",
            text=f"at most {soft} open files per process",
            hint=f"ulimit -n {ENOUGH_OPEN_FILES * 8}",
        )


def _needs(loaded: LoadedProfile) -> Iterator[Finding]:
    """What a start would refuse, by the setting that asks for it, and what is there."""
    for need in needs_of(loaded):
        if need.is_met:
            yield Finding(id=need.id, severity="warning" if need.hint else "ok", text=need.text, hint=need.hint)
        else:
            yield Finding(id=need.id, severity="error", text=f"{need.key}: {need.text}", hint=need.hint)


def _ports(machine: Machine, plan: Plan) -> Iterator[Finding]:
    ports = [port for launch in plan.launches for port in launch.ports]
    holders, leftovers = machine.port_holders(ports), machine.port_leftovers(ports)
    for words in leftovers:
        yield Finding(id="port", severity="warning", text=words, hint=START_ENDS)
    for words in holders:
        yield Finding(id="port", severity="error", text=words, hint="end it, or start with --new on a free port")
    if ports and not holders and not leftovers:
        yield Finding(id="port", severity="ok", text=f"{', '.join(map(str, ports))} free")


def _gpu_use(machine: Machine, loaded: LoadedProfile, plan: Plan) -> Iterator[Finding]:
    indices = {gpu.index: gpu for gpu in machine.gpus}
    if not indices:
        services = loaded.profile.services
        wanting = [launch.name for launch in plan.launches if _wants_gpu(launch, services.get(launch.name))]
        if wanting:
            yield Finding(
                id="gpu",
                severity="error",
                text=f"{' and '.join(wanting)}: set to run on a GPU, but none is visible",
                hint="choose a profile for the CPU (tiny-cpu, smollm-cpu), or check why `nvidia-smi` lists none",
            )
        return
    for launch in plan.launches:
        for index in launch.gpus:
            if index not in indices:
                yield Finding(
                    id="gpu",
                    severity="error",
                    text=f"{launch.name} uses GPU {index}, which does not exist",
                    hint=f"--set {launch.settings}.gpus=[…]",
                )
        yield from _gpu_room(launch, indices)


def _mps(machine: Machine, plan: Plan) -> Iterator[Finding]:
    """Whether services that share a GPU compute at the same time."""
    for note in plan.notes:
        yield Finding(id="mps", severity="warning", text=note)
    daemon = next((launch for launch in plan.launches if launch.kind == mps.NAME), None)
    if daemon is None:
        return
    names = " and ".join(daemon.followers)
    gpus = sorted({gpu for launch in plan.launches if launch.name in daemon.followers for gpu in launch.gpus})
    if (why := machine.mps_refusal(gpus)) is not None:
        yield Finding(id="mps", severity="warning", text=f"{names} share a GPU without MPS: {why}")
    else:
        yield Finding(id="mps", severity="ok", text=f"{names} share a GPU with MPS; its daemon starts with the run")


def _wants_gpu(launch: Launch, service: object) -> bool:
    runs_vllm = isinstance(service, Inference) and service.engine == "vllm" and service.device != "cpu"
    return bool(launch.gpus) or runs_vllm


def _gpu_room(launch: Launch, gpus: Mapping[int, GpuFacts]) -> Iterator[Finding]:
    """Whether each GPU of a launch has the memory free that it plans, and which processes hold the rest."""
    for gpu in (gpus[index] for index in gpus_of(launch, {gpu.index: gpu.uuid for gpu in gpus.values()})):
        share = launch.gpu_share_of(gpu.total_bytes)
        if share is None or gpu.free_bytes >= (needed_bytes := share * gpu.total_bytes):
            continue
        held = "".join(f"; {words}" for words in gpu.holders)
        text = (
            f"{launch.name} needs {share:.0%} of GPU {gpu.index} ({needed_bytes / 1e9:.1f} GB), "
            f"{gpu.free_bytes / 1e9:.1f} GB are free{held}"
        )
        if gpu.free_bytes + gpu.left_over_bytes >= needed_bytes:
            yield Finding(id="gpu", severity="warning", text=text, hint=START_ENDS)
        else:
            key = "gpu_memory_utilization" if launch.kind == "inference" else "gpu_memory_share"
            key = key if launch.gpu_memory_bytes is None else "gpu_memory_gb"
            hint = f"free the GPU, or --set {launch.settings}.{key}=…"
            yield Finding(id="gpu", severity="error", text=text, hint=hint)
