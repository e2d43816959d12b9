"""Files of a sweep that others read too, without loading what makes one: which runs are its points, who works on it."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import from_line, write_json_atomically
from grpo_engine.wire.file_locks import lock_holder
from grpo_engine.wire.run_folder import SWEEP_FILE, SWEEPS
from grpo_engine.wire.sweeps import SweepMark
from grpo_tui.paths import LOGS, is_name, is_own
from grpo_tui.run_files.whole_file import read_whole
from grpo_tui.supervisor.keeper.proc import arguments, read_stat, send_signal, uid_of

ASKED_FILE = "sweep.toml"
RESULTS_FILE = "results.json"
SWEEP_LOCK_FILE = "sweep.lock"
"""Locked by the command that starts runs."""


def read_mark(run_folder: Path) -> SweepMark | None:
    """The sweep that a run belongs to; None where it is none, or its file is damaged or names what no sweep can be."""
    try:
        mark = from_line(SweepMark, read_whole(run_folder / SWEEP_FILE), peer=SWEEP_FILE)
    except (OSError, PeerError):
        return None
    return mark if is_name(mark.sweep) else None


def write_mark(mark: SweepMark, run_folder: Path) -> None:
    """Mark a run as one of a sweep."""
    write_json_atomically(run_folder / SWEEP_FILE, mark, mode=0o600)


def holder_of(sweep_folder: Path) -> int | None:
    """Pid of the command that starts runs of a sweep; None where there is none, or it is not visible."""
    try:
        status = (sweep_folder / SWEEP_LOCK_FILE).lstat()
    except OSError:
        return None
    return lock_holder(status, lambda pid: _works_on(pid, sweep_folder)) if stat.S_ISREG(status.st_mode) else None


def _works_on(pid: int, sweep_folder: Path) -> bool:
    """Whether a process is a sweep command of this folder of runs: its lock may be a hard link to that of another."""
    try:
        is_here = os.path.samefile(f"/proc/{pid}/cwd/{LOGS / SWEEPS}", sweep_folder.parent)
    except OSError:  # gone, or another user's
        return False
    return is_here and "sweep" in arguments(pid)


def ask_to_stop(sweep_folder: Path) -> int | None:
    """Ask the command that starts runs of a sweep to end them and itself; returns its pid, None where there is none.

    A command of another user is not asked, nor one in a folder that another user owns or may write to.
    """
    pid = holder_of(sweep_folder)
    if pid is None or uid_of(pid) != os.getuid() or not is_own(sweep_folder.stat()):
        return None
    process = read_stat(pid)
    if process is None or holder_of(sweep_folder) != pid:
        return None
    send_signal(process, signal.SIGTERM)
    return pid
