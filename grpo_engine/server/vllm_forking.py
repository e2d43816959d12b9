"""Having vLLM's CPU build fork its processes, as it does elsewhere: imports are then paid for once."""

from __future__ import annotations

import os
from typing import Any

METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
_PATCHED = "_grpo_forks"


def fork_cpu_engine() -> None:
    """Have the engine core and its worker be forks on a CPU too, where threads are not bound to cores.

    Breaks: restarts within seconds. Its platform sets `VLLM_WORKER_MULTIPROC_METHOD=spawn` for every configuration, so
    that each of the two processes imports everything again, 7 to 14 s each.
    When: CPU platform. A fork has its parent's OpenMP, which must not have run before, and takes no binding of threads
    from the environment; so this is for `VLLM_CPU_OMP_THREADS_BIND=nobind`. Versions: 0.26 to 0.33.
    Upstream: https://github.com/vllm-project/vllm, `vllm/platforms/cpu.py`, `check_and_update_config`; there is no
    setting for it.
    """
    from vllm.platforms.cpu import CpuPlatform

    if getattr(CpuPlatform, _PATCHED, False):
        return
    original = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        original(vllm_config)
        os.environ[METHOD_VARIABLE] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    setattr(CpuPlatform, _PATCHED, True)
