"""What a window and a replay buffer guarantee, over HTTP and kills: how often a group is delivered, and which are kept.

Hypothesis posts, fetches, acknowledges and kills; the model knows every group in the buffer with its deliveries. After
each step the buffer holds exactly the groups of the model (nothing is lost, and nothing comes back), within its
capacity; a batch holds each group once, and no group more often than `buffer_uses`; a batch that was not acknowledged
comes again as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pydantic import ValidationError
from rollout_fakes import ENVIRONMENT, REGISTRATION, api_client, group, rollout_app, tags

from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.state.batch_forming import QueuedGroup
from grpo_engine.rollouts.state.buffering import Buffering


async def begin(api: httpx.AsyncClient, **changes: Any) -> None:
    assert (await api.post("/register", json={**REGISTRATION, "num_steps": 0, **changes})).status_code == 200


async def fetch(api: httpx.AsyncClient, ack: str = "", version: int = 0) -> tuple[list[int], str]:
    """The tags of a batch, and its lease."""
    answer = (await api.get("/batch", params={"ack": ack, "policy_version": version})).json()
    return (tags(answer["batch"]), answer["lease"]) if answer["batch"] else ([], "")


async def test_a_replay_buffer_delivers_each_group_as_often_as_it_may_and_never_twice_in_a_batch() -> None:
    async with api_client(buffer="replay", buffer_uses=3) as api:
        await begin(api)
        for tag in (10, 11, 12, 13):
            await api.post("/scored_data", json=group(tag=tag))
        delivered: Counter[int] = Counter()
        batch, lease = await fetch(api)
        while batch:
            assert len(set(batch)) == len(batch) == 2
            delivered.update(batch)
            batch, lease = await fetch(api, lease)
        assert 10 <= delivered.total() <= 12, "at the end one group may be left over"
        assert max(delivered.values()) == 3


async def test_a_group_that_is_too_old_leaves_the_replay_buffer() -> None:
    async with api_client(buffer="replay", buffer_uses=99) as api:
        await begin(api, max_staleness=1)
        for tag, version in ((10, 3), (11, 3), (12, 4), (13, 4)):
            await api.post("/scored_data", json=group(tag=tag, policy_versions=[[0, 0, version, version]] * 2))
        lease = ""
        for _ in range(5):
            batch, lease = await fetch(api, lease, version=5)
            assert sorted(batch) == [12, 13]


async def test_environments_count_only_what_was_never_delivered() -> None:
    async with api_client(buffer="replay", buffer_uses=2) as api:
        await begin(api)
        await fetch(api)
        await api.post("/register-env", json=ENVIRONMENT)
        for tag in (10, 11):
            await api.post("/scored_data", json=group(tag=tag, env_id=0))
        _, lease = await fetch(api)
        await api.post("/acknowledge", params={"lease": lease})
        status = (await api.request("GET", "/status-env", json={"env_id": 0})).json()
        assert (status["queue_size"], status["self_queue_size"]) == (0, 0)
        assert len((await fetch(api))[0]) == 2, "they are delivered once more"


async def test_a_window_takes_new_groups_for_the_oldest_and_lets_nobody_wait() -> None:
    async with api_client(buffer="window", buffer_capacity=8, buffer_sampling="newest", hold_s=0) as api:
        await begin(api)
        for tag in range(10, 20):
            assert (await api.post("/scored_data", json=group(tag=tag))).status_code == 200
        assert (await fetch(api))[0] == [18, 19]
        assert "grpo_api_evicted_groups_total 6" in (await api.get("/metrics")).text


def test_sampling_by_advantage_prefers_groups_that_teach_more() -> None:
    groups = [QueuedGroup(id=id_, env_id=None, num_sequences=1, spread=spread) for id_, spread in enumerate((0, 1, 3))]
    buffering = Buffering(kind="replay", sampling="advantage")
    random = Random(7)
    first = Counter(buffering.in_order(groups, random)[0].id for _ in range(4000))
    assert first[0] == 0
    assert first[2] / 4000 == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"buffer_uses": 2}, "buffer_uses"),
        ({"buffer_sampling": "newest"}, "buffer_sampling"),
        ({"buffer": "window", "buffer_uses": 2}, "buffer_uses"),
    ],
)
def test_a_setting_without_effect_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=f"{named}: no effect with buffer"):
        ApiConfig(**given)


class AnyBuffer(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.num_lives = 0
        self.next_tag = 10
        self.sizes: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        """Deliveries of each group in the buffer."""
        self.lent: tuple[str, list[int]] | None = None

    @initialize(
        kind=st.sampled_from(["window", "replay"]),
        capacity=st.integers(1, 20),
        uses=st.integers(1, 3),
        sampling=st.sampled_from(["oldest", "newest", "uniform", "advantage"]),
        batch_size=st.integers(1, 6),
    )
    def begin(self, kind: str, capacity: int, uses: int, sampling: str, batch_size: int) -> None:
        self.settings: dict[str, Any] = {"buffer": kind, "buffer_capacity": capacity, "buffer_sampling": sampling}
        self.settings |= {"buffer_uses": uses} if kind == "replay" else {}
        self.capacity, self.max_uses = max(capacity, 2 * batch_size), uses if kind == "replay" else 1
        self.batch_size = batch_size
        self.start(self.folder / "0.sqlite")
        self.ask("POST", "/register", json={**REGISTRATION, "batch_size": batch_size, "num_steps": 0})

    def start(self, store: Path) -> None:
        self.store = store
        self.application = contextlib.ExitStack()
        config = ApiConfig(store=store, lease_s=3600, liveness_s=3600, hold_s=0, **self.settings)
        app = self.application.enter_context(rollout_app(config))
        self.life = app.router.lifespan_context(app)
        self.loop.run_until_complete(self.life.__aenter__())
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")

    def stop(self) -> None:
        self.loop.run_until_complete(self.http.aclose())
        self.loop.run_until_complete(self.life.__aexit__(None, None, None))
        self.application.close()

    def teardown(self) -> None:
        if self.num_lives or hasattr(self, "http"):
            self.stop()
        self.loop.close()
        shutil.rmtree(self.folder)

    def ask(self, method: str, path: str, **more: Any) -> Any:
        answer = self.loop.run_until_complete(self.http.request(method, path, **more))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def size(self, several: Any) -> int:
        return sum(self.sizes[tag] for tag in several)

    @rule(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5))
    def post(self, sizes: list[int]) -> None:
        made = [group(size, tag=self.next_tag + index) for index, size in enumerate(sizes)]
        self.ask("POST", "/scored_data_list", json=made)
        for size in sizes:
            self.sizes[self.next_tag], self.kept[self.next_tag] = size, 0
            self.next_tag += 1
            while self.size(self.kept) > self.capacity:
                del self.kept[min(self.kept)]

    @rule(is_acknowledged=st.booleans())
    def fetch(self, is_acknowledged: bool) -> None:
        lent = self.lent
        answer = self.ask("GET", "/batch", params={"ack": lent[0] if lent and is_acknowledged else ""})
        if lent and not is_acknowledged:
            assert (answer["lease"], tags(answer["batch"])) == lent
            return
        self.finish()
        if answer["batch"] is None:
            assert self.batch_size not in self.possible_sums()
            return
        batch = tags(answer["batch"])
        assert self.size(batch) == self.batch_size
        assert len(set(batch)) == len(batch)
        assert set(batch) <= self.kept.keys()
        self.lent = (answer["lease"], batch)
        self.deliveries = {tag: self.kept.pop(tag) + 1 for tag in batch}

    @rule()
    def acknowledge(self) -> None:
        if self.lent:
            self.ask("POST", "/acknowledge", params={"lease": self.lent[0]})
            self.finish()

    def finish(self) -> None:
        """What was lent may be delivered again, unless it was as often as it may."""
        if self.lent:
            self.kept |= {tag: number for tag, number in self.deliveries.items() if number < self.max_uses}
            self.lent = None

    def possible_sums(self) -> set[int]:
        sums = {0}
        for tag in self.kept:
            sums |= {total + self.sizes[tag] for total in sums}
        return sums

    @rule()
    def kill(self) -> None:
        self.num_lives += 1
        left = self.folder / f"{self.num_lives}.sqlite"
        for suffix in ("", "-wal"):
            if Path(f"{self.store}{suffix}").exists():
                shutil.copy(f"{self.store}{suffix}", f"{left}{suffix}")
        self.stop()
        self.start(left)

    @invariant()
    def the_buffer_holds_what_it_must(self) -> None:
        text = self.loop.run_until_complete(self.http.get("/metrics")).text
        (queued,) = (line.split()[1] for line in text.splitlines() if line.startswith("grpo_api_queued_sequences "))
        assert float(queued) == self.size(self.kept)


TestAnyBuffer = pytest.mark.slow(AnyBuffer.TestCase)
TestAnyBuffer.settings = settings(
    max_examples=int(os.environ.get("ROLLOUT_EXAMPLES", "8")),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
