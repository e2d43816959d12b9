"""Many environments in one process: names and registrations of their own, shared connections and posts."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from environment_runs import at_work, served_run, settings
from rollout_fakes import fake_inference

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.errors import ConfigError
from grpo_engine.flags import parse_flags
from grpo_engine.wire.spread_transport import CONNECTIONS_A_POOL, SpreadTransport, spread_transport

NUM_TOGETHER = 2 * CONNECTIONS_A_POOL + 2


def answer_of(prompt: str, index: int) -> str:
    return "123456"[: index + 1]


def config(**changes: Any) -> EnvironmentConfig:
    return settings("http://127.0.0.1:1", "http://127.0.0.1:2", **changes)


def test_copies_have_names_seeds_and_state_files_of_their_own() -> None:
    copies = config(copies=3, seed=7, state_file="/run/env.items.json", use_wandb=True).of_copies()
    assert [each.registered_name() for each in copies] == ["sort6-1", "sort6-2", "sort6-3"]
    assert [each.seed for each in copies] == [7, 8, 9]
    assert [each.state_file for each in copies] == [Path(f"/run/env.items-{n}.json") for n in (1, 2, 3)]
    assert [each.use_wandb for each in copies] == [True, False, False]
    one = config(name="mine")
    assert one.of_copies() == [one]


def test_guaranteed_shares_of_copies_fit_into_a_batch() -> None:
    words = ["--task", "sort6", "--model", "m", "--copies", "5", "--min-batch-allocation", "0.3"]
    with pytest.raises(ConfigError, match=r"min_batch_allocation 0\.3 is of each of 5 copies"):
        parse_flags(EnvironmentConfig, words, prog="p", description="")


@pytest.mark.slow
async def test_each_copy_is_registered_and_every_group_carries_its_id_once() -> None:
    with served_run(fake_inference(answer_of), batch_size=80, num_steps=10) as (api, inference, source):
        async with at_work(settings(api, inference, copies=20, max_workers=1, max_batches_offpolicy=8)):
            senders: Counter[int | None] = Counter()
            while len(senders) < 20:
                batch = await asyncio.to_thread(source.poll)
                senders.update(group.env_id for group in batch or [])
            async with httpx.AsyncClient(base_url=api) as client:
                names = (await client.get("/status")).json()["environments"]
            assert sorted(names) == sorted(f"sort6-{number}_0" for number in range(1, 21))
        assert set(senders) == set(range(20))
        async with httpx.AsyncClient(base_url=api) as client:
            assert (await client.get("/status")).json()["environments"] == []  # all have disconnected


async def test_requests_are_spread_over_pools_and_idle_connections_used_again() -> None:
    used: list[int] = []
    may_answer = asyncio.Barrier(NUM_TOGETHER)

    class Pool(httpx.AsyncBaseTransport):
        def __init__(self, number: int) -> None:
            self.number = number

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            used.append(self.number)
            if request.url.path == "/fails":
                raise httpx.ConnectError("refused", request=request)
            if request.url.path == "/together":
                await may_answer.wait()
            return httpx.Response(200, stream=httpx.ByteStream(b"ok"))

    transport = SpreadTransport([Pool(number) for number in range(2)])
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        for _ in range(2):
            with pytest.raises(httpx.ConnectError):
                await client.get("/fails")  # which is open no more
        answers = await asyncio.gather(*(client.get("/together") for _ in range(NUM_TOGETHER)))
        assert [each.text for each in answers] == ["ok"] * NUM_TOGETHER
        assert used == [0, 0, *[0] * CONNECTIONS_A_POOL, *[1] * CONNECTIONS_A_POOL, 0, 1]  # the last two find no room
        for _ in range(3):
            await client.get("/")
        assert used[-3:] == [0, 0, 0]


async def test_a_few_connections_are_one_pool() -> None:
    few = spread_transport(httpx.Limits(max_connections=CONNECTIONS_A_POOL))
    many = spread_transport(httpx.Limits(max_connections=CONNECTIONS_A_POOL + 1))
    assert isinstance(few, httpx.AsyncHTTPTransport)
    assert isinstance(many, SpreadTransport)
    for each in (few, many):
        await each.aclose()
