"""Concurrent work: daemon threads for blocking calls, and gathering of coroutines.

`asyncio.to_thread` is joined when the loop closes and when the interpreter exits, so a reward function that never
returns would block the exit on SIGTERM. Daemon threads are not joined.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

from grpo_engine.errors import GrpoError

T = TypeVar("T")


class Threads:
    """A fixed number of threads that run calls from one queue."""

    def __init__(self, count: int) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_replaced = 0
        self._lock = threading.Lock()
        for _ in range(count):
            self._start()

    def submit(self, function: Callable[[], T]) -> tuple[Future[None], Future[T]]:
        """Call `function` once a thread is free; returns futures for its start and for its result."""
        begun: Future[None] = Future()
        ended: Future[T] = Future()

        def call() -> None:
            if not (begun.set_running_or_notify_cancel() and ended.set_running_or_notify_cancel()):
                return
            begun.set_result(None)
            try:
                result = function()
            # Any exception is raised where the future is awaited.
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(result)

        self._calls.put(call)
        return begun, ended

    def replace_hung_thread(self) -> None:
        """Start a thread in place of one whose call hangs; if that call returns later, its thread ends."""
        with self._lock:
            self._num_replaced += 1
        self._start()

    def _start(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._calls.get()()
            with self._lock:
                if self._num_replaced:
                    self._num_replaced -= 1
                    return


async def run_in_thread(function: Callable[[], T]) -> T:
    """Run `function` in a shared thread; there are few, because the GIL serializes them anyway."""
    _, ended = _shared_threads().submit(function)
    return await asyncio.wrap_future(ended)


@cache
def _shared_threads() -> Threads:
    return Threads(4)


@cache
def background_loop() -> asyncio.AbstractEventLoop:
    """An event loop in its own thread, for user coroutines that may block: they block only each other."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def run_in_background_loop(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in the background loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop())


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all coroutines, in order; cancelling this cancels all.

    Raises:
        GrpoError: the first one raised; the other coroutines are cancelled.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each) for each in work]
    except* GrpoError as errors:
        raise first_error(errors) from None
    return [task.result() for task in running]


def first_error(errors: BaseExceptionGroup[GrpoError]) -> GrpoError:
    """The first error in a group, also in nested groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GrpoError)
    return error
