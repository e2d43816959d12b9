"""Processes of this machine, read from /proc: identities, descendants, markers, owners of sockets.

Everything is a snapshot that may be stale a microsecond later, so signals go by pid *and* start time (`send_signal`).
What the keeper needs too is defined in `grpo_tui/keeper_process.py`, which must run alone.
"""

from __future__ import annotations

import os
import pwd
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from grpo_engine.wire.environment_variables import RUN_FOLDER_VARIABLE, RUN_VARIABLE, SERVICE_VARIABLE
from grpo_engine.wire.secrets import masked_argv
from grpo_tui.keeper_process import Stat, all_processes, below, read_stat, send_signal

__all__ = ["ProcessId", "Stat", "all_processes", "below", "identify", "read_stat", "send_signal"]

LISTENING = "0A"
"""The state of a listening socket in /proc/net/tcp."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningSocket:
    """A TCP socket that listens."""

    port: int
    inode: int
    uid: int


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
    """The run that a process was started for; None when it has no marker or is another user's."""
    if uid_of(pid) != os.getuid():
        return None
    environment = dict(entry.split("=", 1) for entry in _strings(pid, "environ") if "=" in entry)
    if RUN_VARIABLE not in environment:
        return None
    return Marker(
        run=environment[RUN_VARIABLE],
        service=environment.get(SERVICE_VARIABLE),
        run_folder=environment.get(RUN_FOLDER_VARIABLE),
    )


def processes_of_run(run: str, service: str | None = None) -> list[Stat]:
    """Living processes with the marker of this run (and service), and all below them, except `ourselves()`.

    Descendants of a marked process count too, so a cleaned environment does not hide one with a living parent.
    """
    processes = living()
    spared = ourselves()
    found: dict[int, Stat] = {}
    for process in processes:
        mark = marker(process.pid)
        if mark is None or mark.run != run or (service is not None and mark.service != service):
            continue
        found.update((each.pid, each) for each in (process, *below(process.pid, processes)))
    return [process for process in found.values() if process.pid not in spared]


def command_line(pid: int) -> str:
    """The command line in shell syntax, secrets masked; the name in brackets for a process that shows none."""
    argv = _strings(pid, "cmdline")
    while argv and not argv[-1]:  # a process title shorter than the arguments leaves the rest empty
        argv.pop()
    if argv:
        return shlex.join(masked_argv(argv))
    stat = read_stat(pid)
    return "[gone]" if stat is None else f"[{stat.comm}]"


def uid_of(pid: int) -> int | None:
    """The effective user of a process, or None when it is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:  # the folder's owner is root for a process that changed its user
            return next(int(line.split()[2]) for line in file if line.startswith("Uid:"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def user_name(uid: int) -> str:
    """The name of a user, or the number where there is no name (usual in containers)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def lock_holder(inode: int) -> int | None:
    """The process that took the lock (`flock`) of a file; None where that is not visible."""
    with open("/proc/locks") as file:
        for line in file:
            fields = line.split()
            if fields[1] != "FLOCK":  # "->" is one that waits
                continue
            pid, place = fields[4:6]
            if int(place.rpartition(":")[2]) == inode and int(pid) > 0:
                return int(pid)
    return None


def listening_sockets(ports: Iterable[int]) -> list[ListeningSocket]:
    """The TCP sockets, IPv4 and IPv6, that listen on one of these ports."""
    wanted = set(ports)
    found = []
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}") as file:
                lines = file.readlines()[1:]
        except FileNotFoundError:
            continue  # IPv6 is disabled
        for line in lines:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == LISTENING and port in wanted:
                found.append(ListeningSocket(port=port, inode=int(fields[9]), uid=int(fields[7])))
    return found


def socket_owners(inodes: Iterable[int]) -> dict[int, list[int]]:
    """For each socket inode the pids that hold it open, as far as permissions allow."""
    owners: dict[int, list[int]] = {inode: [] for inode in inodes}
    links = {f"socket:[{inode}]": inode for inode in owners}
    if not links:
        return owners
    for process in all_processes():
        folder = f"/proc/{process.pid}/fd"
        try:
            descriptors = os.listdir(folder)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        held = {links[link] for link in map(_link, (f"{folder}/{name}" for name in descriptors)) if link in links}
        for inode in held:
            owners[inode].append(process.pid)
    return owners


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _strings(pid: int, name: str) -> list[str]:
    """The NUL-ended strings of a file of a process; none when it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            content = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return content.removesuffix(b"\0").decode(errors="replace").split("\0") if content else []
