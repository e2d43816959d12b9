"""What is installed on this machine: packages, and drivers of GPUs. Reads files; imports nothing and asks no driver."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

_GPU_DRIVERS = ("/proc/driver/nvidia/version", "/dev/dxg", "/dev/kfd", "/dev/nvmap")
"""Of NVIDIA, WSL, AMD and Tegra: each is there while a driver is loaded, also where no program has used it yet."""


def is_installed(module: str) -> bool:
    """Whether a module can be imported; a folder of its name without code, such as `./wandb`, does not count."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, without its local part (`+cu130`)."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def has_gpu_driver() -> bool:
    """Whether torch may find a GPU; asks no driver, which takes seconds where it has to wake the GPUs."""
    return any(Path(file).exists() for file in _GPU_DRIVERS)


def is_on_cpu(device: str) -> bool:
    """Whether a setting of a device means the CPU, as far as that is known without torch."""
    return device == "cpu" or (device == "auto" and not has_gpu_driver())
