"""Adapters on vLLM: the one that new requests use, and earlier ones on which requests still run.

Each has a unique name and number, because vLLM keys its caches by them. An adapter is unloaded when it is no longer
served and its last request has finished.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_engine.errors import ModelError
from grpo_engine.server.adapter_files import refuse_unbound
from grpo_engine.server.engine import Adapter

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


class VllmAdapters:
    """The loaded adapters; the engine's lock must be held to change which one is served."""

    def __init__(self, model_name: str, awaiting_core: Callable[[], AbstractContextManager[None]]) -> None:
        """Start without an adapter.

        Args:
            awaiting_core: entered around each command to the engine core.
        """
        self._model_name = model_name
        self._awaiting_core = awaiting_core
        self.served: Adapter | None = None
        self.lora: LoRARequest | None = None
        """`served`, as vLLM's request type."""
        self._numbers = itertools.count(1)
        """vLLM never loads a number twice, so the number of a failed load is not reused."""
        self._num_loaded = 0
        self._users: Counter[LoRARequest] = Counter()
        """Number of running requests of each adapter."""

    async def load(self, llm: AsyncLLM, path: Path, modules: list[str]) -> LoRARequest:
        """Load an adapter beside the served one; a failed load is undone.

        Raises:
            ModelError: it is not an adapter for this model.
        """
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        lora = LoRARequest(lora_name=f"adapter-{number}", lora_int_id=number, lora_path=str(path))
        with self._awaiting_core():
            answers: list[Any] = await llm.collective_rpc(
                "grpo_load_adapter", args=(lora.lora_int_id, lora.lora_name, lora.lora_path, modules)
            )
        try:
            for answer in answers:
                if problem := answer.get("problem"):
                    raise ModelError(f"{lora.lora_path}: not an adapter for this model: {problem}")
                refuse_unbound(path, answer["unbound"], self._model_name)
        except ModelError:
            with self._awaiting_core():
                await llm.remove_lora(lora.lora_int_id)
            raise
        self._num_loaded += 1
        return lora

    def described(self, lora: LoRARequest, name: str) -> Adapter:
        """The description of the adapter that was loaded last."""
        return Adapter(
            name=name,
            path=lora.lora_path,
            number=self._num_loaded,
            paths_in_use=tuple(each.lora_path for each, count in self._users.items() if count),
        )

    def serve(self, lora: LoRARequest | None, adapter: Adapter | None) -> None:
        """Use this adapter, or none, for requests from now on."""
        self.lora, self.served = lora, adapter

    @asynccontextmanager
    async def using(self, llm: AsyncLLM, lora: LoRARequest | None) -> AsyncIterator[None]:
        """Keep an adapter loaded until the block ends."""
        if lora is None:
            yield
            return
        self._users[lora] += 1
        try:
            yield
        finally:
            self._users[lora] -= 1
            await self.drop_if_unused(llm, lora)

    async def drop_if_unused(self, llm: AsyncLLM, lora: LoRARequest | None) -> None:
        """Unload an adapter that is neither served nor used by a request."""
        if lora is None or lora is self.lora or self._users[lora]:
            return
        del self._users[lora]
        with self._awaiting_core():
            await llm.remove_lora(lora.lora_int_id)
