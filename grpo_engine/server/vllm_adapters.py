"""Adapters on vLLM: the one that new requests take, and those on which running ones come to their end.

Each has a name and a number of its own, since vLLM keeps what it has cached by them; it is unloaded once it is not
served any more and its last request has ended.
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
    """Whoever changes which one is served holds the engine's lock; requests only use them."""

    def __init__(self, model_name: str, awaiting_core: Callable[[], AbstractContextManager[None]]) -> None:
        """Begin with none.

        Args:
            awaiting_core: entered around each question to the engine core.
        """
        self._model_name = model_name
        self._awaiting_core = awaiting_core
        self.served: Adapter | None = None
        self.lora: LoRARequest | None = None
        """The same as vLLM knows it."""
        self._numbers = itertools.count(1)
        """vLLM never reads a number twice, so one that failed is not used again."""
        self._num_loaded = 0
        self._users: Counter[LoRARequest] = Counter()
        """Requests that run on each adapter."""

    async def bring_in(self, llm: AsyncLLM, path: Path, modules: list[str]) -> LoRARequest:
        """Load an adapter beside the one that is served; one that fails leaves nothing.

        Raises:
            ModelError: it is none for this model.
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
        """What is told of the adapter that was brought in last."""
        return Adapter(
            name=name,
            path=lora.lora_path,
            number=self._num_loaded,
            paths_in_use=tuple(each.lora_path for each, count in self._users.items() if count),
        )

    def serve(self, lora: LoRARequest | None, adapter: Adapter | None) -> None:
        """Have requests take this one from now on, or none."""
        self.lora, self.served = lora, adapter

    @asynccontextmanager
    async def using(self, llm: AsyncLLM, lora: LoRARequest | None) -> AsyncIterator[None]:
        """Keep an adapter loaded within."""
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
        """Unload an adapter that is not served any more once its last request has ended."""
        if lora is None or lora is self.lora or self._users[lora]:
            return
        del self._users[lora]
        with self._awaiting_core():
            await llm.remove_lora(lora.lora_int_id)
