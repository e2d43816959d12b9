"""Processes of this machine, read from /proc: identities, descendants, markers.

Everything is a snapshot that may be stale a microsecond later, so signals go by pid *and* start time (`send_signal`).
What the keeper needs too is defined in `grpo_tui/keeper_process.py`, which must run alone.
"""

from __future__ import annotations

import os
import shlex
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from grpo_engine.wire.environment_variables import RUN_FOLDER_VARIABLE, RUN_VARIABLE, SERVICE_VARIABLE
from grpo_engine.wire.secrets import masked_argv
from grpo_engine.wire.tcp_sockets import user_ids, user_name
from grpo_tui.keeper_process import Stat, all_processes, below, read_stat, send_signal

__all__ = ["ProcessId", "Stat", "all_processes", "below", "identify", "read_stat", "send_signal", "user_name"]

MAX_SHOWN_CHARS = 16_384
"""Of the words of a command line."""
MAX_BYTES = {"cmdline": 8 * MAX_SHOWN_CHARS, "environ": 8 * 2**20}
"""Read of these files: a command line may be terabytes of memory that was never touched (`PR_SET_MM_MAP`)."""
PART_BYTES = 2**16
"""Read at a time, since a buffer of all that may be there would be made for each process."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that is not confused with a later one of the same pid."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return identify(self.pid) == self


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """The run that a process was started for, from its environment."""

    run: str
    service: str | None
    run_folder: str | None


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process; None when there is none, or only a zombie."""
    stat = read_stat(pid)
    return None if stat is None or stat.is_dead else ProcessId(pid, stat.start_ticks)


def living() -> list[Stat]:
    """Every process that is visible and not a zombie."""
    return [process for process in all_processes() if not process.is_dead]


def descendants(pid: int) -> list[Stat]:
    """Every living process below `pid`, parents first."""
    return below(pid, living())


def ancestors(pid: int) -> Iterator[int]:
    """The parent of `pid`, its parent, and so on."""
    while (stat := read_stat(pid)) is not None and stat.parent > 0:
        pid = stat.parent
        yield pid


def ourselves() -> set[int]:
    """This process and its ancestors, which a sweep must not end even when they carry the marker."""
    return {os.getpid(), *ancestors(os.getpid())}


def marker(pid: int) -> Marker | None:
    """The run that a process was started for; None when it has no marker or is another user's.

    Of a setuid program (`su`) the environment is that of its real user.
    """
    if user_ids(pid) != (os.getuid(), os.getuid()):
        return None
    environment = dict(entry.split("=", 1) for entry in _strings(pid, "environ") if "=" in entry)
    if RUN_VARIABLE not in environment:
        return None
    return Marker(
        run=environment[RUN_VARIABLE],
        service=environment.get(SERVICE_VARIABLE),
        run_folder=environment.get(RUN_FOLDER_VARIABLE),
    )


def processes_of_run(run: str, service: str | None = None, *, run_folder: Path | None = None) -> list[Stat]:
    """Living processes with the marker of this run (and service), and all below them, except `ourselves()`.

    Descendants of a marked process count too, so a cleaned environment does not hide one with a living parent.

    Args:
        run_folder: if known; processes of a run of this id in another folder, which exists, are then left out.
    """
    processes = living()
    spared = ourselves()
    found: dict[int, Stat] = {}
    for process in processes:
        mark = marker(process.pid)
        if mark is None or mark.run != run or (service is not None and mark.service != service):
            continue
        if run_folder is not None and _is_elsewhere(mark, run_folder):
            continue
        found.update((each.pid, each) for each in (process, *below(process.pid, processes)))
    return [process for process in found.values() if process.pid not in spared]


def _is_elsewhere(mark: Marker, run_folder: Path) -> bool:
    """Whether the run of a marker is in another folder; one that is gone may have been moved to this one."""
    if mark.run_folder is None or mark.run_folder == str(run_folder.resolve()):
        return False
    return os.path.isdir(mark.run_folder)


def command_line(pid: int) -> str:
    """The command line in shell syntax, secrets masked; the name in brackets for a process that shows none.

    Of one that is longer than `MAX_SHOWN_CHARS`, the words that fit: any user may start a process with megabytes.
    """
    argv = _strings(pid, "cmdline")
    while argv and not argv[-1]:  # a process title shorter than the arguments leaves the rest empty
        argv.pop()
    if argv:
        num_fitting = bisect_right(list(accumulate(map(len, argv))), MAX_SHOWN_CHARS)
        return shlex.join([*masked_argv(argv[:num_fitting]), *(["…"] if num_fitting < len(argv) else [])])
    stat = read_stat(pid)
    return "[gone]" if stat is None else f"[{stat.comm}]"


def uid_of(pid: int) -> int | None:
    """The effective user of a process, or None when it is gone."""
    uids = user_ids(pid)
    return None if uids is None else uids[1]


def arguments(pid: int) -> list[str]:
    """The command line as it is, secrets too; empty when the process is gone or shows none."""
    return _strings(pid, "cmdline")


def _strings(pid: int, name: str) -> list[str]:
    """The NUL-ended strings at the beginning of a file of a process; none when it is gone or another user's."""
    content = b""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            while len(content) < MAX_BYTES[name] and (part := file.read(PART_BYTES)):
                content += part
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return content.removesuffix(b"\0").decode(errors="replace").split("\0") if content else []
