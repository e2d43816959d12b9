"""A gate in front of an engine: generations pass while it is open; a weight update closes it and waits.

For one event loop. Waiting for running generations, rather than freezing them, gives every completion one policy
version from its first token to its last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Open at first."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._is_open = True
        self._num_inside = 0

    @property
    def is_open(self) -> bool:
        """Whether generations may pass."""
        return self._is_open

    @asynccontextmanager
    async def passing(self, *, is_awaited: bool = True) -> AsyncIterator[None]:
        """Wait until the gate is open, and count as inside until the block ends, where a `drain` is to wait for it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_open)
            self._num_inside += is_awaited
        try:
            yield
        finally:
            self._num_inside -= is_awaited
            if not self._num_inside:
                await asyncio.shield(self._notify())

    async def close(self) -> None:
        """Admit no further generation; those inside continue."""
        async with self._changed:
            self._is_open = False

    async def drain(self) -> None:
        """Admit no further generation, and return once none is inside or the gate was opened again."""
        async with self._changed:
            self._is_open = False
            await self._changed.wait_for(lambda: self._is_open or not self._num_inside)

    async def open(self) -> None:
        """Admit all waiting generations."""
        async with self._changed:
            self._is_open = True
            self._changed.notify_all()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
