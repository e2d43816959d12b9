"""Which process listens on a TCP port.

Found through the inode of the listening socket, never by the name of a process. Reads only; `owners.py` says to which
run a process belongs, `teardown.py` acts on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from grpo_engine.wire.tcp_sockets import listening_sockets, socket_owners
from grpo_tui.supervisor.keeper.owners import Owner, owner_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that listens on a port that a service needs."""

    port: int
    owner: Owner

    def words(self, run: str | None = None) -> str:
        """The message: which port, which process, and what to do where that is clear; `run` is the one that asks."""
        return f"port {self.port} is held by {self.owner.who(run)}"


def port_holders(ports: Iterable[int]) -> list[Holder]:
    """All processes that listen on one of these ports, one entry per process and port."""
    sockets = listening_sockets(ports)
    owners = socket_owners(socket.inode for socket in sockets)
    found: dict[tuple[int, int | None], Holder] = {}
    for socket in sockets:
        pids: list[int | None] = [*owners[socket.inode]]
        for pid in pids or [None]:
            if (socket.port, pid) not in found:
                found[socket.port, pid] = Holder(port=socket.port, owner=owner_of(pid, socket.uid))
    return list(found.values())
