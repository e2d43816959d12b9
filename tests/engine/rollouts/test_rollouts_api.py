"""Every route of the rollout API against the contract that stock clients rely on, and where ours goes beyond it.

What the reference server gets wrong is in `test_rollouts_stock_defects.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_fakes import ENVIRONMENT, REGISTRATION, api_client, group, tags

from grpo_engine.data.source import idle_metrics
from grpo_engine.rollouts import coordinator
from grpo_engine.rollouts.idle_clock import IdleClock
from grpo_engine.wire.rollouts import IdleTimes

STOCK_KEYS = {
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs",
    "overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs",
}  # fmt: skip


@contextlib.asynccontextmanager
async def api_with_run(*, batch_size: int = 4, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An API whose trainer has registered and asked for a batch: environments may register from then on."""
    async with api_client(**settings) as api:
        assert (await api.post("/register", json={**REGISTRATION, "batch_size": batch_size})).status_code == 200
        await api.get("/batch")
        yield api


async def join(api: httpx.AsyncClient, **changes: Any) -> int:
    answer = (await api.post("/register-env", json={**ENVIRONMENT, **changes})).json()
    assert answer["status"] == "success"
    return int(answer["env_id"])


async def ask_status(api: httpx.AsyncClient, env_id: int, **more: Any) -> httpx.Response:
    """As stock environments do: GET with a JSON body."""
    return await api.request("GET", "/status-env", json={"env_id": env_id, **more})


async def test_info_is_minus_one_before_and_the_registration_after() -> None:
    async with api_client() as api:
        assert (await api.get("/info")).json() == {"batch_size": -1, "max_token_len": -1}
        assert (await api.get("/wandb_info")).json() == {"group": None, "project": None}
        assert (await api.get("/batch")).json()["status"] == "error"
        answer = (await api.post("/register", json={**REGISTRATION, "something_new": 1})).json()
        assert 0 <= answer["uuid"] < 2**53
        assert (await api.get("/info")).json() == {"batch_size": 4, "max_token_len": 64}
        assert (await api.get("/wandb_info")).json() == {"group": "group", "project": "project"}
        assert (await api.get("/")).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *(("/register", field, ...) for field in REGISTRATION),
        ("/register", "batch_size", 10**12),
        ("/register-env", "group_size", 10**12),
        *(("/register-env", "min_batch_allocation", share) for share in (-3, 1.5, 1e300)),
        ("/register-env", "desired_name", None),
        ("/register-env", "weight", None),
        ("/status-env", "env_id", ...),
    ],
)
async def test_a_value_that_is_missing_or_out_of_bounds_is_refused_by_name(path: str, field: str, value: Any) -> None:
    good = {"/register": REGISTRATION, "/register-env": ENVIRONMENT, "/status-env": {}}[path]
    body = {name: each for name, each in {**good, field: value}.items() if each is not ...}
    async with api_with_run() as api:
        answer = await api.request("GET" if path == "/status-env" else "POST", path, json=body)
        assert answer.status_code == 422
        assert field in answer.text


async def test_environments_wait_until_the_trainer_has_asked_for_a_batch() -> None:
    async with api_client() as api:
        assert (await api.post("/register-env", json=ENVIRONMENT)).json()["status"] != "success"
        await api.post("/register", json=REGISTRATION)
        assert (await api.post("/register-env", json=ENVIRONMENT)).json()["status"] == "wait for trainer to start"
        assert (await api.get("/batch")).json() == {"batch": None}
        assert (await api.post("/register-env", json=ENVIRONMENT)).json() == {
            "status": "success",
            "env_id": 0,
            "wandb_name": "sums_0",
            "checkpoint_dir": "checkpoints",
            "starting_step": 0,
            "checkpoint_interval": 3,
            "num_steps": 30,
        }
        second = (await api.post("/register-env", json=ENVIRONMENT)).json()
        assert (second["env_id"], second["wandb_name"]) == (1, "sums_1")


async def test_environments_begin_at_a_registration_that_says_that_the_policy_is_served(tmp_path: Path) -> None:
    """While a trainer rehearsed its first step, they waited for its first request."""
    store, served = tmp_path / "rollouts.sqlite", {**REGISTRATION, "is_served": True}
    async with api_client(store) as api:
        await api.post("/register", json=served)
        assert await join(api) == 0
    async with api_client(store) as api:
        assert (await api.post("/register-env", json=ENVIRONMENT)).json()["status"] == "wait for trainer to start"
        again = await api.post("/register", json=REGISTRATION)
        assert again.json()["changes"] == "continues at step 0; 0 groups kept; changed: nothing"
        assert (await api.post("/register-env", json=ENVIRONMENT)).json()["status"] == "wait for trainer to start"
        await api.post("/register", json=served)
        assert await join(api) == 1


async def test_a_resumed_run_gets_more_steps_and_admits_environments_once_its_trainer_asks(tmp_path: Path) -> None:
    """After a start of the whole stack, inference has untrained weights until the trainer publishes its own."""
    store, ended = tmp_path / "rollouts.sqlite", {**REGISTRATION, "num_steps": 1}
    async with api_client(store) as api:
        await api.post("/register", json=ended)
        await api.post("/scored_data_list", json=[group(4, tag=10), group(4, tag=11)])
        lease = (await api.get("/batch", params={"ack": ""})).json()["lease"]
        await api.post("/acknowledge", params={"lease": lease})
        await join(api)
    async with api_client(store) as api:
        assert (await api.post("/register-env", json=ENVIRONMENT)).json()["status"] == "wait for trainer to start"
        extended = await api.post("/register", json={**ended, "starting_step": 1, "num_steps": 2})
        assert extended.json()["changes"].startswith("continues at step 1; 1 groups kept")
        assert (await api.post("/register-env", json=ENVIRONMENT)).json()["status"] == "wait for trainer to start"
        assert tags((await api.get("/batch", params={"ack": ""})).json()["batch"]) == [11]
        assert await join(api) == 1


async def test_a_batch_is_whole_groups_with_every_key() -> None:
    async with api_with_run() as api:
        assert (await api.post("/scored_data", json=group(2, tag=10))).json() == {"status": "received"}
        assert (await api.get("/batch")).json()["batch"] is None
        await api.post("/scored_data", json=group(2, tag=11, generation_params={"temperature": 0.7}, unknown_key=1))
        batch = (await api.get("/batch")).json()["batch"]
        assert tags(batch) == [10, 11]
        assert all(set(item) >= STOCK_KEYS for item in batch)
        assert "unknown_key" not in batch[1]
        assert batch[0]["overrides"] is None
        assert batch[1]["generation_params"] == {"temperature": 0.7}
        assert batch[1]["inference_logprobs"] == [[1.0, 1.0, -0.5, -0.25]] * 2


async def test_the_defaults_of_a_single_trajectory_environment_are_accepted() -> None:
    empty = {"advantages": [], "ref_logprobs": [], "messages": [], "overrides": [], "images": [], "group_overrides": {}}
    async with api_with_run() as api:
        plain = group(4, **empty)
        del plain["inference_logprobs"]
        assert (await api.post("/scored_data", json=plain)).json() == {"status": "received"}
        (item,) = (await api.get("/batch")).json()["batch"]
        assert item["messages"] == []
        assert item["group_overrides"] == {}


async def test_a_list_of_groups_is_taken_and_counted() -> None:
    async with api_with_run() as api:
        env_id = await join(api)
        assert (await api.post("/scored_data_list", json=[])).json() == {"status": "received", "groups_processed": 0}
        answer = await api.post("/scored_data_list", json=[group(2, env_id=env_id), group(1, env_id=env_id)])
        assert answer.json() == {"status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 1}
        assert (await api.post("/scored_data_list", json=group(2))).status_code == 422


async def test_status_of_an_environment_counts_in_its_own_groups() -> None:
    async with api_with_run(batch_size=64) as api:
        first, second = await join(api, group_size=2), await join(api, group_size=4, weight=3.0)
        assert (await ask_status(api, first)).json()["max_group_size"] == 1
        for _ in range(3):
            await api.post("/scored_data", json=group(2, env_id=first))
        await api.post("/scored_data", json=group(4, env_id=second))
        assert (await ask_status(api, first)).json() == {
            "current_step": 0,
            "queue_size": 5,
            "unallocated_fraction": 1.0,
            "self_queue_size": 3,
            "max_group_size": 4,
            "env_weight": 0.25,
        }
        other = (await api.get("/status-env", params={"env_id": second})).json()
        assert (other["queue_size"], other["self_queue_size"], other["env_weight"]) == (3, 1, 0.75)


async def test_gzip_bodies_are_read_and_large_answers_compressed_on_request() -> None:
    async with api_with_run() as api:
        body = gzip.compress(json.dumps(group(4, messages=[[{"role": "user", "content": "x" * 2000}]] * 4)).encode())
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        assert (await api.post("/scored_data", content=body, headers=headers)).json() == {"status": "received"}
        packed = await api.get("/latest_example", headers={"Accept-Encoding": "gzip"})
        assert packed.headers["content-encoding"] == "gzip"
        plain = await api.get("/latest_example", headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.json() == packed.json()
        answer = await api.get("/batch", headers={"Accept-Encoding": "gzip"})
        assert answer.headers["content-encoding"] == "gzip"
        assert len(answer.json()["batch"]) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [], "masks": [], "scores": []}, "the group has no sequence"),
        ({"tokens": [[], []], "masks": [[], []], "inference_logprobs": None}, "sequence 0 is empty"),
        ({"tokens": [[1, 2, -7, 3]] * 2}, "tokens[0][2]: Expected `int` >= 0"),
        ({"tokens": [[1, 2, 10**30, 3]] * 2}, "tokens[0][2]: Expected `int` <= 2147483647"),
        ({"scores": [1.0, 1e39]}, "scores[1]: Expected `float` <= 3.4"),
        ({"scores": [1.0, float("nan")]}, "scores[1]: Expected `float`"),
        ({"scores": [1.0]}, "scores: 1 entries for 2 sequences"),
        ({"masks": [[-100, -100, 7, 3], [-100, 7, 3]]}, "masks: sequence 1 has 3 entries for 4 tokens"),
        ({"masks": [[-100, -100, 7, 3]]}, "masks: 1 entries for 2 sequences"),
        ({"inference_logprobs": [[1.0, -0.5]] * 2}, "inference_logprobs: sequence 0 has 2 entries"),
        ({"inference_logprobs": [[1.0, 1.0, float("-inf"), -0.5]] * 2}, "inference_logprobs[0][2]: Expected"),
        ({"overrides": [{}]}, "overrides: 1 entries"),
        ({"messages": [[{"role": "user"}], []]}, "message without role and content"),
    ],
)
async def test_a_group_that_cannot_be_trained_on_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    async with api_with_run() as api:
        env_id = await join(api)
        body = json.dumps([group(), {**group(env_id=env_id), **changes}]).encode()
        answer = await api.post("/scored_data_list", content=body)
        assert answer.status_code == 422
        message = answer.json()["detail"][0]["msg"]
        assert "environment 0 (sums_0), group 1" in message
        assert words in message
        assert (await api.get("/status")).json()["queue_size"] == 0
        assert 'refused_total{reason="malformed"} 1' in (await api.get("/metrics")).text


async def test_another_run_starts_at_its_own_step_with_an_empty_queue() -> None:
    async with api_with_run() as api:
        await api.post("/scored_data", json=group(4))
        await api.get("/batch")
        await api.post("/scored_data", json=group(4))
        answer = (await api.post("/register", json={**REGISTRATION, "checkpoint_dir": "elsewhere"})).json()
        assert "2 groups dropped" in answer["changes"]
        status = (await api.get("/status")).json()
        assert (status["current_step"], status["queue_size"]) == (0, 0)
        assert (await api.get("/batch")).json()["batch"] is None


async def test_another_client_gets_a_batch_only_after_its_lease_ran_out() -> None:
    async with api_with_run(lease_s=1e-9) as short, api_with_run() as long:
        for server, expected in ((short, [42]), (long, None)):
            await server.post("/scored_data", json=group(4, tag=42))
            await server.get("/batch")
            answer = (await server.get("/batch", headers={"User-Agent": "another"})).json()["batch"]
            assert (tags(answer) if answer else None) == expected


async def test_a_post_beyond_the_limit_is_held_until_there_is_room() -> None:
    async with api_with_run(max_queued_sequences=8, hold_s=30) as api:
        for tag in (10, 11):
            await api.post("/scored_data", json=group(4, tag=tag))
        held = asyncio.create_task(api.post("/scored_data", json=group(4, tag=12)))
        while "grpo_api_held 1" not in (await api.get("/metrics")).text:
            await asyncio.sleep(0)
            assert not held.done()
        assert tags((await api.get("/batch")).json()["batch"]) == [10]
        assert (await held).json() == {"status": "received"}


async def test_guaranteed_shares_hold_batches_back_until_their_environments_disconnect() -> None:
    async with api_with_run(batch_size=8) as api:
        half, quarter, rest = [await join(api, min_batch_allocation=share) for share in (0.5, 0.25, None)]
        for tag in range(10, 20):
            await api.post("/scored_data", json=group(2, tag=tag, env_id=rest))
        assert (await ask_status(api, rest)).json()["unallocated_fraction"] == 0.25
        await api.post("/scored_data", json=group(2, tag=20, env_id=quarter))
        assert (await api.get("/batch")).json()["batch"] is None
        for tag in (30, 31):
            await api.post("/scored_data", json=group(2, tag=tag, env_id=half))
        assert tags((await api.get("/batch")).json()["batch"]) == [10, 20, 30, 31]
        await api.post("/disconnect-env", json={"env_id": half})
        await api.post("/scored_data", json=group(2, tag=21, env_id=quarter))
        assert tags((await api.get("/batch")).json()["batch"]) == [11, 12, 13, 21]


async def test_buffered_groups_are_delivered_once_their_environment_has_disconnected() -> None:
    async with api_with_run() as api:
        env_id = await join(api, group_size=8)
        answer = await api.post("/scored_data", json=group(4, tag=10, env_id=env_id))
        assert answer.json() == {"status": "buffered", "buffer_size": 4}
        await api.post("/disconnect-env", json={"env_id": env_id})
        assert tags((await api.get("/batch")).json()["batch"]) == [10]


async def test_a_guaranteed_share_without_groups_lapses_after_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1e9
    monkeypatch.setattr(coordinator, "_steady_clock", lambda: lambda: now_s)
    async with api_with_run(share_wait_s=60) as api:
        idle, busy = await join(api, min_batch_allocation=0.5), await join(api)
        for tag in (10, 11):
            await api.post("/scored_data", json=group(4, tag=tag, env_id=busy))
        answers = [(await api.get("/batch")).json()]
        for _ in range(3):
            now_s += 20
            await ask_status(api, idle)
            answers.append((await api.get("/batch")).json())
        assert [answer["batch"] and tags(answer["batch"]) for answer in answers] == [None, None, None, [10]]
        words = "too few of sums_0, which has a guaranteed share"
        assert [words in answer.get("message", "") for answer in answers[:3]] == [False, False, True]
        await api.post("/scored_data", json=group(4, tag=12, env_id=idle))
        assert tags((await api.get("/batch")).json()["batch"]) == [12], "its share counts again"


async def test_a_queue_without_live_environments_is_reported() -> None:
    async with api_with_run() as api:
        assert (await api.get("/status")).json()["problem"] is None, "none has registered yet"
        env_id = await join(api)
        await api.post("/scored_data", json=group(2, env_id=env_id))
        assert (await api.get("/status")).json()["problem"] is None
        await api.post("/disconnect-env", json={"env_id": env_id})
        problem = (await api.get("/batch")).json()["message"]
        assert "no environment is live: sums_0 disconnected at " in problem
        assert (await api.get("/batch")).json()["message"] == problem, "a trainer logs what changes"
        await join(api)
        assert (await api.get("/status")).json()["problem"] is None


async def test_the_latest_example_is_the_last_group_posted() -> None:
    async with api_client() as api:
        await api.post("/scored_data_list", json=[group(2, tag=10), group(2, tag=11)])
        latest = (await api.get("/latest_example")).json()
        assert tags([latest]) == [11]
        assert set(latest) >= STOCK_KEYS


async def test_a_request_may_be_held_for_its_answer() -> None:
    async with api_with_run() as api:
        env_id = await join(api)
        batch = asyncio.create_task(api.get("/batch", params={"ack": "", "wait_s": 15}))
        news = asyncio.create_task(ask_status(api, env_id, wait_s=15, current_step=0, queue_size=0))
        await asyncio.sleep(0)
        await api.post("/scored_data", json=group(4))
        assert len((await batch).json()["batch"]) == 1
        assert (await news).status_code == 200
        status = await ask_status(api, env_id, wait_s=15, current_step=0, queue_size=0)
        assert status.json()["current_step"] == 1


def test_the_time_that_environments_wait_is_counted_from_batch_to_batch() -> None:
    now = [10.0]
    clock = IdleClock(lambda: now[0])
    clock.note(1)
    with clock.waiting(0):
        now[0] += 3
        assert clock.take() == IdleTimes(since_s=3.0, idle_s={0: 3.0, 1: 0.0})
        now[0] += 1
    now[0] += 4
    assert clock.take() == IdleTimes(since_s=5.0, idle_s={0: 1.0})  # environment 1 has asked for nothing
    assert clock.take() == IdleTimes(since_s=0.0, idle_s={})
    assert idle_metrics(IdleTimes(since_s=5.0, idle_s={0: 1.0, 1: 0.0})) == {
        "rollout/admission_wait_time": 0.5,
        "rollout/busy_fraction": 0.9,
    }


async def test_a_batch_says_how_long_environments_had_nothing_to_do() -> None:
    async with api_with_run() as api:
        waiting, stock = await join(api), await join(api)
        await ask_status(api, stock)
        held = asyncio.create_task(ask_status(api, waiting, wait_s=15, current_step=0, queue_size=0))
        await asyncio.sleep(0)
        await api.post("/scored_data", json=group(4))
        idle = (await api.get("/batch", params={"ack": ""})).json()["idle"]
        assert list(idle["idle_s"]) == [str(waiting)]
        assert 0 < idle["idle_s"][str(waiting)] <= idle["since_s"]
        await held
        assert (await api.get("/batch", params={"ack": "none"})).json().get("idle") is None  # it is offered again


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://api.test", "Host": "api.test"},  # a name of its own for this machine's loopback address
        {"Sec-Fetch-Site": "same-origin", "Host": "api.test"},
    ],
)
async def test_a_page_under_another_name_of_loopback_is_refused(headers: dict[str, str]) -> None:
    async with api_client() as api:
        answer = await api.get("/reset_data", headers=headers)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        own = {"Origin": "http://[::1]:8000", "Host": "[::1]:8000", "Sec-Fetch-Site": "same-origin"}
        assert (await api.get("/info", headers=own)).status_code == 200


async def test_groups_without_versions_age_by_batches_since_their_arrival() -> None:
    async with api_with_run(max_staleness=1) as api:
        await api.post("/scored_data", json=group(2, tag=10))  # half a batch: it waits for another that fits
        for tag in (11, 12):
            await api.post("/scored_data", json=group(4, tag=tag))
        assert [tags((await api.get("/batch")).json()["batch"]) for _ in range(2)] == [[11], [12]]
        for tag in (13, 14):
            await api.post("/scored_data", json=group(2, tag=tag))
        assert tags((await api.get("/batch")).json()["batch"]) == [13, 14]
        assert (await api.get("/status")).json()["queued_sequences"] == 0
        assert "grpo_api_stale_groups_total 1" in (await api.get("/metrics")).text


async def test_a_trainer_that_resumes_from_an_older_checkpoint_gets_its_groups() -> None:
    async with api_with_run(max_staleness=0) as api:
        versions = {"policy_versions": [[0, 0, 9, 9]] * 4}
        await api.post("/scored_data", json={**group(4, tag=10), **versions})
        await api.get("/batch", params={"policy_version": 9})
        older = {"policy_versions": [[0, 0, 3, 3]] * 4}
        await api.post("/scored_data", json={**group(4, tag=11), **older})
        assert tags((await api.get("/batch", params={"policy_version": 3})).json()["batch"]) == [11]


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list"])
async def test_a_post_repeated_under_its_idempotency_key_counts_once_even_after_a_restart(
    tmp_path: Path, path: str
) -> None:
    body = group(4) if path == "/scored_data" else [group(4), group(4)]
    key = {"Idempotency-Key": "a sender:1"}
    async with api_client(tmp_path / "rollouts.sqlite") as api:
        first = await api.post(path, json=body, headers=key)
        num_queued = (await api.get("/status")).json()["queue_size"]
    async with api_client(tmp_path / "rollouts.sqlite") as api:
        assert (await api.post(path, json=body, headers=key)).json() == first.json()
        assert (await api.get("/status")).json()["queue_size"] == num_queued
        for headers in ({"Idempotency-Key": "a sender:2"}, {}):  # stock environments send none
            await api.post(path, json=body, headers=headers)
        assert (await api.get("/status")).json()["queue_size"] == 3 * num_queued


async def test_senders_of_posts_are_kept_only_as_far_as_their_number_and_length_have_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "MAX_SENDERS", 3)
    store = tmp_path / "rollouts.sqlite"

    async def is_new(api: httpx.AsyncClient, sender: str) -> bool:
        before = (await api.get("/status")).json()["queue_size"]
        key = {"Idempotency-Key": f"{sender}:1"}
        assert (await api.post("/scored_data", json=group(4), headers=key)).status_code == 200
        return (await api.get("/status")).json()["queue_size"] > before

    async with api_client(store) as api:
        assert [await is_new(api, sender) for sender in "abcab"] == [True, True, True, False, False]
        assert await is_new(api, "d")
        long = await api.post("/scored_data", json=group(4), headers={"Idempotency-Key": "x" * 300 + ":1"})
        assert (long.status_code, "at most 256" in long.json()["detail"]) == (400, True)
    async with api_client(store) as api:
        assert [await is_new(api, sender) for sender in "bcda"] == [False, False, False, True]
    with closing(sqlite3.connect(store)) as database:
        assert database.execute("SELECT count(*) FROM posts").fetchone() == (3,)


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
    """A stock trainer sends no policy version, and one that starts again counts them from 0."""
    async with api_client(max_staleness=1) as api:
        await api.post("/register", json=REGISTRATION)
        await api.post("/scored_data", json=group(4, tag=10, policy_versions=[[0, 0, 9, 9]] * 4))
        assert tags((await api.get("/batch")).json()["batch"]) == [10]
        await api.get("/batch")
        await api.post("/register", json=REGISTRATION)
        await api.post("/scored_data", json=group(4, tag=11, policy_versions=[[0, 0, 0, 0]] * 4))
        assert tags((await api.get("/batch")).json()["batch"]) == [11]
