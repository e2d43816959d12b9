"""Who holds a TCP port of this machine: listening sockets, their users and processes. Linux only.

The kernel is asked (`socket_diag.py`); where it does not answer, in some containers, the list of all sockets in
`/proc/net` is read, to which every user may add hundreds of thousands.

On a machine with several users anyone may listen on a loopback port that is free. So what this user's processes listen
on is told apart by the uid of the socket, which the kernel sets.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import socket
import stat
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from grpo_engine.wire.environment_variables import MACHINE_ADDRESS_VARIABLE
from grpo_engine.wire.socket_diag import Address, TcpSocket, is_available, plain, socket_at, sockets_listening

LOOPBACK = "127.0.0.1"
_TABLES = Path("/proc/net")
_NAMES = ("tcp", "tcp6")
_LISTENING = "0A"
ROOT = 0
_MOST_OTHERS = 4
"""Processes of other users that are named as holders of a socket."""
_OTHERS_WITHIN_S = 1.0
"""For which their descriptors are looked at."""


def machine_address() -> str:
    """At which other machines of the cluster reach this one; of loopback where there are none."""
    return os.environ.get(MACHINE_ADDRESS_VARIABLE, LOOPBACK)


def is_of_cluster() -> bool:
    """Whether this machine has an address for other machines of a cluster."""
    return not ipaddress.ip_address(machine_address()).is_loopback


def listening_sockets(ports: Iterable[int], *, tables: Path | None = None) -> list[TcpSocket]:
    """The sockets, IPv4 and IPv6, that listen on one of these ports.

    Args:
        tables: read these in place of asking the kernel.
    """
    wanted = set(ports)
    if tables is None and is_available():
        return sockets_listening(wanted)
    texts = set(map(_port_text, wanted))
    # The kernel lists listening sockets first.
    rows = (_rows((tables or _TABLES) / name, lambda fields: fields[1][-5:] in texts) for name in _NAMES)
    return [each for one in rows for each in takewhile(lambda row: row.is_listening, one)]


def stranger_behind(peer: Address, own: Address | None = None, *, tables: Path | None = None) -> TcpSocket | None:
    """The socket of another user than this one and root that connections to a loopback address reach; None if none is.

    Args:
        peer: an address that this process has connected to.
        own: this end of the connection; with it the other end is looked at too, so that a process which closed its
            listening socket since is still noticed.
        tables: read these in place of asking the kernel.
    """
    host, port = plain(peer[0]), peer[1]
    if not ipaddress.ip_address(host).is_loopback:
        return None
    client = None if own is None else (plain(own[0]), own[1])
    if tables is None and is_available():
        ends = (None,) if client is None else (None, client)
        chosen = [found for each in ends if (found := socket_at((host, port), each)) is not None]
    else:
        chosen = _reached(host, port, client, tables or _TABLES)
    return next((each for each in chosen if each.uid not in (os.geteuid(), ROOT)), None)


def client_socket(peer: Address, own: Address) -> TcpSocket | None:
    """The socket that has connected from `peer`, on this machine, to `own`; None where no process has it any more.

    Of a socket that was closed the kernel does not say whose it was.
    """
    ends = (plain(peer[0]), peer[1]), (plain(own[0]), own[1])
    rows = [socket_at(*ends)] if is_available() else _ends(peer[1], own[1], _TABLES)
    return next((row for row in rows if row and row.inode and ((row.host, row.port), row.peer) == ends), None)


def own_listening_ports() -> frozenset[int]:
    """Ports on which this process listens."""
    return frozenset(
        one.getsockname()[1] for one in _own_tcp_sockets() if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def own_sockets() -> frozenset[int]:
    """Inodes of the sockets of this process."""
    return frozenset(
        int(link.removeprefix("socket:[").removesuffix("]"))
        for link in map(_link, _descriptors("/proc/self/fd"))
        if link.startswith("socket:[")
    )


def connected_stranger(
    *, services: Collection[int] = (), older: Collection[int] = (), tables: Path | None = None
) -> TcpSocket | None:
    """The other end of a connection of this process on this machine that another user than it and root holds, if any.

    Also one that no process holds (`inode` 0: not accepted yet, or closed), of whose user the kernel says nothing.

    Args:
        services: ports of this process to which every user may connect.
        older: inodes of sockets that are not looked at.
        tables: read these in place of asking the kernel.
    """
    is_asked = tables is None and is_available()
    tables = tables or _TABLES
    ends = {
        (peer, own)
        for inode, peer, own in (_own_connections() if is_asked else _listed_connections(tables))
        if inode not in older
        and own[1] not in services
        and (ipaddress.ip_address(peer[0]).is_loopback or peer[0] == own[0])
    }
    if is_asked:
        others = [client_socket(*each) for each in ends]
    else:
        texts = {_port_text(peer[1]) for peer, _ in ends}
        rows = _all_rows(tables, lambda fields: fields[1][-5:] in texts)
        held = {((each.host, each.port), each.peer): each for each in rows if each.inode}
        others = [held.get(each) for each in ends]
    for ((host, port), own), other in zip(ends, others, strict=True):
        if other is None:
            return TcpSocket(host=host, port=port, peer=own, is_listening=False, uid=0, inode=0)
        if other.uid not in (os.geteuid(), ROOT):
            return other
    return None


def who_has(held: TcpSocket) -> str:
    """The user of a socket, and its processes as far as permissions allow: `user nobody (pid 17)`."""
    pids = socket_owners([held.inode])[held.inode]
    return f"user {user_name(held.uid)}" + (f" (pid {', '.join(map(str, pids))})" if pids else "")


def socket_owners(inodes: Iterable[int]) -> dict[int, list[int]]:
    """For each socket inode the pids that hold it open, as far as permissions allow.

    All of this user's, and a few of others, which are only named: root can look at theirs, of which one user may have
    tens of millions.
    """
    owners: dict[int, list[int]] = {inode: [] for inode in inodes}
    links = {f"socket:[{inode}]": inode for inode in owners}
    if not links:
        return owners
    pids = sorted((_is_of_another(pid), pid) for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))))
    until: float | None = None
    for is_of_another, pid in pids:
        if until is None and is_of_another:
            until = time.monotonic() + _OTHERS_WITHIN_S
        for number, path in enumerate(_descriptors(f"/proc/{pid}/fd")):
            if until is not None and number % 1024 == 0 and time.monotonic() > until:
                return owners
            inode = links.get(_link(path))
            if inode is not None and pid not in owners[inode]:
                owners[inode].append(pid)
        if until is not None and all(len(found) >= _MOST_OTHERS for found in owners.values()):
            return owners
    return owners


def _is_of_another(pid: int) -> bool:
    """Whether the real user of a process is another one; the owner of its files may be root whoever that is."""
    try:
        users = user_ids(pid)
    except OSError:  # it cannot be read
        users = None
    return users is None or users[0] != os.getuid()


def user_ids(pid: int) -> tuple[int, int] | None:
    """The real and the effective user of a process, or None when it is gone."""
    try:
        # The folder's owner is root for a process that changed its user. Its name may be any bytes.
        with open(f"/proc/{pid}/status", "rb") as file:
            real, effective = next(line.split()[1:3] for line in file if line.startswith(b"Uid:"))
            return int(real), int(effective)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def user_name(uid: int) -> str:
    """The name of a user, or the number where there is no name (usual in containers)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _own_tcp_sockets() -> Iterator[socket.socket]:
    """Those that this process has open, each until the next."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        yield one


def _own_connections() -> Iterator[tuple[int, Address, Address]]:
    """Inode, peer and own end of each."""
    for one in _own_tcp_sockets():
        with suppress(OSError):  # not connected
            (host, port), (own_host, own_port) = one.getpeername()[:2], one.getsockname()[:2]
            yield os.fstat(one.fileno()).st_ino, (plain(host), port), (plain(own_host), own_port)


def _listed_connections(tables: Path) -> Iterator[tuple[int, Address, Address]]:
    inodes = set(map(str, own_sockets()))
    for row in _all_rows(tables, lambda fields: fields[9] in inodes and fields[3] != _LISTENING):
        yield row.inode, row.peer, (row.host, row.port)


def _all_rows(tables: Path, is_wanted: Callable[[list[str]], bool]) -> Iterator[TcpSocket]:
    for name in _NAMES:
        yield from _rows(tables / name, is_wanted)


def _reached(host: str, port: int, client: Address | None, tables: Path) -> list[TcpSocket]:
    """The sockets that listen at an address and that are connected from it with `client`, by the tables."""
    listening = listening_sockets([port], tables=tables)
    ends = [] if client is None else _ends(port, client[1], tables)
    # As the kernel chooses: the exact address, then all IPv4 addresses, then all of both kinds.
    chosen = next(
        (found for name in (host, "0.0.0.0", "::") if (found := [s for s in listening if s.host == name])), []
    )
    return chosen + [each for each in ends if (each.host, each.peer) == (host, client)]


def _ends(port: int, peer_port: int, tables: Path) -> list[TcpSocket]:
    """The sockets at a port that are connected with another one."""
    own, peer = _port_text(port), _port_text(peer_port)
    return list(_all_rows(tables, lambda fields: fields[1].endswith(own) and fields[2].endswith(peer)))


def _rows(table: Path, is_wanted: Callable[[list[str]], bool]) -> Iterator[TcpSocket]:
    """The rows of a table whose fields, as the table has them, are wanted.

    Every user may add tens of thousands, of which reading the addresses takes seconds.
    """
    try:
        with table.open() as file:
            next(file)
            for line in file:
                fields = line.split(maxsplit=10)
                if not is_wanted(fields):
                    continue
                host, port = _address(fields[1])
                yield TcpSocket(
                    host=host,
                    port=port,
                    peer=_address(fields[2]),
                    is_listening=fields[3] == _LISTENING,
                    uid=int(fields[7]),
                    inode=int(fields[9]),
                )
    except FileNotFoundError:  # IPv6 is disabled
        return


def _port_text(port: int) -> str:
    """How an address in a table ends."""
    return f":{port:04X}"


def _address(text: str) -> Address:
    """`0100007F:2329`: words of 32 bits in the byte order of this machine, and a port."""
    words, _, port = text.partition(":")
    packed = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    return plain(str(ipaddress.ip_address(packed))), int(port, 16)


def _descriptors(folder: str) -> list[str]:
    """The links of a process's open files, as far as permissions allow."""
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
