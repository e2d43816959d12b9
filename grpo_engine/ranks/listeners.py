"""The sockets on which Gloo listens: open while a group meets, then closed to everybody.

Gloo accepts whoever connects, keeps the connections for as long as the group lives, and aborts the process when it is
out of descriptors. It aborts when its socket no longer listens, and `Loop::unregisterDescriptor` throws where its epoll
instance has lost the socket. So the socket stays there, watched for nothing: Gloo accepts no further connection, and
the kernel keeps one or two that wait. Connections that exist go on. Linux only.

A socket filter that drops packets would take a privilege: Linux 6.18.44 refuses one on TCP without `CAP_NET_ADMIN`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_CLOSES = "_grpo_closes"
_EPOLL_CTL_MOD = 3
_FILES, _FILE_INFORMATION = Path("/proc/self/fd"), Path("/proc/self/fdinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
    """A descriptor that an epoll instance of this process watches."""

    instance: int
    descriptor: int
    data: int
    """What the instance returns with its events; Gloo's is the address of an object."""


class _EpollEvent(ctypes.Structure):
    """`struct epoll_event`; `select.epoll` sets half of the data."""

    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def close_ports_of_gloo() -> None:
    """From now on each group of Gloo's that this process makes, also torch and vLLM in it, is `closed_to_others`.

    Gloo, and vLLM, have no setting for it. The constructor is replaced, within which nothing but Gloo opens a port: the
    functions that call it make groups of NCCL too, and stores at which others may still connect.
    """
    if has_closed_ports_of_gloo():
        return
    from torch.distributed import ProcessGroupGloo

    original = ProcessGroupGloo.__init__

    def make_and_close(group: Any, *args: Any, **settings: Any) -> None:
        with closed_to_others():
            original(group, *args, **settings)

    setattr(make_and_close, _CLOSES, True)
    ProcessGroupGloo.__init__ = make_and_close  # type: ignore[assignment,method-assign]


def has_closed_ports_of_gloo() -> bool:
    """Whether `close_ports_of_gloo` was called in this process."""
    from torch.distributed import ProcessGroupGloo

    return hasattr(ProcessGroupGloo.__init__, _CLOSES)


@contextmanager
def closed_to_others() -> Iterator[None]:
    """Around the making of Gloo's groups: from its end on, no connection is accepted by the sockets that listen since.

    Only by those that an epoll instance watches, as Gloo's are. Nothing else may open a port within.
    """
    before = set(_listeners())
    yield
    for inode, listener in _listeners().items():
        if inode not in before:
            _accept_no_more(listener)


def _accept_no_more(listener: _Watched) -> None:
    libc, nothing = ctypes.CDLL(None, use_errno=True), _EpollEvent(events=0, data=listener.data)
    if libc.epoll_ctl(listener.instance, _EPOLL_CTL_MOD, listener.descriptor, ctypes.byref(nothing)):
        reason = os.strerror(ctypes.get_errno())
        log.warning("a port of a process group still accepts connections, of other users too: %s", reason)
        return
    with socket.socket(fileno=os.dup(listener.descriptor)) as own:
        own.listen(0)  # with a connection that waits to be accepted, the kernel drops further ones


def _listeners() -> dict[int, _Watched]:
    """Inode → listening sockets of this process that an epoll instance watches."""
    listeners = {}
    for watched in _watched():
        with suppress(OSError):  # closed since, or not a socket
            if stat.S_ISSOCK((status := os.fstat(watched.descriptor)).st_mode):
                with socket.socket(fileno=os.dup(watched.descriptor)) as one:
                    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        listeners[status.st_ino] = watched
    return listeners


def _watched() -> list[_Watched]:
    """What epoll instances of this process watch."""
    watched = []
    for name in os.listdir(_FILES):
        with suppress(OSError):
            if os.readlink(_FILES / name) == "anon_inode:[eventpoll]":
                entries = (_FILE_INFORMATION / name).read_text()
                for descriptor, data in re.findall(r"^tfd:\s*(\d+).*?data:\s*([0-9a-f]+)", entries, re.MULTILINE):
                    watched.append(_Watched(instance=int(name), descriptor=int(descriptor), data=int(data, 16)))
    return watched
