"""Rewards of completions: from this process, or from others beside it where scoring takes much CPU time.

A thread of this process shares its interpreter with sampling; a process has a core of its own.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from typing import Any

from grpo_engine.environments.config import SamplingConfig
from grpo_engine.environments.tasks.base import Item, Task
from grpo_engine.errors import PeerError
from grpo_engine.processes import ProcessIdentity, die_with_parent
from grpo_engine.wire.terminal_text import log_to_stderr

_SAFE_PATH = "PYTHONSAFEPATH"


async def rewards_of(
    config: SamplingConfig, item: Item, completions: Sequence[str], token_ids: Sequence[Sequence[int]] | None = None
) -> list[float]:
    """Reward of each completion of an item; does not block the event loop (see `Task.rewards`).

    Raises:
        GrpoError: the task refuses to score them.
        PeerError: a process that scores ended.
    """
    if not config.scoring_processes:
        return await config.task.rewards(item, completions, token_ids)
    key = (type(config.task), config.task.model_dump_json(), config.scoring_processes)
    if key not in _started:
        _started[key] = ScoringProcesses(config.task, config.scoring_processes)
    return await _started[key].rewards(item, completions, token_ids)


def end_scoring() -> None:
    """Kill all processes that score; later groups start new ones."""
    while _started:
        _started.popitem()[1].end()


class ScoringProcesses:
    """Processes that score the completions of one task, a group at a time each."""

    def __init__(self, task: Task, count: int) -> None:
        """They start with the first groups."""
        # Each begins as `python -c`, which would look for modules in the working directory first.
        os.environ[_SAFE_PATH] = "1"
        context = multiprocessing.get_context("spawn")  # a fork would copy the locks of threads, and CUDA
        self._label, self._count = task.label(), count
        self._begun: SimpleQueue[ProcessIdentity] = context.SimpleQueue()
        level = logging.getLogger("grpo_engine").getEffectiveLevel()
        self._pool = ProcessPoolExecutor(
            count, context, initializer=_begin, initargs=(task, os.getpid(), level, self._begun)
        )

    async def rewards(
        self, item: Item, completions: Sequence[str], token_ids: Sequence[Sequence[int]] | None = None
    ) -> list[float]:
        """Those of `task.rewards`, and its errors.

        Raises:
            PeerError: one of the processes ended.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, _rewards, item, list(completions), token_ids)
        except BrokenProcessPool:
            raise PeerError(
                f"task {self._label}: one of {self._count} processes that score ended: it was killed, by the kernel if "
                "memory ran out (see dmesg; lower scoring_processes), or the reward ended it"
            ) from None

    def end(self) -> None:
        """Kill them, whatever they are at: a reward that never returns would hold this process at its exit."""
        while not self._begun.empty():
            self._begun.get().send_signal(signal.SIGKILL)
        self._pool.shutdown(wait=False, cancel_futures=True)


_started: dict[tuple[type[Task], str, int], ScoringProcesses] = {}
"""Of this process; the environments in it (`copies`), and their evaluations, share those of a task."""
_task: Task
"""Of a process that scores."""


def _begin(task: Task, parent: int, level: int, begun: SimpleQueue[Any]) -> None:
    global _task
    die_with_parent(parent)
    begun.put(ProcessIdentity.of_this_process())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.pop(_SAFE_PATH, None)  # children of the user's code find modules as they always do
    log_to_stderr()
    logging.getLogger("grpo_engine").setLevel(level)
    _task = task


def _rewards(item: Item, completions: Sequence[str], token_ids: Sequence[Sequence[int]] | None) -> list[float]:
    return asyncio.run(_task.rewards(item, completions, token_ids))
