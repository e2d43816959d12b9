"""A hanging engine is distinguished from a slow, a paused and an idle one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from torch_engines import held_steps, served_engine

from grpo_engine.server.engine import EngineStalled
from grpo_engine.server.stall_detector import StallDetector
from grpo_engine.server.torch.decoding import Decoder

REQUEST = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}


def test_an_engine_is_stalled_when_it_has_work_and_produces_nothing_for_too_long() -> None:
    stalls = StallDetector(10)
    assert not stalls.is_stalled(1e6)  # idle
    stalls.add_request(100)
    stalls.add_request(109)
    assert not stalls.is_stalled(109.9)
    assert stalls.is_stalled(110)
    with pytest.raises(EngineStalled, match="produced nothing for 12 s"):
        stalls.check(112)
    stalls.record_output(113)
    stalls.check(122.9)
    assert stalls.is_stalled(123)


def test_an_engine_without_work_is_never_stalled() -> None:
    stalls = StallDetector(10)
    stalls.add_request(0)
    stalls.record_output(1)
    stalls.remove_request(1)
    assert not stalls.is_stalled(1e6)
    stalls.add_request(2)
    stalls.remove_request(3)  # aborted
    stalls.check(1e6)
    stalls.add_request(1e6)
    stalls.check(1e6 + 9)


def test_a_stall_outlasts_the_requests_that_time_out() -> None:
    stalls = StallDetector(10)
    stalls.add_request(0)
    stalls.remove_request(20)
    assert stalls.is_stalled(20)
    stalls.add_request(21)
    assert stalls.is_stalled(21)
    stalls.record_output(22)
    stalls.check(23)
    stalls.remove_request(23)
    stalls.check(1e6)


def test_requests_in_a_paused_engine_are_no_stall_but_a_command_is() -> None:
    stalls = StallDetector(10)
    stalls.add_request(0)
    stalls.add_request(0)
    stalls.pause()
    stalls.check(1e6)
    stalls.remove_request(1e6)  # aborted
    stalls.add_command(1e6)  # such as a reload
    stalls.remove_request(1e6)  # another one
    stalls.add_request(1e6)
    assert stalls.is_stalled(1e6 + 10)
    stalls.record_output(1e6 + 11)
    stalls.remove_command(1e6 + 11)
    stalls.check(2e6)
    stalls.resume(2e6)
    assert stalls.is_stalled(2e6 + 10)


@pytest.mark.slow
async def test_health_reports_a_decode_step_that_hangs_until_it_continues(model_folder: Path) -> None:
    async with served_engine(model_folder, stalled_after_s=1e-9) as (_, client):
        assert (await client.get("/health")).status_code == 200
        with held_steps() as held:
            asking = asyncio.create_task(client.post("/generate", json=REQUEST))
            await held.wait_held()
            stalled = await client.get("/health")
            refused = await client.post("/generate", json=REQUEST)
        assert (stalled.status_code, stalled.json()["engine"]) == (503, "stalled")
        assert "produced nothing for 0 s" in stalled.json()["detail"]
        assert refused.status_code == 503
        assert (await asking).status_code == 200
        assert (await client.get("/health")).status_code == 200


@pytest.mark.slow
async def test_every_forward_pass_counts_as_output(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent_since: list[float | None] = []
    step = Decoder._step

    async with served_engine(model_folder) as (engine, client):

        def noting_step(*arguments: object) -> object:
            silent_since.append(engine._stalls._silent_since)
            return step(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(Decoder, "_step", noting_step)
        assert (await client.post("/generate", json=REQUEST)).status_code == 200
    assert len(silent_since) == 3
    assert silent_since == sorted(set(silent_since))  # type: ignore[type-var]


@pytest.mark.slow
async def test_requests_that_wait_for_a_weight_update_are_no_stall(model_folder: Path) -> None:
    async with served_engine(model_folder, stalled_after_s=1e-9) as (engine, client):
        (await client.post("/bridge/pause", json={})).raise_for_status()
        asking = asyncio.create_task(client.post("/generate", json=REQUEST))
        while not engine._waiting:
            await asyncio.wait({asking}, timeout=0.01)
            assert not asking.done()
        assert (await client.get("/health")).status_code == 200
        (await client.post("/bridge/resume", json={})).raise_for_status()
        assert (await asking).status_code == 200
