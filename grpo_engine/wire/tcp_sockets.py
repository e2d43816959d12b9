"""Who holds a TCP port of this machine: listening sockets, their users and processes. Linux only.

The sockets of one connection are asked of the kernel (`socket_diag.py`), all others are read in `/proc/net`, as are
those where the kernel does not answer, in some containers.

On a machine with several users anyone may listen on a loopback port that is free. So what this user's processes listen
on is told apart by the uid of the socket, which the kernel sets.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import struct
from collections.abc import Collection, Iterable, Iterator
from itertools import takewhile
from pathlib import Path

from grpo_engine.wire.environment_variables import MACHINE_ADDRESS_VARIABLE
from grpo_engine.wire.socket_diag import Address, TcpSocket, is_available, plain, socket_at

LOOPBACK = "127.0.0.1"
_TABLES = Path("/proc/net")
_NAMES = ("tcp", "tcp6")
_LISTENING = "0A"
ROOT = 0


def machine_address() -> str:
    """At which other machines of the cluster reach this one; of loopback where there are none."""
    return os.environ.get(MACHINE_ADDRESS_VARIABLE, LOOPBACK)


def is_of_cluster() -> bool:
    """Whether this machine has an address for other machines of a cluster."""
    return not ipaddress.ip_address(machine_address()).is_loopback


def listening_sockets(ports: Iterable[int], *, tables: Path = _TABLES) -> list[TcpSocket]:
    """The sockets, IPv4 and IPv6, that listen on one of these ports."""
    wanted = set(ports)
    # The kernel lists listening sockets first; the many others take milliseconds.
    return [
        each
        for name in _NAMES
        for each in takewhile(lambda row: row.is_listening, _rows(tables / name))
        if each.port in wanted
    ]


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


def own_listening_ports(*, tables: Path = _TABLES) -> frozenset[int]:
    """Ports on which this process listens."""
    own = set(map(_link, _descriptors("/proc/self/fd")))
    return frozenset(row.port for row in _all_rows(tables) if row.is_listening and f"socket:[{row.inode}]" in own)


def own_sockets() -> frozenset[int]:
    """Inodes of the sockets of this process."""
    return frozenset(
        int(link.removeprefix("socket:[").removesuffix("]"))
        for link in map(_link, _descriptors("/proc/self/fd"))
        if link.startswith("socket:[")
    )


def connected_stranger(
    *, services: Collection[int] = (), older: Collection[int] = (), tables: Path = _TABLES
) -> TcpSocket | None:
    """The other end of a connection of this process on this machine that another user than it and root holds, if any.

    Also one that no process holds (`inode` 0: not accepted yet, or closed), of whose user the kernel says nothing.

    Args:
        services: ports of this process to which every user may connect.
        older: inodes of sockets that are not looked at.
    """
    own = own_sockets() - set(older)
    rows = [each for each in _all_rows(tables) if not each.is_listening]
    ends = {
        (each.peer, (each.host, each.port))
        for each in rows
        if each.inode in own
        and each.port not in services
        and (ipaddress.ip_address(each.peer[0]).is_loopback or each.peer[0] == each.host)
    }
    held = {((each.host, each.port), each.peer): each for each in rows}
    gone = (TcpSocket(host=h, port=p, peer=own_end, is_listening=False, uid=0, inode=0) for (h, p), own_end in ends)
    others = (held.get(((each.host, each.port), each.peer), each) for each in gone)
    return next((each for each in others if not each.inode or each.uid not in (os.geteuid(), ROOT)), None)


def who_has(socket: TcpSocket) -> str:
    """The user of a socket, and its processes as far as permissions allow: `user nobody (pid 17)`."""
    pids = socket_owners([socket.inode])[socket.inode]
    return f"user {user_name(socket.uid)}" + (f" (pid {', '.join(map(str, pids))})" if pids else "")


def socket_owners(inodes: Iterable[int]) -> dict[int, list[int]]:
    """For each socket inode the pids that hold it open, as far as permissions allow."""
    owners: dict[int, list[int]] = {inode: [] for inode in inodes}
    links = {f"socket:[{inode}]": inode for inode in owners}
    if not links:
        return owners
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        for inode in {links[link] for link in map(_link, _descriptors(f"/proc/{pid}/fd")) if link in links}:
            owners[inode].append(pid)
    return owners


def user_name(uid: int) -> str:
    """The name of a user, or the number where there is no name (usual in containers)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _all_rows(tables: Path) -> Iterator[TcpSocket]:
    for name in _NAMES:
        yield from _rows(tables / name)


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
    ports = f":{port:04X}", f":{peer_port:04X}"
    return [each for name in _NAMES for each in _rows(tables / name, ports=ports)]


def _rows(table: Path, *, ports: tuple[str, str] = ("", "")) -> Iterator[TcpSocket]:
    """The rows of a table, or those with these ports, as the table has them, at both ends.

    Every user may add tens of thousands, of which reading the addresses takes seconds.
    """
    own_port, peer_port = ports
    try:
        with table.open() as file:
            next(file)
            for line in file:
                fields = line.split(maxsplit=10)
                if not (fields[1].endswith(own_port) and fields[2].endswith(peer_port)):
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
