"""What one server leaves to the next that is forked from the same standby: a page of memory that they share.

Made when this module is imported, which the standby does before it forks; a server that has no standby forgets.
"""

from __future__ import annotations

import mmap
import struct

_CACHE_BYTES = struct.Struct("q")
_page = mmap.mmap(-1, mmap.PAGESIZE)


def remember_cache_bytes(num_bytes: int) -> None:
    """Keep the size of the KV cache on each GPU, as vLLM has measured it."""
    _CACHE_BYTES.pack_into(_page, 0, num_bytes)


def remembered_cache_bytes() -> int | None:
    """The size that an earlier server of the same standby, hence of the same settings, has kept."""
    return _CACHE_BYTES.unpack_from(_page)[0] or None
