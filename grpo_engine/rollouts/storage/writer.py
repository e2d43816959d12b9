"""The writer thread: all writes in the order of the changes, many per sync of the disk.

Writes that are requested while a transaction is in progress share the next one, so the disk limits the latency of an
answer and not their number. A transaction that fails is rolled back as a whole; all writes requested after it depend on
it, and fail too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from grpo_engine.rollouts.state.records import Stored
from grpo_engine.rollouts.storage.store import Store

ResultT = TypeVar("ResultT")


class NotWritten(Exception):
    """A write failed and is not in the file; carries the reason."""


class Writer:
    """The only user of a store while the service runs; use it from one event loop."""

    def __init__(self, store: Store, on_failure: Callable[[Stored, Exception], None]) -> None:
        """
        Args:
            on_failure: called with the content of the file after a failed transaction, before requests are answered.
        """
        self._store = store
        self._on_failure = on_failure
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-store")
        self._pending: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._fault: Exception | None = None
        """Error of a transaction after which the file could not be read; nothing is written until it was."""
        self._working: asyncio.Task[None] | None = None

    def write(self, action: Callable[[], ResultT]) -> Awaitable[ResultT]:
        """The result of `action`, once it is synced to disk; `action` calls methods of the store.

        Raises:
            NotWritten: it failed, and nothing of it was written.
        """
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._pending.append((action, result))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return result

    async def close(self) -> None:
        """Finish all pending writes and close the file."""
        if self._working is not None:
            await self._working
        await self._in_thread(self._store.close)
        self._thread.shutdown()

    async def _work(self) -> None:
        while self._pending:
            batch, self._pending = self._pending, []
            try:
                if self._fault is not None:
                    raise self._fault
                results = await self._in_thread(partial(self._store.commit, [action for action, _ in batch]))
            except Exception as error:  # whatever it is, every pending write must end
                await self._fail([result for _, result in batch], error)
            else:
                for (_, future), result in zip(batch, results, strict=True):
                    if not future.done():  # its request may have been cancelled
                        future.set_result(result)

    async def _fail(self, unwritten: list[asyncio.Future[Any]], error: Exception) -> None:
        self._fault = error
        try:
            stored = await self._in_thread(self._store.load)
            unwritten += [result for _, result in self._pending]
            self._pending = []
            self._on_failure(stored, error)
            self._fault = None
        except Exception as unreadable:
            self._fault = error = unreadable
        for result in unwritten:
            if not result.done():
                result.set_exception(NotWritten(str(error) or type(error).__name__))

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
