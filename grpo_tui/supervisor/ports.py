"""Who holds a TCP port, and whether we may end it: ours, left by an earlier run of ours, or a stranger's.

Goes from the listening socket to its inode to the processes that hold it open, never by the name of a process. Reads
only; `teardown.py` acts on it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.wire.supervisor import RunStatus
from grpo_tui.paths import STATE_FILE
from grpo_tui.supervisor import proc
from grpo_tui.supervisor.proc import Stat

CLOCK_SLACK_S = 5.0
"""A supervisor writes down when it started a little after its process did; a later process with its pid is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that listens on a port somebody wants."""

    port: int
    process: Stat | None
    """None when the socket's process cannot be looked into: another user's, or in another namespace."""
    uid: int
    command: str
    mark: proc.Marker | None
    """The run of ours that it was started for."""
    is_supervised: bool
    """Whether the supervisor of that run still lives."""

    @property
    def is_other_users(self) -> bool:
        """Whether it runs as another user, whose processes are never touched."""
        return self.process is None or self.uid != os.getuid()

    def belongs_to(self, run: str, service: str | None) -> bool:
        """Whether this run (and this service, if one is named) may end it without asking: its own, or an orphan."""
        if self.mark is None:
            return False
        if self.mark.run == run:
            return service is None or self.mark.service == service
        return not self.is_supervised

    def words(self) -> str:
        """For a person: which port, who, and what to do where it is clear."""
        user = proc.user_name(self.uid)
        if self.process is None:
            return f"port {self.port} is held by a process of user {user} that we may not look into"
        who = f"port {self.port} is held by pid {self.process.pid}"
        if self.mark is None:
            return f"{who} (user {user}): {self.command}"
        if not self.is_supervised:
            return f"{who}, left by run {self.mark.run} of this project: {self.command}"
        owner = f"service {self.mark.service} of run {self.mark.run}"
        return f"{who}, {owner}, which is still supervised (`grpo-tui down {self.mark.run}` ends it): {self.command}"


def port_holders(ports: Iterable[int]) -> list[Holder]:
    """Everybody who listens on one of these ports, one entry a process and port."""
    sockets = proc.listening_sockets(ports)
    owners = proc.socket_owners(socket.inode for socket in sockets)
    found: dict[tuple[int, int | None], Holder] = {}
    for socket in sockets:
        pids: list[int | None] = [*owners[socket.inode]]
        for pid in pids or [None]:
            found.setdefault((socket.port, pid), _holder(socket, pid))
    return list(found.values())


def _holder(socket: proc.ListeningSocket, pid: int | None) -> Holder:
    stat = None if pid is None else proc.read_stat(pid)
    mark = None if stat is None else proc.marker(stat.pid)
    uid = None if stat is None else proc.uid_of(stat.pid)
    return Holder(
        port=socket.port,
        process=stat,
        uid=socket.uid if uid is None else uid,
        command="" if stat is None else proc.command_line(stat.pid),
        mark=mark,
        is_supervised=mark is not None and mark.run_folder is not None and is_supervised(Path(mark.run_folder)),
    )


def is_supervised(run_folder: Path) -> bool:
    """Whether the supervisor named in a run's state file still lives, and is not a later process with its pid."""
    try:
        status = RunStatus.model_validate_json((run_folder / STATE_FILE).read_bytes())
    except (OSError, ValidationError):
        return False
    if status.supervisor is None:
        return False
    stat = proc.read_stat(status.supervisor.pid)
    if stat is None or stat.is_dead:
        return False
    return started_at(stat) <= status.supervisor.started_at + CLOCK_SLACK_S


def started_at(stat: Stat) -> float:
    """When a process started, as Unix time by today's clock."""
    since_boot_s = stat.start_ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s
