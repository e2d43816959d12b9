"""What vLLM's engine core sends, on its way to the requests, which themselves learn of their end alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class Outputs:
    """Heard between `engine_core.get_output_async()`, as vLLM 0.20 to 0.33 await it, and the requests.

    vLLM takes one message in before it awaits the next.
    """

    def __init__(self, llm: AsyncLLM, on_output: Callable[[], None]) -> None:
        """Have `on_output` called for each message."""
        self._llm, self._core = llm, llm.engine_core
        self._is_awaited = False
        self.are_heard = False
        """Whether a message has come: the mark of this patch."""
        core = self._core
        get_output = core.get_output_async

        async def heard() -> Any:
            self._is_awaited = True
            output = await get_output()
            self._is_awaited, self.are_heard = False, True
            on_output()
            return output

        core.get_output_async = heard

    async def drained(self) -> None:
        """Return once every message that has come is taken in."""
        # A few turns of the loop; nobody tells of the last message.
        while not (self._is_awaited and self._core.outputs_queue.empty()) and not self._llm.errored:  # noqa: ASYNC110
            await asyncio.sleep(0)
