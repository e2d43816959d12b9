"""Free TCP ports for servers that tests start.

They lie below the kernel's ephemeral range, so that no outgoing connection takes one between the choice and the
server's bind, and each pytest-xdist worker has a range of its own. A process hands out each port once.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

_FIRST, _END = 10_000, 32_000
_NUM_RANGES = 8


def free_port() -> int:
    """A port that no other test of this process or of its sibling workers uses."""
    for port in _candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise RuntimeError(f"no port between {_FIRST} and {_END} is free: end the servers of earlier test runs")


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


def _own_range() -> Iterator[int]:
    """The ports of this worker, from a place that differs between test runs that share the machine."""
    size = (_END - _FIRST) // _NUM_RANGES
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _NUM_RANGES
    offset = os.getpid() * 97 % size
    for index in range(size):
        yield _FIRST + worker * size + (offset + index) % size


_candidates = _own_range()
