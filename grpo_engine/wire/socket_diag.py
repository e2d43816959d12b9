"""TCP sockets of this machine by the kernel's tables (`sock_diag(7)`): one by its addresses, or those that listen.

Unlike `/proc/net`, which lists all sockets, the answer for one takes microseconds however many other users have opened,
and that for those that listen a second beside 100,000 of them (there up to 20). Linux only.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache

_SOCK_DIAG_BY_FAMILY, _ERROR, _DONE = 20, 2, 3
_REQUEST, _LIST = 1, 0x301
"""`NLM_F_REQUEST` alone: one socket; with `NLM_F_DUMP`: a list."""
_NETLINK_SOCK_DIAG = 4
_HEADER = struct.Struct("=IHHII")
_QUESTION = struct.Struct("=BBBBI")
_SOCKET_ID = struct.Struct("!2H16s16s")
_ANSWER = struct.Struct("=4x48x5I")
"""Family, state, timer and retransmits; the socket's id; expiry, two queues, user, inode."""
_ANY_COOKIE = b"\xff" * 8
_ANY_STATE = 0xFFFFFFFF
_LISTENING = 10
_LOOPBACK_DEVICE = 1
"""`LOOPBACK_IFINDEX` of the kernel, in each network namespace. `if_nametoindex` needs a descriptor, and fails without
one as if there were no such device."""
_ANSWER_BYTES = 1 << 16

Address = tuple[str, int]
"""Host and port, as `getpeername` returns them first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSocket:
    """A socket as the kernel shows it."""

    host: str
    port: int
    peer: Address
    is_listening: bool
    uid: int
    inode: int


def socket_at(own: Address, peer: Address | None = None) -> TcpSocket | None:
    """The socket that a packet to `own` from `peer` over the loopback device reaches, None if none does.

    Args:
        peer: without it, or where no socket is connected with it, the one that listens at `own`.

    Raises:
        OSError: the kernel does not answer.
    """
    family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
    host, port = peer or ("::" if family == socket.AF_INET6 else "0.0.0.0", 0)
    packed = (socket.inet_pton(family, each).ljust(16, b"\0") for each in (own[0], host))
    # With the device, so that a socket which is bound to it is found, too.
    device = struct.pack("=I", _LOOPBACK_DEVICE)
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY_STATE)
    question += _SOCKET_ID.pack(own[1], port, *packed) + device + _ANY_COOKIE
    try:
        return _socket(next(_answers(question, _REQUEST)))
    except FileNotFoundError:
        return None


def sockets_listening(ports: Collection[int]) -> list[TcpSocket]:
    """The sockets, IPv4 and IPv6, that listen on one of these ports.

    Raises:
        OSError: the kernel does not answer.
    """
    wanted = {struct.pack("!H", port) for port in ports}
    any_id = bytes(_SOCKET_ID.size + 4) + _ANY_COOKIE
    return [
        _socket(body)
        for family in (socket.AF_INET, socket.AF_INET6)
        for body in _answers(_QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _LISTENING) + any_id, _LIST)
        if body[4:6] in wanted  # every user may listen on any number of others
    ]


def _answers(question: bytes, flags: int) -> Iterator[bytes]:
    """The messages that the kernel answers with, without their headers."""
    header = _HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, flags, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(1.0)
        netlink.connect((0, 0))
        netlink.send(header + question)
        while answer := netlink.recv(_ANSWER_BYTES):
            at = 0
            while at < len(answer):
                length, kind = _HEADER.unpack_from(answer, at)[:2]
                body = answer[at + _HEADER.size : at + length]
                at += length + 3 & ~3
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    code = -int(struct.unpack_from("=i", body)[0])
                    raise OSError(code, os.strerror(code))
                if kind != _SOCK_DIAG_BY_FAMILY:
                    raise OSError(errno.EPROTO, f"netlink answers with message {kind}")
                yield body


def _socket(body: bytes) -> TcpSocket:
    own_port, peer_port, own_host, peer_host = _SOCKET_ID.unpack_from(body, 4)
    *_, uid, inode = _ANSWER.unpack_from(body)
    return TcpSocket(
        host=_host(body[0], own_host),
        port=own_port,
        peer=(_host(body[0], peer_host), peer_port),
        is_listening=body[1] == _LISTENING,
        uid=uid,
        inode=inode,
    )


@cache
def is_available() -> bool:
    """Whether the kernel answers: a sandbox may refuse, or have no such table, and then know no socket."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as own:
            found = socket_at(own.getsockname())
            return found is not None and found.inode == os.fstat(own.fileno()).st_ino
    except OSError:
        return False


def plain(host: str) -> str:
    """An address in one spelling; one of IPv4 that IPv6 maps as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _host(family: int, packed: bytes) -> str:
    return plain(socket.inet_ntop(family, packed[: 4 if family == socket.AF_INET else 16]))
