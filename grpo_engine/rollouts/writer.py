"""One thread that writes everything down, in the order in which it happened, many things with one sync of the disk.

Whoever asks while a transaction is on its way to the disk shares the next one, so that the disk's pace limits how long
an answer takes and not how many there are. A transaction that fails is undone whole; whatever was asked for after it
rests on it, and so fails too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from grpo_engine.rollouts.store import Store, Stored

ResultT = TypeVar("ResultT")


class NotWritten(Exception):
    """What was to be written is not in the file; says why."""


class Writer:
    """The only user of a store while the service runs. To be used from one event loop."""

    def __init__(self, store: Store, on_failure: Callable[[Stored, Exception], None]) -> None:
        """Nothing is written yet.

        Args:
            on_failure: told what the file holds when a transaction failed, before anybody hears of it.
        """
        self._store = store
        self._on_failure = on_failure
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-store")
        self._asked: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._fault: Exception | None = None
        """Why nobody knows what the file holds since a transaction failed; nothing is written until it was read."""
        self._working: asyncio.Task[None] | None = None

    def write(self, action: Callable[[], ResultT]) -> Awaitable[ResultT]:
        """What `action` returns, once it is on the disk; `action` calls methods of the store.

        Raises:
            NotWritten: it is not, and nothing of it.
        """
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._asked.append((action, result))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return result

    async def close(self) -> None:
        """Finish what was asked for, and let go of the file."""
        if self._working is not None:
            await self._working
        await self._in_thread(self._store.close)
        self._thread.shutdown()

    async def _work(self) -> None:
        while self._asked:
            together, self._asked = self._asked, []
            try:
                if self._fault is not None:
                    raise self._fault
                results = await self._in_thread(partial(self._store.commit, [action for action, _ in together]))
            except Exception as error:  # whatever it is, nobody may be left waiting
                await self._give_up([result for _, result in together], error)
            else:
                for (_, asked), result in zip(together, results, strict=True):
                    if not asked.done():  # whoever asked may have gone
                        asked.set_result(result)

    async def _give_up(self, unwritten: list[asyncio.Future[Any]], error: Exception) -> None:
        self._fault = error
        try:
            stored = await self._in_thread(self._store.load)
            unwritten += [result for _, result in self._asked]
            self._asked = []
            self._on_failure(stored, error)
            self._fault = None
        except Exception as unreadable:
            self._fault = error = unreadable
        for result in unwritten:
            if not result.done():
                result.set_exception(NotWritten(str(error) or type(error).__name__))

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
