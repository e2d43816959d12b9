"""The processes that vLLM starts below this one, and their end.

Only descendants of this process are ever ended; nothing is matched by name.
"""

from __future__ import annotations

import multiprocessing

import psutil

from grpo_engine.server.vllm_worker import is_resource_tracker

_GONE_WITHIN_S = 5.0


def end_engine_processes() -> None:
    """Kill what multiprocessing started in this process, with all that is below it, and wait until it is gone.

    Resource trackers are left: they end by themselves, after removing what the others left in shared memory.
    """
    ended: list[psutil.Process] = []
    for child in multiprocessing.active_children():
        if child.pid is None:
            continue
        try:
            process = psutil.Process(child.pid)
            ended += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    ended = [process for process in ended if not is_resource_tracker(process)]
    for process in ended:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(ended, timeout=_GONE_WITHIN_S)
