"""Work beside the event loop, in daemon threads: a scorer that hangs must not keep its environment from ending.

`asyncio.to_thread` is waited for when the loop closes and again when the interpreter ends; a reward function that never
returns would hold up SIGTERM for ever.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """A fixed number of threads that do one call after another."""

    def __init__(self, count: int) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_given_up = 0
        self._lock = threading.Lock()
        for _ in range(count):
            self._start()

    def submit(self, function: Callable[[], T]) -> tuple[Future[None], Future[T]]:
        """Call `function` as soon as a thread is free: what is done when it begins, and when it has ended."""
        begun: Future[None] = Future()
        ended: Future[T] = Future()

        def call() -> None:
            if not (begun.set_running_or_notify_cancel() and ended.set_running_or_notify_cancel()):
                return
            begun.set_result(None)
            try:
                result = function()
            # Whatever it is belongs to whoever waits for the call.
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(result)

        self._calls.put(call)
        return begun, ended

    def give_one_up(self) -> None:
        """Put another thread in the place of one whose call does not end; should it end after all, so does that one."""
        with self._lock:
            self._num_given_up += 1
        self._start()

    def _start(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._calls.get()()
            with self._lock:
                if self._num_given_up:
                    self._num_given_up -= 1
                    return


async def in_a_thread(function: Callable[[], T]) -> T:
    """What `function` returns; few calls at the same time, because they share one interpreter lock anyway."""
    _, ended = _shared_threads().submit(function)
    return await asyncio.wrap_future(ended)


@cache
def _shared_threads() -> Threads:
    return Threads(4)


@cache
def background_loop() -> asyncio.AbstractEventLoop:
    """An event loop of its own thread, for coroutines that may block: they hold up each other, not the environment."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def in_the_background(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in the background loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop())
