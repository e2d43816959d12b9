"""Imports without garbage collection, which takes a quarter of the CPU time in which a service starts.

Modules are objects that stay: each collection looks at all of them again, and finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Within, import and read what stays until the process ends; no later collection looks at it either."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
