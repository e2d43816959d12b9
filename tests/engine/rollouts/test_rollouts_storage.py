"""Syncs of the store, and bounds on memory, files and disk over many groups."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_fakes import REGISTRATION, group
from rollout_processes import api_process

from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.coordinator import Coordinator
from grpo_engine.rollouts.storage.store import Store
from grpo_engine.rollouts.validation import read_group

MIB = 1024**2
GROUPS_A_POST = 100


class CountingStore(Store):
    """A store that counts its transactions, each of which is a sync of the disk."""

    num_transactions = 0

    def commit(self, actions: Sequence[Callable[[], Any]]) -> list[Any]:
        self.num_transactions += 1
        return super().commit(actions)


async def test_concurrent_posts_share_syncs_of_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.sqlite"
    store = CountingStore(path)
    coordinator = Coordinator(ApiConfig(store=path), store, store.load())
    groups = [read_group(json.dumps(group(4, tag=tag)).encode(), {}) for tag in range(10, 210)]
    await asyncio.gather(*(coordinator.add_groups([each]) for each in groups))
    assert store.num_transactions <= 3
    await coordinator.close_store()
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM bodies").fetchone() == (200,)


def test_every_transaction_is_synced_before_it_is_answered(tmp_path: Path) -> None:
    store = Store(tmp_path / "rollouts.sqlite")
    (synchronous,) = store._db.execute("PRAGMA synchronous").fetchone()
    (journal,) = store._db.execute("PRAGMA journal_mode").fetchone()
    store.close()
    assert (synchronous, journal) == (2, "wal"), "FULL: in WAL mode each commit is followed by an fsync"


@pytest.mark.slow
def test_a_delivered_batch_is_not_kept_in_memory_while_its_trainer_stays_connected(tmp_path: Path) -> None:
    with api_process(tmp_path, is_forked=False) as api, api.client(headers={"Accept-Encoding": "identity"}) as http:
        http.post("/register", json=REGISTRATION)
        for _ in range(4):
            http.post("/scored_data", json=group(1, generation_params={"text": "x" * 25_000_000}))
        http.get("/info")
        before = api.rss_bytes()
        assert len(http.get("/batch", params={"ack": ""}).content) > 90 * MIB
        assert http.get("/info").status_code == 200  # on the same connection, which stays open
        assert api.rss_bytes() - before < 50 * MIB


@pytest.mark.extended("test_queued_groups_are_on_the_disk_and_not_in_memory")
@pytest.mark.slow
def test_memory_files_and_disk_do_not_grow_over_twenty_thousand_groups(tmp_path: Path) -> None:
    with api_process(tmp_path, "--log-level", "warning", is_forked=False) as api, api.client() as http:
        http.post("/register", json={**REGISTRATION, "batch_size": 4 * GROUPS_A_POST, "num_steps": 0})
        lease = through(http, 4_000)
        rss, files, threads, disk = api.rss_bytes(), api.num_files(), api.num_threads(), disk_bytes(tmp_path)
        through(http, 16_000, lease)
        assert http.get("/status").json()["current_step"] == 20_000 // GROUPS_A_POST
        assert api.rss_bytes() - rss < 24 * MIB
        assert api.num_files() <= files
        assert api.num_threads() <= threads
        # What left makes room for what comes: far less than the 15 MB that went through.
        assert disk_bytes(tmp_path) - disk < 4 * MIB


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("rollouts.sqlite*"))


def through(http: httpx.Client, num_groups: int, lease: str = "") -> str:
    """Post and fetch so many groups, some under a name and some alone; returns the last lease."""
    several = [group(4, generation_params={"text": "x" * 400})] * GROUPS_A_POST
    for number in range(num_groups // GROUPS_A_POST):
        headers = {"Idempotency-Key": f"sender:{number}"} if number % 2 else {}
        if number % 20:
            assert http.post("/scored_data_list", json=several, headers=headers).status_code == 200
        else:
            for each in several:
                assert http.post("/scored_data", json=each).status_code == 200
        batch = http.get("/batch", params={"ack": lease}).json()
        assert len(batch["batch"]) == GROUPS_A_POST
        lease = batch["lease"]
    return lease


@pytest.mark.slow
def test_queued_groups_are_on_the_disk_and_not_in_memory(tmp_path: Path) -> None:
    with api_process(tmp_path, "--log-level", "warning", is_forked=False) as api, api.client() as http:
        http.post("/register", json={**REGISTRATION, "batch_size": 4})
        heavy = group(4, generation_params={"text": "x" * 1_000_000})
        for _ in range(5):
            http.post("/scored_data", json=heavy)
        before = api.rss_bytes()
        for _ in range(100):
            assert http.post("/scored_data", json=heavy).status_code == 200
        assert api.rss_bytes() - before < 40 * MIB
