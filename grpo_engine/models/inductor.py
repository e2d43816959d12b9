"""What inductor loads before the first compilation of a process, and the processes in which it compiles."""

from __future__ import annotations

import importlib
import signal
from functools import cache
from typing import Any

_MODULES = (
    *("torch._dynamo.backends.inductor", "torch._inductor.compile_fx", "torch._inductor.async_compile"),
    *("torch._inductor.codegen.cuda_combined_scheduling", "sympy.tensor.tensor"),
)
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})


def import_inductor(*, is_cpu: bool) -> None:
    """Load and compute it ahead, also where the cache has all kernels; touches no GPU and starts no thread."""
    for name in _MODULES:
        importlib.import_module(name)
    compute_keys(is_cpu=is_cpu)


def compute_keys(*, is_cpu: bool) -> None:
    """Fill inductor's in-process caches: hashes of the sources of torch and triton, and the CPU's vector features."""
    from torch._inductor import codecache
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.runtime import triton_compat

    codecache.torch_key()
    if triton_compat.HAS_TRITON:
        triton_compat.triton_key()
    if hasattr(codecache, "triton_key"):  # cached there from torch 2.13 on
        codecache.triton_key()
    if is_cpu:
        pick_vec_isa()


@cache
def shield_compilers() -> None:
    """Have the processes in which inductor compiles outlive a stop signal to the process group.

    They end after this one, when what they compile is done: they ignore torch's own SIGTERM too.

    Torch waits without end for one that has exited: a trainer that was stopped while it compiled did not finish its
    step, and was killed after its grace (torch 2.11 and 2.13, `torch/_inductor/compile_worker/subproc_pool.py`).
    """
    from torch._inductor.async_compile import AsyncCompile

    start: Any = AsyncCompile.process_pool

    def process_pool() -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # a process inherits it
        try:
            return start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    process_pool.cache_clear = start.cache_clear  # type: ignore[attr-defined]  # called by torch in a fork
    AsyncCompile.process_pool = staticmethod(process_pool)  # type: ignore[method-assign,assignment]
