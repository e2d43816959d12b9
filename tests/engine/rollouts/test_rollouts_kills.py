"""`kill -9` of the rollout API under load, at random moments: every accepted group is delivered.

- A post that was answered 200 is on the disk before the answer goes out.
- Our environments repeat a post under its sender and number (`clients.RolloutApi`) until it is answered. The number is
  stored in the transaction of the groups, so they are stored once.
- A post of a stock environment without an answer may or may not be stored, and its repetition cannot be told from
  another group: it is delivered at most once for each time that it was sent. Here each attempt has its own name.
- A trainer that acknowledges leases gets every group in exactly one lease; one that is offered again has the same id.
- A window gives up its oldest groups for new ones, and nothing else: each group is delivered at most once, and what is
  neither delivered nor queued was followed by as many others as the window holds.
- A stock trainer acknowledges by asking again, which says nothing about a batch whose answer a kill cut off. After a
  restart the last batch is offered again: a group is delivered twice only in the last batch before a kill.

`ROLLOUT_KILLS=100` makes the long version.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_fakes import REGISTRATION, group
from rollout_processes import ApiProcess, api_process

from grpo_engine.environments.clients import RolloutApi
from grpo_engine.wire.rollouts import ScoredGroup

pytestmark = pytest.mark.slow

NUM_KILLS = int(os.environ.get("ROLLOUT_KILLS", "4"))
BATCH_SIZE = 8
WINDOW = ("--buffer", "window", "--buffer-capacity", "32")
CAPACITY = 32


def named_group(name: str, num_sequences: int, num_characters: int) -> dict[str, Any]:
    """A group that can be told from all others."""
    return group(num_sequences, generation_params={"name": name, "text": "x" * num_characters})


def names(batch: list[dict[str, Any]]) -> list[str]:
    return [item["generation_params"]["name"] for item in batch]


@dataclass
class Load:
    """Clients that post and fetch until `is_over`, and what they were answered."""

    url: str
    seed: int
    is_over: bool = False
    accepted: dict[str, int] = field(default_factory=dict)
    """Sequences of the groups that were answered with 200, in the order of the answers."""
    num_sent_before: dict[str, int] = field(default_factory=dict)
    """Of all clients, how many sequences when a group was sent first."""
    num_sent: int = 0
    unanswered: set[str] = field(default_factory=set)
    """Sent by a stock environment, and perhaps stored."""
    batches: list[list[str]] = field(default_factory=list)
    """What the trainer got, in order."""
    has_accepted: asyncio.Event = field(default_factory=asyncio.Event)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=30)

    def a_group(self, chance: random.Random) -> dict[str, Any]:
        size, name = chance.choice([1, 2, 4]), secrets.token_hex(8)
        self.num_sent_before[name] = self.num_sent
        self.num_sent += size
        return named_group(name, size, chance.choice([0, 0, 2_000, 100_000]))

    async def our_environment(self, number: int) -> None:
        """Sends one or several groups under a number until they are answered."""
        chance = random.Random(f"{self.seed} ours {number}")
        async with self.client() as http:
            api = RolloutApi(http)
            while not self.is_over:
                groups = [self.a_group(chance) for _ in range(chance.choice([1, 1, 3]))]
                await api.post([ScoredGroup.model_validate(each) for each in groups])
                self.accept(*groups)

    async def stock_environment(self, number: int) -> None:
        """Sends each group once."""
        chance = random.Random(f"{self.seed} stock {number}")
        async with self.client() as http:
            while not self.is_over:
                each = self.a_group(chance)
                try:
                    answer = await http.post("/scored_data", json=each)
                except httpx.TransportError:
                    self.unanswered.update(names([each]))
                    await asyncio.sleep(0.01)  # requests without a pause would slow its restart
                    continue
                assert answer.status_code == 200, answer.text
                self.accept(each)

    def accept(self, *accepted: dict[str, Any]) -> None:
        self.accepted |= {name: len(each["tokens"]) for each in accepted for name in names([each])}
        self.has_accepted.set()

    async def explicit_trainer(self) -> None:
        """Acknowledges each lease with the next request."""
        known: set[str] = set()
        lease = ""

        async def fetch(http: httpx.AsyncClient) -> bool:
            nonlocal lease
            answer = (await http.get("/batch", params={"ack": lease, "wait_s": 0.5})).raise_for_status().json()
            if answer["batch"] is None:
                return False
            lease = answer["lease"]
            if lease not in known:
                known.add(lease)
                self.batches.append(names(answer["batch"]))
            return True

        await self._train(fetch)

    async def stock_trainer(self) -> None:
        """Knows nothing of leases."""

        async def fetch(http: httpx.AsyncClient) -> bool:
            answer = (await http.get("/batch")).raise_for_status().json()
            if answer["batch"] is None:
                await asyncio.sleep(0.02)  # a stock trainer waits a second
                return False
            self.batches.append(names(answer["batch"]))
            return True

        await self._train(fetch)

    async def _train(self, fetch: Callable[[httpx.AsyncClient], Awaitable[bool]]) -> None:
        async with self.client() as http:
            while True:
                was_over = self.is_over
                try:
                    has_come = await fetch(http)
                except httpx.TransportError:
                    await asyncio.sleep(0.01)
                    continue
                if was_over and not has_come:
                    return


async def kill_repeatedly(api: ApiProcess, load: Load, num_kills: int) -> None:
    """Each time after a random number of answers; now and then twice in a row."""
    chance = random.Random(load.seed)
    for _ in range(num_kills):
        goal = len(load.accepted) + chance.randint(1, 150)
        while len(load.accepted) < goal:
            load.has_accepted.clear()
            await load.has_accepted.wait()
        api.kill()
        api.start()
        if chance.random() < 0.2:
            api.restart()
        await asyncio.to_thread(api.wait_until_ready)


async def register(load: Load) -> None:
    async with load.client() as http:
        run = {**REGISTRATION, "batch_size": BATCH_SIZE, "num_steps": 0}
        (await http.post("/register", json=run)).raise_for_status()


async def run_load(api: ApiProcess, load: Load, trainer: Awaitable[None]) -> None:
    """Run environments and a trainer during the kills, until no batch can form."""
    await register(load)
    environments = [load.our_environment(number) for number in range(2)]
    environments += [load.stock_environment(number) for number in range(2)]
    async with asyncio.TaskGroup() as clients:
        producing = [clients.create_task(environment) for environment in environments]
        training = clients.create_task(trainer)
        await kill_repeatedly(api, load, NUM_KILLS)
        load.is_over = True
        await asyncio.gather(*producing)
        await training


async def num_queued(load: Load) -> int:
    """Sequences that wait in the API."""
    async with load.client() as http:
        return int((await http.get("/status")).json()["queued_sequences"])


async def fill_up(load: Load) -> None:
    """Add what whole groups that do not add up wait for."""
    async with load.client() as http:
        for _ in range(-await num_queued(load) % BATCH_SIZE):
            each = named_group(secrets.token_hex(8), 1, 0)
            (await http.post("/scored_data", json=each)).raise_for_status()
            load.accept(each)


async def test_an_explicit_client_gets_each_accepted_group_exactly_once(tmp_path: Path) -> None:
    with api_process(tmp_path) as api:
        load = Load(api.url, seed=1)
        await run_load(api, load, load.explicit_trainer())
        await fill_up(load)
        await load.explicit_trainer()
    times = Counter(name for batch in load.batches for name in batch)
    assert set(times.values()) == {1}
    assert load.accepted.keys() <= times.keys()
    assert times.keys() <= load.accepted.keys() | load.unanswered
    assert len(load.accepted) > 20 * NUM_KILLS


@pytest.mark.extended("test_rollouts_model.py has stock trainers and kills, and the test above kills real processes")
async def test_a_stock_client_gets_groups_twice_only_after_a_kill(tmp_path: Path) -> None:
    with api_process(tmp_path) as api:
        load = Load(api.url, seed=2)
        await run_load(api, load, load.stock_trainer())
        await fill_up(load)
        await load.stock_trainer()
    times = Counter(name for batch in load.batches for name in batch)
    assert load.accepted.keys() <= times.keys()
    assert times.keys() <= load.accepted.keys() | load.unanswered
    repeated = [batch for batch in load.batches if times[batch[0]] > 1]
    assert all(times[name] == times[batch[0]] for batch in repeated for name in batch), "batches come again whole"
    assert len(load.batches) - len({tuple(batch) for batch in load.batches}) <= 2 * NUM_KILLS


async def test_a_window_that_was_killed_while_it_gave_up_groups_has_exactly_the_newest(tmp_path: Path) -> None:
    with api_process(tmp_path, *WINDOW) as api:
        load = Load(api.url, seed=3)
        await register(load)
        async with asyncio.TaskGroup() as clients:
            clients.create_task(load.our_environment(0))  # alone, so that the order of groups is that of the answers
            await kill_repeatedly(api, load, NUM_KILLS)
            load.is_over = True
        newest: dict[str, int] = {}
        for name, size in reversed(load.accepted.items()):
            if sum(newest.values()) + size > CAPACITY:
                break
            newest[name] = size
        api.restart()  # nothing is posted after it that would give up again what came back
        assert sum(load.accepted.values()) > 4 * CAPACITY
        assert await num_queued(load) == sum(newest.values())
        await load.explicit_trainer()
        delivered = [name for batch in load.batches for name in batch]
        assert len(delivered) == len(set(delivered))
        assert set(delivered) <= newest.keys()
        assert sum(newest[name] for name in delivered) + await num_queued(load) == sum(newest.values())


@pytest.mark.extended("the test above, and test_rollouts_buffer.py has windows, trainers and kills")
async def test_a_window_under_load_delivers_no_group_twice_and_keeps_the_last_ones(tmp_path: Path) -> None:
    with api_process(tmp_path, *WINDOW) as api:
        load = Load(api.url, seed=4)
        await run_load(api, load, load.explicit_trainer())
        num_left = await num_queued(load)
    times = Counter(name for batch in load.batches for name in batch)
    assert set(times.values()) == {1}
    assert times.keys() <= load.accepted.keys() | load.unanswered
    missing = {name: load.num_sent - load.num_sent_before[name] for name in load.accepted.keys() - times.keys()}
    assert len(missing) > 20
    assert sum(load.accepted[name] for name, num_since in missing.items() if num_since <= CAPACITY) <= num_left
