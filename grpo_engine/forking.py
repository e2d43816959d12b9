"""Whether this process can be forked safely: while it has one thread and has not initialised CUDA."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import MutableMapping
from pathlib import Path

_FORK_SAFE_THREAD = re.compile(r"cuda[0-9a-f]{11}|jemalloc_bg_thd")
"""The thread that NVML leaves after it was asked for the GPUs (driver 580), which waits for events and holds no lock;
and jemalloc's, which jemalloc ends before a fork and starts on both sides after it."""
_CUDA_DRIVER, _CUDA_NOT_INITIALIZED = "libcuda.so.1", 3


def keep_forkable(environment: MutableMapping[str, str]) -> None:
    """Set the variables under which imports start no thread and leave CUDA alone; to be called before them."""
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's OpenBLAS starts its threads when it is imported
    # Else torch initialises CUDA when it is asked whether there is a GPU, as modules of inductor do.
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def why_unforkable() -> str | None:
    """Why a fork of this process might hang or fail, as a sentence; None where it is safe."""
    others = [_thread_name(task) for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    names = sorted(name for name in others if not _FORK_SAFE_THREAD.fullmatch(name))
    if names:
        return f"importing left {len(names)} threads behind ({', '.join(names)}), with which a fork may hang"
    if has_cuda(_loaded_cuda_driver()):
        return "importing initialised CUDA, which does not survive a fork"
    return None


def has_cuda(driver: ctypes.CDLL | None) -> bool:
    """Whether CUDA was initialised in this process, according to the driver library, if it is loaded."""
    return driver is not None and driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_NOT_INITIALIZED


def _loaded_cuda_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_CUDA_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # not loaded
        return None


def _thread_name(task: Path) -> str:
    return (task / "comm").read_text(errors="replace").strip()
