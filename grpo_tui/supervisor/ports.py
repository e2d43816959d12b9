"""Who holds a TCP port.

Goes from the listening socket to its inode to the processes that hold it open, never by the name of a process. Reads
only; `owners.py` says whose they are, `teardown.py` acts on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from grpo_tui.supervisor import proc
from grpo_tui.supervisor.owners import Owner, owner_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that listens on a port somebody wants."""

    port: int
    owner: Owner

    def words(self, run: str | None = None) -> str:
        """For a person: which port, who, and what to do where it is clear; `run` is the one that asks."""
        return f"port {self.port} is held by {self.owner.who(run)}"


def port_holders(ports: Iterable[int]) -> list[Holder]:
    """Everybody who listens on one of these ports, one entry a process and port."""
    sockets = proc.listening_sockets(ports)
    owners = proc.socket_owners(socket.inode for socket in sockets)
    found: dict[tuple[int, int | None], Holder] = {}
    for socket in sockets:
        pids: list[int | None] = [*owners[socket.inode]]
        for pid in pids or [None]:
            if (socket.port, pid) not in found:
                found[socket.port, pid] = Holder(port=socket.port, owner=owner_of(pid, socket.uid))
    return list(found.values())
