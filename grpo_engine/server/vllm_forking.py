"""Changes to vLLM without which its processes would pay again for what their standby has done: imports, collections."""

from __future__ import annotations

import gc
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


def keep_imports_frozen() -> None:
    """Leave what a standby has imported out of every garbage collection of the processes that it forks.

    Breaks: restarts within seconds. vLLM unfreezes the heap after capturing graphs and before it ends, and collects
    then: 0.6 to 0.9 s on a slow core for 0.7 million objects of modules, each time, and their pages are copied.
    When: processes that are forked. What vLLM froze itself, its engine after the start, stays frozen too: it is no
    garbage as long as the process lives. Versions: 0.26 to 0.33.
    Upstream: https://github.com/vllm-project/vllm, `vllm/distributed/parallel_state.py`, `cleanup_dist_env_and_memory`,
    and `vllm/v1/worker/gpu_model_runner.py`, `capture_model`.
    """
    gc.unfreeze = _leave_frozen


def _leave_frozen() -> None:
    return None
