"""How many sequences of vLLM's batch requests without the token may have beside those of the run.

vLLM serves requests in the order in which they come: a few hundred of another user of the machine would hold the run
for as long as they take. For one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from grpo_engine.errors import DataError
from grpo_engine.serving.access import Token

SHARE = 1 / 4
"""Of all sequences, for requests without the token while the run has requests."""
RUN_HAS_LEFT_S = 600.0
"""Without a request of the run for so long, the others have the whole batch."""


class Slots:
    """Those of one server."""

    def __init__(self, total: int) -> None:
        """All are free; `total` is how many sequences vLLM decodes at a time."""
        self._total = total
        self._num_taken = 0
        """By requests without the token."""
        self._last_of_run_s: float | None = None
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def taken(self, token: Token, n: int) -> AsyncIterator[None]:
        """Wait for room for a request of `n` sequences, and have it until the block ends; with the token at once.

        Raises:
            DataError: there will be no room for so many beside the run's.
        """
        if token is not Token.WRONG:
            self._last_of_run_s = time.monotonic()
            yield
            return
        async with self._freed:
            while self._num_taken + n > self._num_free(n):
                await self._freed.wait()
            self._num_taken += n
        try:
            yield
        finally:
            self._num_taken -= n
            await asyncio.shield(self._notify())

    def _num_free(self, n: int) -> int:
        """How many sequences requests without the token may have together, where one of `n` is next."""
        is_run_here = self._last_of_run_s is not None and time.monotonic() - self._last_of_run_s < RUN_HAS_LEFT_S
        if not is_run_here:
            return max(self._total, n)
        share = max(1, int(SHARE * self._total))
        if n > share:
            raise DataError(
                f"n: {n}, but beside the run's, requests without its token have {share} sequences: send the token, or "
                "ask for fewer at a time"
            )
        return share

    async def _notify(self) -> None:
        async with self._freed:
            self._freed.notify_all()
