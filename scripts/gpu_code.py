"""Cuts the GPU code of a shared library down to one architecture.

A library of CUDA holds its kernels for every architecture in the ELF section .nv_fatbin: containers, each with entries
for one architecture, as machine code or as PTX that a driver compiles. What a GPU never loads is overwritten with
zeros. No offset changes, so the library stays valid, and zeros compress to nothing.

    container   magic u32, version u16, header size u16, size of all entries u64
    entry       kind u16 (1: PTX, 2: machine code), version u16, header size u32, payload size u64, …, at 28
                architecture u32 (90: Hopper)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

ELF_MAGIC = b"\x7fELF\x02\x01"
"""64 bits, little-endian: every library that runs on x86-64."""
CONTAINER_MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2


def prune(library: bytearray, architecture: int) -> int:
    """Zero, in place, what a GPU of `architecture` (as in 90) never loads; returns how many bytes that were.

    Of each container it keeps the machine code for the architecture; where there is none, the PTX that its driver could
    compile, for it or an older one.
    """
    num_pruned = 0
    for entries in _containers(library):
        has_code = any(kind == MACHINE_CODE and of == architecture for kind, of, _, _ in entries)
        for kind, of, start, size in entries:
            if not (of == architecture and kind == MACHINE_CODE if has_code else of <= architecture and kind == PTX):
                library[start : start + size] = bytes(size)
                num_pruned += size
    return num_pruned


def _containers(library: bytearray) -> Iterator[list[tuple[int, int, int, int]]]:
    """Entries of each container: kind, architecture, start and size of the payload."""
    start, size = _section(library, b".nv_fatbin")
    at, end = start, start + size
    while at + 16 <= end:
        magic, _, header_size, entries_size = struct.unpack_from("<IHHQ", library, at)
        if magic != CONTAINER_MAGIC:  # containers are aligned to eight bytes
            at += 8
            continue
        at += header_size
        entries, entries_end = [], at + entries_size
        while at < entries_end:
            kind, _, entry_header_size, payload_size = struct.unpack_from("<HHIQ", library, at)
            (architecture,) = struct.unpack_from("<I", library, at + 28)
            entries.append((kind, architecture, at + entry_header_size, payload_size))
            at += entry_header_size + payload_size
        yield entries


def _section(library: bytearray, name: bytes) -> tuple[int, int]:
    """Where a section of an ELF file begins and how long it is; (0, 0) where there is none, or it is no such file."""
    if not library.startswith(ELF_MAGIC):
        return 0, 0
    (headers_at,) = struct.unpack_from("<Q", library, 40)
    header_size, num_headers, names_index = struct.unpack_from("<HHH", library, 58)
    headers = [struct.unpack_from("<IIQQQQ", library, headers_at + i * header_size) for i in range(num_headers)]
    names_at = headers[names_index][4]
    for name_at, _, _, _, start, size in headers:
        if library.startswith(name + b"\0", names_at + name_at):
            return start, size
    return 0, 0
