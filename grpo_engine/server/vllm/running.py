"""Running requests on vLLM: every message of the engine core, and the policy version of every token.

Weights may change while requests are frozen between two steps. Tokens sampled before the change are of the old version,
later ones of the new version, so it is enough to record at each change how long every completion was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Lengths = Mapping[tuple[str, int], int]
"""`(request, index of the completion) -> tokens so far`, of every completion that has not finished."""


@dataclass(slots=True)
class TokenVersions:
    """Policy versions of one request."""

    first: int
    """Version under which it began."""
    changes: list[tuple[int, dict[int, int]]] = field(default_factory=list)
    """A later version, and how many tokens each unfinished completion (by its index) had before it."""

    def of(self, index: int, num_tokens: int) -> list[int]:
        """The version of each token of a completion that finished with `num_tokens`."""
        versions = [self.first] * num_tokens
        for version, lengths in self.changes:
            if index in lengths:  # a completion that had finished got no token of the new version
                start = lengths[index]
                versions[start:] = [version] * (num_tokens - start)
        return versions


class RunningVersions:
    """Policy versions of all running requests."""

    def __init__(self) -> None:
        self._running: dict[str, TokenVersions] = {}

    @contextmanager
    def request(self, request_id: str, version: int) -> Iterator[TokenVersions]:
        """Track a request that begins under `version` until the block ends."""
        versions = self._running[request_id] = TokenVersions(version)
        try:
            yield versions
        finally:
            del self._running[request_id]

    def change(self, version: int, lengths: Lengths) -> None:
        """Record that every further token is of `version`."""
        for (request_id, index), length in lengths.items():
            if (versions := self._running.get(request_id)) is not None:
                if not versions.changes or versions.changes[-1][0] != version:
                    versions.changes.append((version, {}))
                versions.changes[-1][1][index] = length


def lengths_so_far(output_processor: Any) -> dict[tuple[str, int], int]:
    """How long the completions are that vLLM's `OutputProcessor` is assembling (0.26 to 0.33)."""
    return {
        (state.external_req_id, state.request_index): state.detokenizer.num_output_tokens()
        for state in output_processor.request_states.values()
        if state.detokenizer is not None
    }


class CoreOutputs:
    """Calls back for every message of the engine core: vLLM itself reports only the end of a request.

    Wraps `engine_core.get_output_async()`, which vLLM 0.20 to 0.33 await; each message is processed before the next
    one is awaited.
    """

    def __init__(self, llm: AsyncLLM, on_output: Callable[[Any], None]) -> None:
        """
        Args:
            on_output: takes each message (`EngineCoreOutputs`).
        """
        self._llm, self._core = llm, llm.engine_core
        self._is_awaited = False
        self.has_output = False
        """Whether a message has arrived: it shows that this patch is in place."""
        get_output = self._core.get_output_async

        async def get_and_report() -> Any:
            self._is_awaited = True
            output = await get_output()
            self._is_awaited, self.has_output = False, True
            on_output(output)
            return output

        self._core.get_output_async = get_and_report

    async def drained(self) -> None:
        """Return once every message that has arrived is processed."""
        # A few turns of the loop; there is no event for the last message.
        while not (self._is_awaited and self._core.outputs_queue.empty()) and not self._llm.errored:  # noqa: ASYNC110
            await asyncio.sleep(0)
