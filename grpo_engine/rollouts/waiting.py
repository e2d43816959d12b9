"""Requests that are held until something is true, as long as they have patience."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Waiting:
    """Who waits for what. To be used from one event loop.

    Hundreds may wait while hundreds of groups a second arrive, so whoever waits is woken when what it waits for is
    true, and not to look.
    """

    def __init__(self) -> None:
        self._waiting: dict[object, tuple[Callable[[], bool], asyncio.Future[None]]] = {}
        """In the order in which they came."""

    def tell(self) -> None:
        """Something changed."""
        for condition, told in self._waiting.values():
            if not told.done() and condition():
                told.set_result(None)

    async def until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait for `condition`, which holds when this returns; False when it did not by `deadline` on the loop's clock.

        Of several that wait for the same, those that came first go first, and what they do can make it untrue for the
        others.
        """
        loop, place = asyncio.get_running_loop(), object()
        try:
            async with asyncio.timeout_at(deadline):
                while not condition():
                    self._waiting[place] = condition, loop.create_future()
                    await self._waiting[place][1]
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(place, None)
        return True
