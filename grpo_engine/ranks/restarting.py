"""Starts the ranks again in the launcher that has imported everything, where a supervisor asks for it.

    SIGHUP            rank 0 finishes its step and ends the others; then the ranks are started again
    When a rank is killed, the launcher tells the supervisor, and waits a while for SIGHUP before it exits

As the fork server of an inference server; see `wire.fork_server`. Torch-free.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from grpo_engine.errors import GrpoError
from grpo_engine.processes import ProcessIdentity, become_subreaper, descendants, kill_trackers_last
from grpo_engine.ranks.launching import RanksEnd
from grpo_engine.wire.fork_server import ASKED_WITHIN_S, RESTART_SIGNAL, tell_supervisor

POLL_S = 0.02


class RankRestarts:
    """Receives the requests of the supervisor, from now on; in the main thread."""

    def __init__(self, file: Path) -> None:
        """
        Args:
            file: where the supervisor reads that the previous ranks have ended.
        """
        self._file = file
        self._num_restarts = 0
        self._is_asked = False
        signal.signal(RESTART_SIGNAL, self._ask)

    def run(self, launch: Callable[[], RanksEnd]) -> int:
        """Launch ranks until they end without a request to start them again; returns their exit code.

        Args:
            launch: runs ranks until they have ended; on SIGHUP it ends them by a SIGTERM to rank 0.
        """
        become_subreaper()
        while True:
            if self._is_asked:
                self._is_asked = False
                self._num_restarts += 1
                self._report()
            end = launch()
            self._is_asked = self._is_asked or end.is_asked_again
            if end.was_stopped or not (self._is_asked or (end.is_killed and self._is_asked_soon())):
                return end.code
            _end_descendants()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def _is_asked_soon(self) -> bool:
        """Tell the supervisor, and wait until it asks, or stops this process."""
        stops: list[int] = []
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, lambda number, frame: stops.append(number)) for number in numbers}
        self._report(killed_by=signal.SIGKILL.name)
        deadline = time.monotonic() + ASKED_WITHIN_S
        while not (self._is_asked or stops) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for number, handler in before.items():
            signal.signal(number, handler)
        return self._is_asked and not stops

    def _report(self, killed_by: str | None = None) -> None:
        tell_supervisor(self._file, self._num_restarts, killed_by)


def _end_descendants() -> None:
    """End what the ranks have left.

    Raises:
        GrpoError: a process survives SIGKILL.
    """
    if why := kill_trackers_last(_living_descendants):
        raise GrpoError(f"what the ranks have left: {why}")


def _living_descendants() -> list[ProcessIdentity]:
    """Reaps those that have ended: orphans are children of this process."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return descendants(os.getpid())
