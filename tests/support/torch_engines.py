"""The torch engine in the test's own process, and its decoding held where a test wants it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_engine.server.config import ServerConfig
from grpo_engine.server.http.app import Service, create_app
from grpo_engine.server.torch.decoding import Decoder
from grpo_engine.server.torch.engine import TorchEngine


@asynccontextmanager
async def served_engine(
    model: Path, *, stalled_after_s: float = 120
) -> AsyncIterator[tuple[TorchEngine, httpx.AsyncClient]]:
    """A loaded engine on torch behind our routes, without a process around it."""
    config = ServerConfig(
        model_name=str(model),
        engine="torch",
        device="cpu",
        dtype="float32",
        max_model_len=64,
        threads=1,
        stalled_after_s=stalled_after_s,
    )
    engine = TorchEngine(config, instance="test", environment={})
    engine.start()
    await asyncio.to_thread(engine.wait_loaded)
    app = create_app(Service(engine=engine, config=config, instance="test"))
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield engine, client
    finally:
        await engine.close()


@dataclass(slots=True)
class HeldSteps:
    """Steps of decoding that wait."""

    _is_held: threading.Event = field(default_factory=threading.Event)
    _may_go_on: threading.Event = field(default_factory=threading.Event)

    async def wait_held(self) -> None:
        """Wait until a step waits."""
        assert await asyncio.to_thread(self._is_held.wait, 60)

    def go_on(self) -> None:
        """Let it go on, and all after it."""
        self._may_go_on.set()

    def hold(self) -> None:
        self._is_held.set()
        assert self._may_go_on.wait(60)


@contextmanager
def held_steps(*, after: int = 0) -> Iterator[HeldSteps]:
    """Hold the decoding of this process before the step that follows the first `after`; the prompt's is not counted."""
    held, step, num_free = HeldSteps(), Decoder._step, after

    def holding_step(*arguments: Any) -> Any:
        nonlocal num_free
        if num_free:
            num_free -= 1
        else:
            held.hold()
        return step(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "_step", holding_step)
        try:
            yield held
        finally:
            held.go_on()
