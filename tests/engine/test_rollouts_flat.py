"""Twenty thousand small groups through the rollout API: what it holds in memory and keeps open does not grow."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from rollout_fakes import REGISTRATION, group
from rollout_processes import api_process

MIB = 1024**2
GROUPS_A_POST = 100


@pytest.mark.slow
def test_twenty_thousand_groups_leave_nothing_behind(tmp_path: Path) -> None:
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
def test_what_waits_is_on_the_disk_and_not_in_memory(tmp_path: Path) -> None:
    with api_process(tmp_path, "--log-level", "warning", is_forked=False) as api, api.client() as http:
        http.post("/register", json={**REGISTRATION, "batch_size": 4})
        heavy = group(4, generation_params={"text": "x" * 1_000_000})
        for _ in range(5):
            http.post("/scored_data", json=heavy)
        before = api.rss_bytes()
        for _ in range(100):
            assert http.post("/scored_data", json=heavy).status_code == 200
        assert api.rss_bytes() - before < 40 * MIB
