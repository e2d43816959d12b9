"""Who is at the other end of a unix socket: the kernel's word, since a foreign process may claim anything."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_UCRED = struct.Struct("iII")
"""Pid, uid and gid, as SO_PEERCRED gives them (unix(7))."""


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process that listens, or that has connected.

    Raises:
        OSError: the socket is closed.
    """
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid), int(uid)


def require_supervisor(connection: socket.socket, run_folder: Path) -> None:
    """Refuse the listener of another user in place of a run's supervisor; call it before anything is sent or believed.

    Raises:
        OSError: it is neither of this user or root, nor of the owner of the run folder; or the socket is closed.
    """
    _, uid = peer_of(connection)
    if uid not in (0, os.geteuid(), run_folder.stat().st_uid):
        raise PermissionError(f"user {uid} listens in place of the supervisor")
