"""How vLLM's processes end: in order where they react, and none is left."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from typing import TYPE_CHECKING

from grpo_engine.processes import ProcessIdentity, ProcessTree, is_resource_tracker, kill, terminate

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

END_WITHIN_S = 1.5
"""For the step that runs, after which vLLM is killed: half of what the fork server gives a server that is restarted."""
_KILL_WITHIN_S = 5.0
_AGAIN_AFTER_S = 1.0

logger = logging.getLogger(__name__)


def shut_down(llm: AsyncLLM) -> None:
    """End its processes: workers get time to remove the shared memory that they communicate through.

    An engine core without workers has none; it would spend a second on freeing memory that the kernel frees anyway.
    vLLM itself would kill resource trackers too, after which 400 MB stay, and sends SIGTERM once: Python handles none
    that arrives as a wait begins before that ends (seen in 4 of 150 restarts).
    """
    if llm.vllm_config.parallel_config.distributed_executor_backend == "uni":
        llm.shutdown(timeout=0.0)
        return
    again = threading.Timer(_AGAIN_AFTER_S, end_engine_processes)
    again.start()
    llm.shutdown(timeout=_AGAIN_AFTER_S + END_WITHIN_S + _KILL_WITHIN_S)
    again.cancel()


def end_engine_processes() -> None:
    """End what multiprocessing started in this process, with all descendants, and wait until they are gone.

    Resource trackers exit after the others, and first remove what those left in shared memory.
    """
    tree = ProcessTree(child.pid for child in multiprocessing.active_children() if child.pid is not None)

    def found() -> list[ProcessIdentity]:
        return [process for process in tree.living() if not is_resource_tracker(process)]

    terminate(found, grace_s=END_WITHIN_S)  # one that loads ends between two kernels (`worker.exit_between_kernels`)
    if left := kill(found, within_s=_KILL_WITHIN_S):
        pids = ", ".join(str(process.pid) for process in left)
        logger.error("vLLM: process %s is still alive %g s after SIGKILL", pids, _KILL_WITHIN_S)
