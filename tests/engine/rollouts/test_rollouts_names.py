"""The rollout API names the environments of a batch: stable names for the trainer, and names in its log."""

from __future__ import annotations

import logging
from pathlib import Path

import httpx
import pytest
from rollout_fakes import ENVIRONMENT, REGISTRATION, api_client, group, tags


async def begin(api: httpx.AsyncClient, *names: str) -> list[int]:
    """Start a run and register environments; returns their ids."""
    await api.post("/register", json=REGISTRATION)
    await api.get("/batch")
    answers = [await api.post("/register-env", json={**ENVIRONMENT, "desired_name": name}) for name in names]
    return [answer.json()["env_id"] for answer in answers]


async def post(api: httpx.AsyncClient, *env_ids: int | None) -> None:
    for env_id in env_ids:
        assert (await api.post("/scored_data", json=group(env_id=env_id))).status_code == 200


async def test_a_batch_has_the_desired_names_of_its_environments_also_after_a_restart(tmp_path: Path) -> None:
    async with api_client(tmp_path / "api.db") as api:
        await begin(api, "sort6", "copy6", "sort6", "idle")
        await post(api, 0, 1)
        first = (await api.get("/batch", params={"ack": ""})).json()
        assert first["environments"] == {"0": "sort6", "1": "copy6"}
        await post(api, 0, 2)
        second = (await api.get("/batch", params={"ack": first["lease"]})).json()
        assert second["environments"] == {"0": "sort6", "2": "sort6"}
    del second["idle"], second["tokens_per_second"]  # said once, when it was delivered first
    async with api_client(tmp_path / "api.db") as api:  # offers the batch again
        assert (await api.get("/batch", params={"ack": ""})).json() == second


async def test_groups_of_unknown_environments_have_no_name() -> None:
    async with api_client() as api:
        await begin(api)
        await post(api, None, 9)
        batch = (await api.get("/batch")).json()
        assert (tags(batch["batch"]), batch["environments"]) == ([7, 7], {})


async def test_the_log_names_the_environments_of_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "grpo_engine.rollouts")
    async with api_client() as api:
        await begin(api, "sort6", "copy6")
        await post(api, 1, 0)
        await api.get("/batch")
        await post(api, None, 9)
        await api.get("/batch")
    events = [record for record in caplog.records if record.message == "batch delivered"]
    assert [vars(event)["fields"]["environments"] for event in events] == [
        {"copy6_0": 1, "sort6_0": 1},
        {"none": 1, "unknown": 1},
    ]
