"""Processes whose keeper was killed: the supervisor, a child subreaper, becomes their parent.

They are found whatever they did to their groups, sessions and environments, and even if they started after the last
sample. Every child that the supervisor did not start itself is such an orphan.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from grpo_tui.keeper_process import PR_SET_CHILD_SUBREAPER, Stat, all_processes, below, send_signal

_children: set[int] = set()
"""Children that this process started itself and has not reaped."""
_children_change = threading.Lock()
_is_reaper = False


def become_reaper() -> None:
    """Make this process the parent of orphans below it; where that fails, they are found by marker and ledger."""
    global _is_reaper
    _is_reaper = ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


@contextmanager
def own_children() -> Iterator[set[int]]:
    """The pids of own children, locked: add one that is started meanwhile, or remove one that was reaped."""
    with _children_change:
        yield _children


def kill_adopted() -> None:
    """Kill the orphans that this process adopted: left by a probe's command, or by a keeper that was killed."""
    for process in adopted():
        send_signal(process, signal.SIGKILL)


def adopted() -> list[Stat]:
    """Orphans that this process adopted, and all below them, parents first; zombies among them are reaped."""
    if not _is_reaper:
        return []
    with _children_change:
        processes = all_processes()
        orphans = [each for each in processes if each.parent == os.getpid() and each.pid not in _children]
    for process in orphans:
        if process.is_dead:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
    return [each for orphan in orphans for each in (orphan, *below(orphan.pid, processes)) if not each.is_dead]
