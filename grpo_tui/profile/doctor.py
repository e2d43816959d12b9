"""Checks before a start: of the machine, and of one profile on it. Each finding says what to do.

Looks only; starts, ends and downloads nothing. What other rooms know (who holds a port, what the GPUs are) comes in as
arguments.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_tui.profile.loading import LoadedProfile
from grpo_tui.profile.plan import Plan
from grpo_tui.services.environment import Environment
from grpo_tui.services.inference import Inference
from grpo_tui.services.trainer import Trainer

GIB = 1 << 30
ENOUGH_DISK_BYTES = 5 * GIB
ENOUGH_OPEN_FILES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: how it went, in words, and what to do when it did not go well."""

    check: str
    level: Literal["ok", "note", "problem"]
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """What NVML says about one GPU."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the doctor is told about the machine."""

    gpus: Sequence[GpuFacts]
    gpu_note: str | None
    """Why there are no GPUs to see."""
    port_holders: Callable[[Sequence[int]], Sequence[str]]
    """Who listens on these ports, one sentence each."""


def examine(machine: Machine, loaded: LoadedProfile | None, plan: Plan | None, logs: Path) -> list[Finding]:
    """Every finding, the machine's first."""
    findings = [*_python(), *_gpus(machine), *_room(logs), *_limits()]
    if loaded is not None and plan is not None:
        findings += [*_packages(loaded), *_ports(machine, plan), *_gpu_use(machine, loaded, plan), *_model(loaded)]
    return findings


def _python() -> Iterator[Finding]:
    yield Finding(check="python", level="ok", text=f"Python {platform.python_version()} on {platform.system()}")
    if platform.system() != "Linux":
        yield Finding(
            check="system",
            level="problem",
            text=f"{platform.system()} has no /proc, which keepers and teardown rely on",
            hint="run on Linux; the screen works over SSH",
        )


def _gpus(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        text = machine.gpu_note or "no GPU"
        yield Finding(check="gpu", level="note", text=text, hint="profiles ending in -cpu need none")
    for gpu in machine.gpus:
        text = f"{gpu.index}: {gpu.name}, {gpu.free_bytes / GIB:.0f} of {gpu.total_bytes / GIB:.0f} GiB free"
        yield Finding(check="gpu", level="ok", text=text)


def _room(logs: Path) -> Iterator[Finding]:
    folder = logs if logs.is_dir() else Path.cwd()
    free = shutil.disk_usage(folder).free
    level: Literal["ok", "problem"] = "ok" if free >= ENOUGH_DISK_BYTES else "problem"
    hint = "" if level == "ok" else f"free some: logs and checkpoints go to {folder.resolve()}"
    yield Finding(check="disk", level=level, text=f"{free / GIB:.0f} GiB free for logs and checkpoints", hint=hint)
    if not os.access(folder, os.W_OK):
        yield Finding(
            check="disk", level="problem", text=f"{folder.resolve()} is not writable", hint="start in a folder of yours"
        )
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        yield Finding(check="shared memory", level="ok" if free > GIB else "note", text=f"{free / GIB:.1f} GiB free")


def _limits() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < ENOUGH_OPEN_FILES:
        yield Finding(
            check="open files",
            level="problem",
            text=f"at most {soft} open files a process",
            hint=f"ulimit -n {ENOUGH_OPEN_FILES * 8}",
        )


def _packages(loaded: LoadedProfile) -> Iterator[Finding]:
    services = loaded.profile.services.values()
    wanted: dict[str, str] = {}
    if any(isinstance(s, Inference | Trainer) for s in services):
        wanted |= {"torch": "pip install torch", "transformers": "pip install transformers"}
    if any(isinstance(s, Inference) and s.engine == "vllm" for s in services):
        wanted["vllm"] = "pip install 'grpo-tui[vllm]', or set services.vllm.engine=torch"
    if any(isinstance(s, Trainer) and s.optimizer == "adamw_8bit" for s in services):
        wanted["bitsandbytes"] = "pip install bitsandbytes, or set services.trainer.optimizer=adamw"
    if any(isinstance(s, Environment) and s.task.name == "reasoning_gym" for s in services):
        wanted["reasoning_gym"] = "pip install 'grpo-tui[data]'"
    if any(isinstance(s, Environment) and s.task.name in {"gsm8k", "jsonl"} for s in services):
        wanted["math_verify"] = "pip install 'grpo-tui[data]'"
    if any(isinstance(s, Environment) and s.task.name == "gsm8k" and s.task.path is None for s in services):
        wanted["datasets"] = "pip install 'grpo-tui[data]', or give services.env.task.path"
    if any(isinstance(s, Trainer) and s.use_wandb for s in services):
        wanted["wandb"] = "pip install 'grpo-tui[trackers]'"
    for package, remedy in wanted.items():
        if importlib.util.find_spec(package) is None:
            yield Finding(check="package", level="problem", text=f"{package} is not installed", hint=remedy)
        else:
            yield Finding(check="package", level="ok", text=package)


def _ports(machine: Machine, plan: Plan) -> Iterator[Finding]:
    ports = [port for launch in plan.launches for port in launch.ports]
    holders = machine.port_holders(ports)
    for words in holders:
        yield Finding(check="port", level="problem", text=words, hint="end it, or choose another with --set services.…")
    if ports and not holders:
        yield Finding(check="port", level="ok", text=f"{', '.join(map(str, ports))} free")


def _gpu_use(machine: Machine, loaded: LoadedProfile, plan: Plan) -> Iterator[Finding]:
    indices = {gpu.index: gpu for gpu in machine.gpus}
    for launch in plan.launches:
        for index in launch.gpus:
            if index not in indices:
                yield Finding(
                    check="gpu",
                    level="problem",
                    text=f"{launch.name} wants GPU {index}, which is not here",
                    hint=f"--set services.{launch.name}.gpus=[…]",
                )
    for name, service in loaded.profile.services.items():
        if not isinstance(service, Inference) or service.engine != "vllm" or service.device == "cpu":
            continue
        for index in service.gpus or tuple(indices)[:1]:
            gpu = indices.get(index)
            if gpu and gpu.free_bytes < service.gpu_memory_utilization * gpu.total_bytes:
                yield Finding(
                    check="gpu",
                    level="problem",
                    text=(
                        f"{name} wants {service.gpu_memory_utilization:.0%} of GPU {index} "
                        f"({service.gpu_memory_utilization * gpu.total_bytes / GIB:.0f} GiB), "
                        f"{gpu.free_bytes / GIB:.0f} GiB are free"
                    ),
                    hint=f"free the GPU, or --set services.{name}.gpu_memory_utilization=…",
                )
        if not indices:
            yield Finding(
                check="gpu",
                level="problem",
                text=f"{name} runs vLLM on a GPU, and there is none to see",
                hint="choose a profile for the CPU (tiny-cpu, smollm-cpu)",
            )


def _model(loaded: LoadedProfile) -> Iterator[Finding]:
    model = loaded.profile.model
    if model is None:
        return
    offline = os.environ.get("HF_HUB_OFFLINE") == "1"
    if not Path(model.name).exists() and not model.name.startswith("local/"):
        cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")) / "hub"
        cached = (cache / f"models--{model.name.replace('/', '--')}").is_dir()
        if cached:
            yield Finding(check="model", level="ok", text=f"{model.name} is in the hub's cache")
        else:
            level: Literal["problem", "note"] = "problem" if offline else "note"
            hint = "unset HF_HUB_OFFLINE or give a folder" if offline else "it is downloaded at the first start"
            yield Finding(check="model", level=level, text=f"{model.name} is not in the hub's cache", hint=hint)
    else:
        yield Finding(check="model", level="ok", text=model.name)
