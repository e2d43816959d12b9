"""Several things at the same time, of which the first error ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from grpo_engine.errors import GrpoError

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order; cancelling this cancels all.

    Raises:
        GrpoError: the first of one of them, as it was raised there; the others have been cancelled.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each) for each in work]
    except* GrpoError as errors:
        raise first_error(errors) from None
    return [task.result() for task in running]


def first_error(errors: BaseExceptionGroup[GrpoError]) -> GrpoError:
    """The first error inside a group of them, however deep it lies."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GrpoError)
    return error
