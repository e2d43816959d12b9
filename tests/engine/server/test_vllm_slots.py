"""How many sequences requests without the token have in vLLM's batch."""

from __future__ import annotations

import asyncio

import pytest

from grpo_engine.errors import DataError
from grpo_engine.server.vllm import slots as slots_module
from grpo_engine.server.vllm.slots import Slots
from grpo_engine.serving.access import Token


class Request:
    """One that runs until it is told to end."""

    def __init__(self, slots: Slots, token: Token, n: int) -> None:
        self.has_begun = False
        self._may_end = asyncio.Event()
        self._task = asyncio.create_task(self._run(slots, token, n))

    async def _run(self, slots: Slots, token: Token, n: int) -> None:
        async with slots.taken(token, n):
            self.has_begun = True
            await self._may_end.wait()

    async def end(self) -> None:
        self._may_end.set()
        await self._task

    async def cancel(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def begun(*requests: Request) -> list[bool]:
    for _ in range(20):
        await asyncio.sleep(0)
    return [each.has_begun for each in requests]


async def test_strangers_have_a_quarter_of_the_batch_beside_the_run_and_wait_for_each_other() -> None:
    slots = Slots(total=16)
    run = [Request(slots, Token.RIGHT, 400), Request(slots, Token.NONE_SET, 16)]
    assert await begun(*run) == [True, True]
    first, second, third = (Request(slots, Token.WRONG, 2) for _ in range(3))
    assert await begun(first, second, third, Request(slots, Token.RIGHT, 16)) == [True, True, False, True]
    with pytest.raises(DataError, match="n: 5, but beside the run's, requests without its token have 4 sequences"):
        await Request(slots, Token.WRONG, 5).end()
    await first.cancel()  # its client has gone
    assert await begun(third, Request(slots, Token.WRONG, 1)) == [True, False]
    await second.end()


async def test_without_a_request_of_the_run_strangers_have_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(total=16)
    first, many = Request(slots, Token.WRONG, 16), Request(slots, Token.WRONG, 400)
    assert await begun(first, many) == [True, False]
    await first.end()
    assert await begun(many) == [True]  # alone
    await many.end()
    assert await begun(Request(slots, Token.RIGHT, 1)) == [True]
    with pytest.raises(DataError):
        await Request(slots, Token.WRONG, 16).end()
    monkeypatch.setattr(slots_module, "RUN_HAS_LEFT_S", 0.0)
    assert await begun(Request(slots, Token.WRONG, 16)) == [True]
