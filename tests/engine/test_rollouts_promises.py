"""What `docs/rollouts.md` promises and no other test proves: syncs, the stricter of two bounds, nothing in memory."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rollout_fakes import REGISTRATION, api_client, group, tags
from rollout_processes import api_process

from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.entry import read_group
from grpo_engine.rollouts.exchange import Exchange
from grpo_engine.rollouts.store import Store

MIB = 1024**2


class CountingStore(Store):
    """A store that counts its transactions, each of which is a sync of the disk."""

    num_transactions = 0

    def commit(self, actions: Sequence[Callable[[], Any]]) -> list[Any]:
        self.num_transactions += 1
        return super().commit(actions)


async def test_posts_that_come_together_share_syncs_of_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.sqlite"
    store = CountingStore(path)
    exchange = Exchange(ApiConfig(store=path), store, store.load())
    groups = [read_group(json.dumps(group(4, tag=tag)).encode(), {}) for tag in range(10, 210)]
    await asyncio.gather(*(exchange.add([each]) for each in groups))
    assert store.num_transactions <= 3
    await exchange.close_store()
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM bodies").fetchone() == (200,)


def test_every_transaction_is_synced_before_anybody_hears_of_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "rollouts.sqlite")
    (synchronous,) = store._db.execute("PRAGMA synchronous").fetchone()
    (journal,) = store._db.execute("PRAGMA journal_mode").fetchone()
    store.close()
    assert (synchronous, journal) == (2, "wal"), "FULL: in WAL mode each commit is followed by an fsync"


@pytest.mark.parametrize(("of_the_api", "of_the_trainer"), [(1, 3), (3, 1), (None, 1), (1, None)])
async def test_of_two_bounds_of_staleness_the_stricter_counts(
    of_the_api: int | None, of_the_trainer: int | None
) -> None:
    async with api_client(max_staleness=of_the_api) as api:
        await api.post("/register", json={**REGISTRATION, "max_staleness": of_the_trainer})
        for version in (3, 4):
            sampled = {"policy_versions": [[0, 0, version, version]] * 4}
            await api.post("/scored_data", json=group(4, tag=10 + version, **sampled))
        batch = (await api.get("/batch", params={"policy_version": 5})).json()["batch"]
        assert tags(batch) == [14]
        assert "grpo_api_stale_groups_total 1" in (await api.get("/metrics")).text


async def test_a_group_of_newer_weights_than_a_new_trainer_serves_makes_no_other_stale() -> None:
    """A stock trainer says no version, and one that starts anew serves weights that count from 0 again."""
    async with api_client(max_staleness=1) as api:
        await api.post("/register", json=REGISTRATION)
        await api.post("/scored_data", json=group(4, tag=10, policy_versions=[[0, 0, 9, 9]] * 4))
        assert tags((await api.get("/batch")).json()["batch"]) == [10]
        await api.get("/batch")
        await api.post("/register", json=REGISTRATION)
        await api.post("/scored_data", json=group(4, tag=11, policy_versions=[[0, 0, 0, 0]] * 4))
        assert tags((await api.get("/batch")).json()["batch"]) == [11]


@pytest.mark.slow
def test_a_batch_that_went_out_is_not_kept_in_memory_while_its_trainer_stays_connected(tmp_path: Path) -> None:
    with api_process(tmp_path, is_forked=False) as api, api.client(headers={"Accept-Encoding": "identity"}) as http:
        http.post("/register", json=REGISTRATION)
        for _ in range(4):
            http.post("/scored_data", json=group(1, generation_params={"text": "x" * 25_000_000}))
        http.get("/info")
        before = api.rss_bytes()
        assert len(http.get("/batch", params={"ack": ""}).content) > 90 * MIB
        assert http.get("/info").status_code == 200  # on the same connection, which stays open
        assert api.rss_bytes() - before < 50 * MIB
