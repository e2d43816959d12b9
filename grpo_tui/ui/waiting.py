"""Wait for an event with a time limit."""

from __future__ import annotations

import asyncio
from contextlib import suppress


async def wait_at_most(event: asyncio.Event, seconds: float | None) -> None:
    """Return when the event is set, or after `seconds`; None waits without limit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
