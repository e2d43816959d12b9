"""The processes that vLLM starts below this one, and their end.

Only descendants of this process are ever ended; nothing is matched by name.
"""

from __future__ import annotations

import logging
import multiprocessing
import time

import psutil

from grpo_engine.bridges.process_identity import ProcessIdentity

SERVER_VARIABLE = "GRPO_VLLM_SERVER"
"""`<pid>:<start ticks>` of the process that serves HTTP; read by the workers (`vllm_worker.py`)."""
SHARE_VARIABLE = "GRPO_VLLM_SHARE_WEIGHTS"
"""`1` where the workers share their weights."""
_GONE_WITHIN_S = 5.0
_POLL_S = 0.02

logger = logging.getLogger(__name__)


def end_engine_processes() -> None:
    """Kill what multiprocessing started in this process, with all that is below it, and wait until it is gone.

    Resource trackers are left: they end by themselves, after removing what the others left in shared memory.
    """
    ended: list[ProcessIdentity] = []
    for process in _below_this_process():
        identity = ProcessIdentity.of(process.pid)
        if identity is None or is_resource_tracker(process):
            continue
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
        ended.append(identity)
    until = time.monotonic() + _GONE_WITHIN_S
    while alive := [identity for identity in ended if identity.is_alive()]:
        if time.monotonic() > until:
            logger.error("Killed, but still there: %s", ", ".join(f"process {identity.pid}" for identity in alive))
            return
        time.sleep(_POLL_S)


def is_resource_tracker(process: psutil.Process) -> bool:
    """Whether a process is one of multiprocessing's own, which ends after all whom it serves."""
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


def _below_this_process() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in multiprocessing.active_children():
        if child.pid is None:
            continue
        try:
            process = psutil.Process(child.pid)
            found += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found
