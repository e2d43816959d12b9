"""Who is at the other end of a unix socket: the kernel's word, since a foreign process may claim anything."""

from __future__ import annotations

import socket
import struct

_UCRED = struct.Struct("iII")
"""Pid, uid and gid, as SO_PEERCRED gives them (unix(7))."""


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process that listens, or that has connected.

    Raises:
        OSError: the socket is closed.
    """
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid), int(uid)
