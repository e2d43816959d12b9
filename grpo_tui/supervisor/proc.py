"""Who is who on this machine, read from /proc: identities, descendants, groups, markers, owners of sockets.

Everything is a snapshot that may be stale a microsecond later, so whoever acts on it signals by pid *and* start time
(`send_signal`). What the keeper needs too is defined in `keeper.py`, which has to stand alone.
"""

from __future__ import annotations

import os
import pwd
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from grpo_tui.supervisor.keeper import Stat, all_processes, below, read_stat, send_signal

__all__ = ["ProcessId", "Stat", "all_processes", "below", "identify", "read_stat", "send_signal"]

RUN, SERVICE, ATTEMPT, RUN_FOLDER = "GRPO_TUI_RUN", "GRPO_TUI_SERVICE", "GRPO_TUI_ATTEMPT", "GRPO_TUI_RUN_FOLDER"
"""Environment variables that mark every process of a run, whatever becomes of its parents."""
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
    """What the environment of a process says of the run it was started for."""

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
    """Every process that can be seen and is no zombie."""
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
    """This process and its parents, which a sweep must not end even when they carry the marker."""
    return {os.getpid(), *ancestors(os.getpid())}


def marker(pid: int) -> Marker | None:
    """The run that a process was started for; None when it is none of ours. Another user's run is none of ours."""
    if uid_of(pid) != os.getuid():
        return None
    environment = dict(entry.split("=", 1) for entry in _strings(pid, "environ") if "=" in entry)
    if RUN not in environment:
        return None
    return Marker(run=environment[RUN], service=environment.get(SERVICE), run_folder=environment.get(RUN_FOLDER))


def processes_of_run(run: str, service: str | None = None) -> list[Stat]:
    """Living processes marked as of this run (and this service), and all below them, except ourselves and our parents.

    What a marked process started counts too, so a cleaned environment does not hide a process with a living parent.
    """
    everybody = living()
    spared = ourselves()
    found: dict[int, Stat] = {}
    for process in everybody:
        mark = marker(process.pid)
        if mark is None or mark.run != run or (service is not None and mark.service != service):
            continue
        found.update((each.pid, each) for each in (process, *below(process.pid, everybody)))
    return [process for process in found.values() if process.pid not in spared]


def command_line(pid: int) -> str:
    """The command line as one would type it; the bare name in brackets for what shows none."""
    argv = _strings(pid, "cmdline")
    while argv and not argv[-1]:  # who writes a shorter title over its arguments leaves the rest empty
        argv.pop()
    if argv:
        return shlex.join(argv)
    stat = read_stat(pid)
    return "[gone]" if stat is None else f"[{stat.comm}]"


def uid_of(pid: int) -> int | None:
    """The effective user of a process, or None when it is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:  # not the folder's owner, which is root for whoever changed its user
            return next(int(line.split()[2]) for line in file if line.startswith("Uid:"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def user_name(uid: int) -> str:
    """The name of a user, or the number where the machine knows no name (usual in containers)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def listening_sockets(ports: Iterable[int]) -> list[ListeningSocket]:
    """The TCP sockets, IPv4 and IPv6, that listen on one of these ports."""
    wanted = set(ports)
    found = []
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}") as file:
                lines = file.readlines()[1:]
        except FileNotFoundError:
            continue  # IPv6 switched off
        for line in lines:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == LISTENING and port in wanted:
                found.append(ListeningSocket(port=port, inode=int(fields[9]), uid=int(fields[7])))
    return found


def socket_owners(inodes: Iterable[int]) -> dict[int, list[int]]:
    """For each socket inode the pids that hold it open, as far as we may look."""
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
