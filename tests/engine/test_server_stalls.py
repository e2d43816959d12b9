"""An engine that hangs is told from one that is slow, paused, or has nothing to do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from serving import save_tiny_model

from grpo_engine.server.app import Service, create_app
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.decoding import Decoder
from grpo_engine.server.engine import EngineStalled
from grpo_engine.server.pulse import Pulse
from grpo_engine.server.torch_engine import TorchEngine

REQUEST = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}


def test_an_engine_is_stalled_when_it_has_work_and_gives_nothing_for_too_long() -> None:
    pulse = Pulse(10)
    assert not pulse.is_stalled(1e6)  # idle
    pulse.enter(100)
    pulse.enter(109)
    assert not pulse.is_stalled(109.9)
    assert pulse.is_stalled(110)
    with pytest.raises(EngineStalled, match="no sign of life for 12 s"):
        pulse.check(112)
    pulse.beat(113)
    pulse.check(122.9)
    assert pulse.is_stalled(123)


def test_an_engine_without_work_is_well_however_long() -> None:
    pulse = Pulse(10)
    pulse.enter(0)
    pulse.beat(1)
    pulse.leave(1)
    assert not pulse.is_stalled(1e6)
    pulse.enter(2)
    pulse.leave(3)  # given up before long
    pulse.check(1e6)
    pulse.enter(1e6)
    pulse.check(1e6 + 9)


def test_a_stall_outlasts_those_who_give_up_over_it() -> None:
    pulse = Pulse(10)
    pulse.enter(0)
    pulse.leave(20)
    assert pulse.is_stalled(20)
    pulse.enter(21)
    assert pulse.is_stalled(21)
    pulse.beat(22)
    pulse.check(23)
    pulse.leave(23)
    pulse.check(1e6)


def test_what_rests_in_a_paused_engine_is_no_stall_but_a_question_to_it_is() -> None:
    pulse = Pulse(10)
    pulse.enter(0)
    pulse.enter(0)
    pulse.rest()
    pulse.check(1e6)
    pulse.leave(1e6)  # one that gave up
    pulse.ask(1e6)  # a checkpoint is to be read
    pulse.leave(1e6)  # another one
    pulse.enter(1e6)  # a client that reads on
    assert pulse.is_stalled(1e6 + 10)
    pulse.beat(1e6 + 11)
    pulse.answer(1e6 + 11)
    pulse.check(2e6)
    pulse.go_on(2e6)
    assert pulse.is_stalled(2e6 + 10)


@asynccontextmanager
async def served(folder: Path, *, stalled_after_s: float = 120) -> AsyncIterator[tuple[TorchEngine, httpx.AsyncClient]]:
    """A loaded engine on torch behind our routes, without a process around it."""
    config = ServerConfig(
        model_name=str(save_tiny_model(folder / "model", seed=1)),
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


@pytest.mark.slow
async def test_health_tells_of_a_decode_step_that_hangs_until_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, may_go_on, step = threading.Event(), threading.Event(), Decoder._step

    def hanging_step(*arguments: object) -> object:
        hangs.set()
        assert may_go_on.wait(60)
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "_step", hanging_step)
    async with served(tmp_path, stalled_after_s=1e-9) as (_, client):
        assert (await client.get("/health")).status_code == 200
        asking = asyncio.create_task(client.post("/generate", json=REQUEST))
        try:
            assert await asyncio.to_thread(hangs.wait, 60)
            stalled = await client.get("/health")
            refused = await client.post("/generate", json=REQUEST)
        finally:
            may_go_on.set()
        assert (stalled.status_code, stalled.json()["engine"]) == (503, "stalled")
        assert "no sign of life for 0 s" in stalled.json()["detail"]
        assert refused.status_code == 503
        assert (await asking).status_code == 200
        assert (await client.get("/health")).status_code == 200


@pytest.mark.slow
async def test_every_pass_through_the_model_is_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent_since: list[float | None] = []
    step = Decoder._step

    async with served(tmp_path) as (engine, client):

        def noting_step(*arguments: object) -> object:
            silent_since.append(engine._pulse._silent_since)
            return step(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(Decoder, "_step", noting_step)
        assert (await client.post("/generate", json=REQUEST)).status_code == 200
    assert len(silent_since) == 3
    assert silent_since == sorted(set(silent_since))  # type: ignore[type-var]


@pytest.mark.slow
async def test_requests_that_wait_for_a_weight_hand_over_are_no_stall(tmp_path: Path) -> None:
    async with served(tmp_path, stalled_after_s=1e-9) as (engine, client):
        (await client.post("/bridge/pause", json={})).raise_for_status()
        asking = asyncio.create_task(client.post("/generate", json=REQUEST))
        while not engine._waiting:
            await asyncio.wait({asking}, timeout=0.01)
            assert not asking.done()
        assert (await client.get("/health")).status_code == 200
        (await client.post("/bridge/resume", json={})).raise_for_status()
        assert (await asking).status_code == 200
