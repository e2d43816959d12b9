"""What falls to the daemon when a keeper dies: as a child subreaper it becomes the parent of whoever was below.

So a killed keeper's processes are found whatever they did to their groups, sessions and environments, and even if they
are so young that no sample has seen them. Every child that the daemon did not start itself is such an orphan.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from grpo_tui.supervisor.keeper import PR_SET_CHILD_SUBREAPER, Stat, all_processes, below, send_signal

_children: set[int] = set()
"""Children that this process started itself and has not buried."""
_children_change = threading.Lock()
_is_reaper = False


def become_reaper() -> None:
    """Make this process the parent of orphans below it; where the kernel refuses, marker and ledger have to do."""
    global _is_reaper
    _is_reaper = ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


@contextmanager
def own_children() -> Iterator[set[int]]:
    """The pids of own children, to add one that is started meanwhile, or to take out one that was buried."""
    with _children_change:
        yield _children


def end_adopted() -> None:
    """End whoever fell to this process: what a probe's command left behind, or a keeper that was killed."""
    for process in adopted():
        send_signal(process, signal.SIGKILL)


def adopted() -> list[Stat]:
    """Orphans that fell to this process, and all below them, parents first; the dead among them are buried."""
    if not _is_reaper:
        return []
    with _children_change:
        everybody = all_processes()
        fallen = [each for each in everybody if each.parent == os.getpid() and each.pid not in _children]
    for process in fallen:
        if process.is_dead:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
    return [each for orphan in fallen for each in (orphan, *below(orphan.pid, everybody)) if not each.is_dead]
