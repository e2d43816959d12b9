"""The sockets on which Gloo listens: open while a group meets, then closed to everybody.

Gloo accepts whoever connects, keeps the connections for as long as the group lives, and aborts the process when it is
out of descriptors. It also aborts when its socket no longer listens, so the socket stays, with a filter of the kernel
that drops every packet: a connection is never made. Connections that exist go on. Linux only.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

_SO_ATTACH_FILTER = 26
_DROP = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""A classic BPF program: return 0 bytes of the packet."""
_FILES, _FILE_INFORMATION = Path("/proc/self/fd"), Path("/proc/self/fdinfo")


@contextmanager
def closed_to_others() -> Iterator[None]:
    """Around the making of Gloo's groups: from its end on, nobody can connect to the sockets that listen since.

    Only to those that an epoll instance watches, as Gloo's are. Nothing else may open a port within.
    """
    before = set(_listeners())
    yield
    for inode, descriptor in _listeners().items():
        if inode not in before:
            _drop_packets(descriptor)


def _drop_packets(descriptor: int) -> None:
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    try:
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))
    except OSError as error:  # a sandbox without Linux's kernel
        log.warning("a port of a process group still accepts connections: the kernel takes no socket filter: %s", error)


def _listeners() -> dict[int, int]:
    """Inode → descriptor of the listening sockets of this process that an epoll instance watches."""
    listeners = {}
    for descriptor in _watched():
        with suppress(OSError):  # closed since, or not a socket
            if stat.S_ISSOCK((status := os.fstat(descriptor)).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as one:
                    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        listeners[status.st_ino] = descriptor
    return listeners


def _watched() -> set[int]:
    """The descriptors that epoll instances of this process watch."""
    watched: set[int] = set()
    for name in os.listdir(_FILES):
        with suppress(OSError):
            if os.readlink(_FILES / name) == "anon_inode:[eventpoll]":
                entries = (_FILE_INFORMATION / name).read_text()
                watched.update(map(int, re.findall(r"^tfd:\s*(\d+)", entries, re.MULTILINE)))
    return watched
