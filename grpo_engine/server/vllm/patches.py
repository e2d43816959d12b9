"""What this server changes in vLLM's own code: which patch is needed where, and whether each one is in place.

Patches of workers and of the engine are defined where they are applied, each one function with its reason and versions.
Each leaves a mark, and the server does not start without the patches that its settings need. Those that only make
forked processes start sooner, and those of shared memory, are here. Imports vLLM only inside functions.
"""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from multiprocessing import process, shared_memory
from typing import Any

from grpo_engine.bridges.memory.shared_names import run_of, stem_of
from grpo_engine.bridges.memory.weight_lock import SHARED_MEMORY
from grpo_engine.errors import ModelError
from grpo_engine.server.config import ServerConfig

METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
_FORKS_ON_CPU = "_grpo_forks"


class Patch(StrEnum):
    """Patches that the server depends on."""

    KEEP_CPU_WEIGHTS = "keep_cpu_weights"
    """In the workers (`worker.py`): compute with the weights themselves, not with repacked copies."""
    WATCH_SERVER = "watch_server"
    """In the workers: exit with the server."""
    CLOSE_PORTS = "close_ports"
    """In the workers: no connection is accepted at the ports of process groups that have met."""
    HEAR_OUTPUTS = "hear_outputs"
    """In the server (`running.py`): call back for every message of the engine core."""


_WITHOUT = {
    Patch.KEEP_CPU_WEIGHTS: "vLLM would compute with copies of the weights, and ignore what a trainer writes",
    Patch.WATCH_SERVER: "vLLM's processes would outlive a killed server and keep its memory",
    Patch.CLOSE_PORTS: "any user of the machine could end it by connections",
    Patch.HEAR_OUTPUTS: "a pause could not wait for all tokens, and /health could not detect a hanging engine",
}


def needed_patches(config: ServerConfig, *, is_cpu: bool) -> frozenset[Patch]:
    """The patches that these settings need."""
    needed = {Patch.WATCH_SERVER, Patch.CLOSE_PORTS, Patch.HEAR_OUTPUTS}
    if is_cpu and config.changes_in_place:
        needed.add(Patch.KEEP_CPU_WEIGHTS)
    return frozenset(needed)


def check_patches(
    needed: Iterable[Patch], in_server: Mapping[str, bool], in_workers: Iterable[Mapping[str, bool]], version: str
) -> dict[str, bool]:
    """Check that every needed patch is in place, in the server or in all of its workers.

    Returns:
        Every patch, and whether it is in place.

    Raises:
        ModelError: a needed patch is missing.
    """
    workers = list(in_workers)
    in_place = {
        str(patch): in_server.get(patch, False) or (bool(workers) and all(each.get(patch, False) for each in workers))
        for patch in Patch
    }
    if missing := [patch for patch in needed if not in_place[patch]]:
        reasons = "; ".join(f"{patch} ({_WITHOUT[patch]})" for patch in sorted(missing))
        raise ModelError(
            f"vLLM {version}: patches are not in place: {reasons}. Install an unmodified vLLM, 0.26 to 0.33"
        )
    return in_place


def fork_cpu_engine() -> None:
    """Make the engine core and its worker forks on a CPU too, where threads are not bound to cores.

    Breaks: restarts within seconds. Its platform sets `VLLM_WORKER_MULTIPROC_METHOD=spawn` for every configuration, so
    that each of the two processes imports everything again, 7 to 14 s each.
    When: CPU platform. A fork inherits its parent's OpenMP, which must not have run before, and ignores the variables
    that bind threads; so this is for `VLLM_CPU_OMP_THREADS_BIND=nobind`. Versions: 0.26 to 0.33.
    Upstream: https://github.com/vllm-project/vllm, `vllm/platforms/cpu.py`, `check_and_update_config`; there is no
    setting for it.
    """
    from vllm.platforms.cpu import CpuPlatform

    if getattr(CpuPlatform, _FORKS_ON_CPU, False):
        return
    original = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        original(vllm_config)
        os.environ[METHOD_VARIABLE] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    setattr(CpuPlatform, _FORKS_ON_CPU, True)


def keep_imports_frozen() -> None:
    """Exclude what the fork server has imported from garbage collection in the processes that it forks.

    Breaks: restarts within seconds. vLLM unfreezes the heap after capturing graphs and before it exits, and collects
    then: 0.6 to 0.9 s on a slow core for 0.7 million objects of modules, each time, and their pages are copied.
    When: forked processes. What vLLM froze itself, such as its engine after the start, stays frozen too: it lives as
    long as the process. Versions: 0.26 to 0.33.
    Upstream: https://github.com/vllm-project/vllm, `vllm/distributed/parallel_state.py`, `cleanup_dist_env_and_memory`,
    and `vllm/v1/worker/gpu_model_runner.py`, `capture_model`.
    """
    gc.unfreeze = _leave_frozen


def _leave_frozen() -> None:
    return None


def name_shared_memory() -> None:
    """Put the run into the names of Python's shared memory and semaphores, here and in processes that are spawned:
    `grpo-<run>-psm_<pid>_<random>`, by hand `psm_<pid>_<random>`.

    Breaks: nothing is left after `kill -9`. vLLM's queues are files of up to 250 MB in /dev/shm, whose names say
    nothing, so that the supervisor could not tell whose they are, and left them.
    When: always. Versions: Python 3.11 to 3.14.
    Upstream: CPython, `Lib/multiprocessing/shared_memory.py` and `process.py`; vLLM names none
    (`distributed/device_communicators/shm_broadcast.py`).
    """
    shared_memory._make_filename = _named_by_process  # type: ignore[attr-defined]
    passed_on = process.current_process()._config  # type: ignore[attr-defined]
    passed_on["grpo_names"] = _Naming()
    if stem := _stem_of_run():
        passed_on["semprefix"] = f"/{stem}mp"


class _Naming:
    """Calls `name_shared_memory` where it is unpickled: as a process that was spawned begins."""

    def __reduce__(self) -> tuple[Callable[[], _Naming], tuple[()]]:
        return _named_too, ()


def _named_too() -> _Naming:
    name_shared_memory()
    return _Naming()


def _named_by_process() -> str:
    return f"/{_stem_of_run()}psm_{os.getpid()}_{secrets.token_hex(4)}"


def unlink_group_memory() -> None:
    """Unlink the memory of vLLM's process groups on a CPU once all ranks have mapped it; until then the run is in its
    name.

    Breaks: nothing is left after a run. Each rank of a group has a file of 4 MB in /dev/shm, which only a destructor
    removes that does not run in forked workers: it stayed after every server, also one that ended in order.
    When: CPU platform with tensor parallelism. Versions: 0.26 to 0.33.
    Upstream: https://github.com/vllm-project/vllm, `vllm/distributed/device_communicators/cpu_communicator.py`,
    `_CPUSHMDistributed`, and `csrc/cpu/shm.cpp`, `SHMManager`.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed._init_cpu_shm

    def map_and_unlink(group: Any) -> Any:
        group.group_name = f"{_stem_of_run()}{group.group_name}"
        handle = original(group)  # returns behind a barrier: every rank has mapped the memory of every other one
        for rank in range(group.communicator.world_size):
            SHARED_MEMORY.joinpath(f"{group.group_name}_{rank}").unlink(missing_ok=True)
        return handle

    _CPUSHMDistributed._init_cpu_shm = map_and_unlink


def _stem_of_run() -> str:
    """The beginning of names that a supervisor removes at the end of its run; none by hand."""
    run = run_of(os.environ)
    return "" if run is None else stem_of(run)
