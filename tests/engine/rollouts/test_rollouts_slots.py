"""Slots: how far environments may sample ahead of the trainer where staleness is bounded.

The model lets Hypothesis choose who asks, posts, loses, trains and is killed, over the real application with its store
in a file, and checks after each step that no more is on the way than S + 1 batches, that no batch holds an older group
than S versions, and in the end that training goes on: no slot is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_fakes import ENVIRONMENT, REGISTRATION, api_client, group, rollout_app

from grpo_engine.rollouts import status_polling
from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.state.api_state import ApiState
from grpo_engine.rollouts.state.records import Stored
from grpo_engine.rollouts.state.slots import Demand
from grpo_engine.wire.rollouts import RegisterEnvironmentRequest, RegisterRequest

OURS = {**ENVIRONMENT, "takes_slots": True}
"""Groups of two."""


@contextlib.asynccontextmanager
async def api_with_bound(bound: int, *, batch_size: int = 4) -> AsyncIterator[httpx.AsyncClient]:
    """An API whose trainer bounds staleness and waits for its first batch."""
    async with api_client() as api:
        registration = {**REGISTRATION, "batch_size": batch_size, "max_staleness": bound}
        assert (await api.post("/register", json=registration)).status_code == 200
        await api.get("/batch", params={"ack": "", "policy_version": 0})
        yield api


async def join(api: httpx.AsyncClient, **changes: Any) -> int:
    return int((await api.post("/register-env", json={**OURS, **changes})).json()["env_id"])


async def may_start(api: httpx.AsyncClient, env_id: int, *, sampled: int = 0, wanted: int = 99, **more: Any) -> int:
    body = {"env_id": env_id, "sampled": sampled, "wanted_items": wanted, **more}
    answer: int = (await api.request("GET", "/status-env", json=body)).json()["may_start"]
    return answer


async def post(api: httpx.AsyncClient, env_id: int, *, version: int, num_groups: int = 1, size: int = 2) -> None:
    made = group(size, env_id=env_id, policy_versions=[[0, 0, version, version]] * size)
    for _ in range(num_groups):
        assert (await api.post("/scored_data", json=made)).status_code == 200


async def fetch(api: httpx.AsyncClient, *, version: int, ack: str = "") -> dict[str, Any]:
    answer: dict[str, Any] = (await api.get("/batch", params={"ack": ack, "policy_version": version})).json()
    return answer


async def test_with_no_staleness_one_batch_is_sampled_then_trained_then_the_next() -> None:
    async with api_with_bound(0) as api:
        env = await join(api)
        assert await may_start(api, env) == 2
        assert await may_start(api, env, sampled=2) == 0
        await post(api, env, version=0, num_groups=2)
        assert await may_start(api, env) == 0, "they are queued"
        lease = (await fetch(api, version=0))["lease"]
        assert await may_start(api, env) == 0, "they are trained on"
        answer = await api.post("/served", params={"lease": lease, "policy_version": 1})
        assert answer.status_code == 200
        assert await may_start(api, env) == 2
        # Whatever is older all the same is dropped, and frees its slots.
        await post(api, env, version=0, num_groups=2)
        assert await may_start(api, env) == 0
        assert (await fetch(api, version=1, ack=lease))["batch"] is None
        assert await may_start(api, env) == 2
        assert "grpo_api_stale_groups_total 2.0" in (await api.get("/metrics")).text


async def test_an_environment_that_waits_for_slots_is_answered_when_they_are_free() -> None:
    async with api_with_bound(1) as api:
        env = await join(api)
        assert await may_start(api, env, wanted=3) == 3
        assert await may_start(api, env, sampled=3) == 1
        await post(api, env, version=0, num_groups=4)
        lease = (await fetch(api, version=0))["lease"]
        held = {"wait_s": 20, "current_step": 1, "queue_size": 2}
        waiting = asyncio.create_task(may_start(api, env, **held))
        await asyncio.sleep(0)
        assert not waiting.done()
        await api.post("/served", params={"lease": lease, "policy_version": 1})
        assert await waiting == 2


async def test_many_environments_get_their_statuses_and_slots_with_one_request() -> None:
    async with api_with_bound(0, batch_size=8) as api:
        envs = [await join(api, desired_name=f"sums-{number}") for number in range(3)]
        asked = [{"env_id": env_id, "sampled": 0, "wanted_items": 99} for env_id in (*envs, 9)]
        answer = (await api.post("/status-env-list", json={"environments": asked})).json()
        limits = (await api.get("/info")).json()
        assert {name: answer[name] for name in limits} == limits
        *statuses, unknown = answer["environments"]
        assert unknown is None
        assert [each["may_start"] for each in statuses] == [2, 2, 0], "what one takes, the next one does not"
        sampled = [{"env_id": env_id, "sampled": 2} for env_id in envs[:2]]
        again = (await api.post("/status-env-list", json={"environments": sampled})).json()["environments"]
        alone = [(await api.request("GET", "/status-env", json=each)).json() for each in sampled]
        assert again == alone


async def test_status_requests_are_held_for_so_many_environments_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_polling, "MAX_HELD", 4)
    async with api_with_bound(0) as api:
        env = await join(api)
        known = {"env_id": env, "current_step": 0, "queue_size": 0}
        held = [
            asyncio.create_task(api.post("/status-env-list", json={"wait_s": 20, "environments": [known] * 2}))
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        answer = await api.post("/status-env-list", json={"wait_s": 20, "environments": [known]})
        assert answer.json()["environments"][0]["current_step"] == 0, "at once"
        assert not any(each.done() for each in held)
        for each in held:
            each.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        waiting = asyncio.create_task(api.post("/status-env-list", json={"wait_s": 20, "environments": [known]}))
        await asyncio.sleep(0)
        assert not waiting.done(), "there is room again"
        waiting.cancel()


async def test_ids_that_nobody_has_leave_nothing_in_memory_nor_in_the_next_batch() -> None:
    with rollout_app(ApiConfig(store=Path(":memory:"))) as app:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with app.router.lifespan_context(app), http as api:
            registration = {**REGISTRATION, "batch_size": 4, "max_staleness": 0}
            assert (await api.post("/register", json=registration)).status_code == 200
            assert (await api.get("/batch", params={"ack": "", "policy_version": 0})).json()["batch"] is None
            env = await join(api)
            asked = [{"env_id": number, "sampled": 0} for number in range(100, 1100)]
            answer = (await api.post("/status-env-list", json={"environments": asked})).json()
            assert answer["environments"] == [None] * 1000
            assert not app.state.coordinator.polling._num_asked
            await post(api, env, version=0, num_groups=2)
            batch = (await api.get("/batch", params={"ack": "", "policy_version": 0})).json()
            assert len(batch["batch"]) == 2
            assert batch["idle"]["idle_s"] == {}


async def test_a_request_of_many_is_held_until_there_is_news_for_one_of_them() -> None:
    async with api_with_bound(0) as api:
        idle, busy = await join(api, desired_name="idle"), await join(api, desired_name="busy", weight=9.0)
        assert await may_start(api, busy, wanted=1) == 1
        assert await may_start(api, idle, wanted=1) == 1
        known = {"current_step": 0, "queue_size": 0}
        wanted = {idle: 0, busy: 1}
        asked = [{"env_id": env_id, "sampled": 1, "wanted_items": wanted[env_id], **known} for env_id in wanted]
        body = {"wait_s": 20, "environments": asked}
        waiting = asyncio.create_task(api.post("/status-env-list", json=body))
        await asyncio.sleep(0)
        await api.post("/status-env-list", json={"environments": []})  # the other one was sent before, and is held now
        assert not waiting.done()
        assert await may_start(api, idle, sampled=0, wanted=0) == 0, "its group was not worth sending"
        statuses = (await waiting).json()["environments"]
        assert [each.get("may_start") for each in statuses] == [None, 1], "of idle a later request knows more"


async def test_what_an_environment_lost_is_free_once_it_says_so_or_is_gone() -> None:
    async with api_with_bound(0) as api:
        first, second = await join(api), await join(api, desired_name="products")
        assert await may_start(api, first) == 1, "its weight: half of what is sampled at a time"
        assert await may_start(api, second) == 1
        assert await may_start(api, second, sampled=1) == 0
        assert await may_start(api, first, sampled=0) == 1, "its group was not worth sending"
        await api.post("/disconnect-env", json={"env_id": first})
        assert await may_start(api, second, sampled=1) == 1


async def test_more_than_all_slots_does_not_count_as_sampled() -> None:
    async with api_with_bound(0) as api:
        wrong, other = await join(api), await join(api, desired_name="products")
        assert await may_start(api, wrong, sampled=2**20) == 0
        assert await may_start(api, other) == 0
        await post(api, wrong, version=0, num_groups=2)
        lease = (await fetch(api, version=0))["lease"]
        assert (await api.post("/served", params={"lease": lease, "policy_version": 1})).status_code == 200
        assert await may_start(api, other) == 1
        body = {"env_id": wrong, "sampled": 2**53, "wanted_items": 1}
        assert (await api.request("GET", "/status-env", json=body)).status_code == 422


@pytest.mark.parametrize(("version", "status"), [(2**63 - 1, 200), (2**63, 422), (2**200, 422)])
async def test_a_policy_version_above_int64_is_refused(version: int, status: int) -> None:
    async with api_with_bound(0) as api:
        asked = {"lease": "none", "policy_version": version}
        assert (await api.get("/batch", params=asked)).status_code == status
        assert (await api.post("/served", params=asked)).status_code == status


async def test_a_guaranteed_share_has_slots_that_no_other_environment_takes() -> None:
    async with api_with_bound(0, batch_size=8) as api:
        await join(api, desired_name="rare", min_batch_allocation=0.5)
        many = await join(api, desired_name="many", weight=100.0)
        assert await may_start(api, many) == 2
        assert await may_start(api, many, sampled=2) == 0


async def test_a_service_that_was_killed_and_restarted_at_once_has_the_slots_of_its_killed_process() -> None:
    """It waited 30 s for them where it registered within 3 s."""
    async with api_with_bound(0) as api:
        killed = await join(api, service="run/env")
        assert await may_start(api, killed) == 2
        env = await join(api, service="run/env")
        assert await may_start(api, env) == 2
        another = await join(api, service="run/env2")
        assert await may_start(api, another) == 0, "the slots of an environment that runs"
        assert (await api.get("/status")).json()["environments"] == ["sums_1", "sums_2"]


async def test_sizes_that_do_not_add_up_get_one_group_more_at_a_time() -> None:
    async with api_with_bound(0, batch_size=8) as api:
        three = await join(api, group_size=3)
        four = await join(api, group_size=4, desired_name="products")
        assert await may_start(api, three) == 2
        await post(api, three, version=0, num_groups=2, size=3)
        assert await may_start(api, three) == 1
        await post(api, three, version=0, size=3)
        assert await may_start(api, four) == 0
        assert (await fetch(api, version=0))["batch"] is None
        for _ in range(2):
            assert await may_start(api, four) == 1
            await post(api, four, version=0, size=4)
        assert [len(each["tokens"]) for each in (await fetch(api, version=0))["batch"]] == [4, 4]


async def test_groups_of_others_that_make_no_batch_keep_no_environment_from_sampling() -> None:
    """Of any number of groups larger than a batch, or of one that was rounded up to a batch; all waited for each other
    without end."""
    async with api_with_bound(0) as api:
        env = await join(api)
        for _ in range(4):
            assert (await api.post("/scored_data", json=group(5))).status_code == 200
        assert (await fetch(api, version=0))["batch"] is None
        assert await may_start(api, env) == 1
        await post(api, env, version=0)
        assert await may_start(api, env) == 1
        await post(api, env, version=0)
        assert len((await fetch(api, version=0))["batch"]) == 2
    for size, batch_size, num_own in ((5, 4, 0), (5, 4, 1), (1, 8, 1)):
        async with api_client() as api:
            await api.post("/register", json={**REGISTRATION, "batch_size": batch_size})
            await api.get("/batch")
            own_size = batch_size // 2
            env = (await api.post("/register-env", json={**ENVIRONMENT, "group_size": own_size})).json()["env_id"]
            for made in (group(size), *[group(own_size, env_id=env)] * num_own):
                assert (await api.post("/scored_data", json=made)).status_code == 200
            assert (await api.get("/batch")).json()["batch"] is None
            status = (await api.request("GET", "/status-env", json={"env_id": env})).json()
            assert status["queue_size"] == num_own


async def test_groups_of_other_sizes_under_its_own_id_keep_no_environment_from_sampling() -> None:
    """One larger than a batch, or small ones that were queued as they are, counted as its own; it waited for a batch
    of them without end, and where the queue was full its groups were refused."""
    for bound in (None, 0):
        async with api_client(max_queued_sequences=8, hold_s=0) as api:
            await api.post("/register", json={**REGISTRATION, "batch_size": 4, "max_staleness": bound})
            await api.get("/batch")
            env = await join(api)
            for _ in range(3):
                assert (await api.post("/scored_data", json=group(5, env_id=env))).status_code in (200, 503)
                assert (await api.get("/batch")).json()["batch"] is None
            body = {"env_id": env, "sampled": 0, "wanted_items": 1}
            status = (await api.request("GET", "/status-env", json=body)).json()
            assert status["may_start"] == 1 if bound is not None else status["queue_size"] == 0
            for _ in range(2):
                assert (await api.post("/scored_data", json=group(env_id=env))).status_code == 200
            assert len((await api.get("/batch")).json()["batch"]) == 2


async def test_groups_that_make_no_batch_keep_none_from_sampling_beside_a_share_that_lapsed() -> None:
    async with api_client(share_wait_s=0) as api:
        await api.post("/register", json={**REGISTRATION, "batch_size": 4})
        await api.get("/batch")
        env = await join(api)
        await join(api, desired_name="silent", min_batch_allocation=0.5)
        for _ in range(2):
            await api.post("/scored_data", json=group(5))
        assert (await api.get("/batch")).json()["batch"] is None
        assert (await api.request("GET", "/status-env", json={"env_id": env})).json()["queue_size"] == 0


async def test_slots_of_dropped_groups_go_to_an_environment_that_waits_for_them() -> None:
    """With equal scores in all its groups, one took its slots again at once, and no batch of the other was complete."""
    async with api_with_bound(0) as api:
        waiting, dropping = await join(api), await join(api, desired_name="dropping")
        await post(api, waiting, version=0)
        assert await may_start(api, dropping) == 1
        held = asyncio.create_task(may_start(api, waiting, wait_s=20, current_step=0, queue_size=1))
        for _ in range(200):  # until it is held
            await asyncio.sleep(0)
        assert await may_start(api, dropping, sampled=0) == 0
        assert await held == 1


async def test_buffered_groups_leave_room_for_a_batch() -> None:
    """They counted as queued, and kept out what would have completed a group."""
    async with api_client(max_queued_sequences=1, hold_s=0) as api:
        await api.post("/register", json={**REGISTRATION, "batch_size": 8})
        await api.get("/batch")
        env = await join(api, group_size=8)
        for size in (5, 5, 5, 5, 3):
            assert (await api.post("/scored_data", json=group(size, env_id=env))).status_code == 200
        assert len((await api.get("/batch")).json()["batch"]) == 2


async def test_what_would_soon_be_too_old_is_delivered_before_what_arrived_earlier() -> None:
    async with api_with_bound(1) as api:
        env = await join(api)
        await post(api, env, version=1, num_groups=2)
        await post(api, env, version=0)
        batch = (await fetch(api, version=1))["batch"]
        assert [each["policy_versions"][0][2] for each in batch] == [1, 0]


async def test_without_a_bound_nothing_is_granted_and_stock_environments_are_told_nothing() -> None:
    async with api_with_bound(0) as bounded, api_client() as unbounded:
        stock = await join(bounded, takes_slots=False)
        answer = await bounded.request("GET", "/status-env", json={"env_id": stock})
        assert "may_start" not in answer.json()
        await unbounded.post("/register", json=REGISTRATION)
        await unbounded.get("/batch")
        env = await join(unbounded)
        body = {"env_id": env, "sampled": 0, "wanted_items": 5}
        assert "may_start" not in (await unbounded.request("GET", "/status-env", json=body)).json()


def test_after_a_restart_nothing_is_granted_until_all_have_said_what_they_sample_or_timed_out() -> None:
    def state_of(stored: Stored, now: float) -> ApiState:
        return ApiState(stored, lease_s=120, liveness_s=30, share_wait_s=60, now=now)

    first = state_of(Stored(run=None, environments=[], leases=[], groups=[], latest_body=None), 0.0)
    first.register(RegisterRequest(**{**REGISTRATION, "max_staleness": 0}), 1)
    first.next_batch(client="", ack="", lease_id="", now=0.0)
    records = [
        first.register_environment(RegisterEnvironmentRequest(**{**OURS, "desired_name": name}), 0.0)
        for name in ("sums", "products", "differences")
    ]
    stored = Stored(run=first.run, environments=[r for r in records if r], leases=[], groups=[], latest_body=None)
    second = state_of(stored, 100.0)
    demand = Demand(num_sampled=0, num_items=9, groups_per_item=1)
    second.report_sampling(0, 0)
    assert second.num_startable(0, demand, 101.0) == 0
    second.report_sampling(1, 1)
    second.environments.last_seen |= {0: 131.0, 1: 131.0}
    assert second.num_startable(0, demand, 129.0) == 0, "the third may still be sampling"
    assert second.num_startable(0, demand, 131.0) == 1, "it has timed out; the second samples one group"


# --- the model -----------------------------------------------------------------------------------------------------

BATCH = 4


@dataclass
class Sampler:
    """An environment: the versions with which each group began that it samples."""

    group_size: int
    began: list[int] = field(default_factory=list)


class AnySpeeds(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.num_lives = 0
        self.samplers: dict[int, Sampler] = {}
        self.waiting_to_join: list[int] = []
        """Their group sizes."""
        self.version = 0
        self.lease = ""
        self.is_served = True
        self.num_batches = 0
        self.bound = 0
        self.largest = 1
        self.start(self.folder / "0.sqlite")

    def start(self, store: Path) -> None:
        self.store = store
        no_limit = {"liveness_s": 3600, "lease_s": 3600, "share_wait_s": 3600}
        self.application = contextlib.ExitStack()
        app = self.application.enter_context(rollout_app(ApiConfig(store=store, **no_limit)))
        self.life = app.router.lifespan_context(app)
        self.loop.run_until_complete(self.life.__aenter__())
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")

    def stop(self) -> None:
        self.loop.run_until_complete(self.http.aclose())
        self.loop.run_until_complete(self.life.__aexit__(None, None, None))
        self.application.close()

    def ask(self, method: str, path: str, **more: Any) -> Any:
        answer = self.loop.run_until_complete(self.http.request(method, path, **more))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def teardown(self) -> None:
        try:
            self.training_goes_on()
        finally:
            self.stop()
            self.loop.close()
            shutil.rmtree(self.folder)

    def training_goes_on(self) -> None:
        """Whatever happened: two more batches are sampled and trained."""
        self.waiting_to_join.append(1)
        before = self.num_batches
        for _ in range(2 * (self.bound + 3)):
            self.train()
            self.fetch()
            self.join_again()
            for env_id, sampler in self.samplers.items():
                self.sample(env_id, wanted=99, is_lost=False)
                while sampler.began:
                    self.post(env_id, 0)
        assert self.num_batches >= before + 2

    @initialize(bound=st.integers(0, 2), sizes=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
    def begin(self, bound: int, sizes: list[int]) -> None:
        self.bound, self.largest = bound, max(sizes)
        self.register()
        self.fetch()
        for size in sizes:
            self.join_one(size)

    def register(self) -> None:
        body = {**REGISTRATION, "batch_size": BATCH, "num_steps": 0, "max_staleness": self.bound}
        self.ask("POST", "/register", json=body)

    def join_one(self, size: int) -> None:
        name = f"environment {self.num_lives} {len(self.samplers)} {size}"
        answer = self.ask("POST", "/register-env", json={**OURS, "desired_name": name, "group_size": size})
        if answer["status"] == "success":
            self.samplers[answer["env_id"]] = Sampler(size)
        else:  # an API that was restarted has not heard of the trainer yet
            self.waiting_to_join.append(size)

    @precondition(lambda self: self.waiting_to_join)
    @rule()
    def join_again(self) -> None:
        waiting, self.waiting_to_join = self.waiting_to_join, []
        for size in waiting:
            self.join_one(size)

    # --- environments ----------------------------------------------------------------------------------------------

    def sample(self, env_id: int, *, wanted: int, is_lost: bool) -> None:
        sampler = self.samplers[env_id]
        body = {"env_id": env_id, "sampled": len(sampler.began), "wanted_items": wanted}
        num_groups = self.ask("GET", "/status-env", json=body)["may_start"]
        assert 0 <= num_groups <= wanted
        if not is_lost:
            sampler.began += [self.version] * num_groups

    def post(self, env_id: int, index: int) -> None:
        size = self.samplers[env_id].group_size
        version = self.samplers[env_id].began.pop(index)
        made = group(size, env_id=env_id, policy_versions=[[0, 0, version, version]] * size)
        self.ask("POST", "/scored_data", json=made)

    @precondition(lambda self: self.samplers)
    @rule(data=st.data(), wanted=st.integers(0, 9), is_lost=st.booleans())
    def ask_for_slots(self, data: st.DataObject, wanted: int, is_lost: bool) -> None:
        """An answer may be lost: then nothing is started."""
        self.sample(data.draw(st.sampled_from(sorted(self.samplers))), wanted=wanted, is_lost=is_lost)

    @precondition(lambda self: self.samplers)
    @rule(wanted=st.integers(0, 9), is_lost=st.booleans())
    def ask_together(self, wanted: int, is_lost: bool) -> None:
        """As environments of one process do."""
        reports = [
            {"env_id": env_id, "sampled": len(sampler.began), "wanted_items": wanted}
            for env_id, sampler in self.samplers.items()
        ]
        statuses = self.ask("POST", "/status-env-list", json={"environments": reports})["environments"]
        for sampler, status in zip(self.samplers.values(), statuses, strict=True):
            assert 0 <= status["may_start"] <= wanted
            if not is_lost:
                sampler.began += [self.version] * status["may_start"]

    @precondition(lambda self: any(sampler.began for sampler in self.samplers.values()))
    @rule(data=st.data(), is_kept=st.integers(0, 3))
    def finish_a_group(self, data: st.DataObject, is_kept: int) -> None:
        """In any order; now and then it is not worth posting."""
        busy = [env_id for env_id, sampler in sorted(self.samplers.items()) if sampler.began]
        env_id = data.draw(st.sampled_from(busy))
        index = data.draw(st.integers(0, len(self.samplers[env_id].began) - 1))
        if is_kept:
            self.post(env_id, index)
        else:
            self.samplers[env_id].began.pop(index)

    @precondition(lambda self: self.samplers)
    @rule(data=st.data())
    def kill_an_environment(self, data: st.DataObject) -> None:
        """It is noticed (as after `liveness_s`), and another one takes its place."""
        env_id = data.draw(st.sampled_from(sorted(self.samplers)))
        size = self.samplers.pop(env_id).group_size
        self.ask("POST", "/disconnect-env", json={"env_id": env_id})
        self.join_one(size)

    # --- the trainer ------------------------------------------------------------------------------------------------

    @rule()
    def fetch(self) -> None:
        if not self.is_served:
            return
        answer = self.ask("GET", "/batch", params={"ack": self.lease, "policy_version": self.version})
        if answer["batch"] is None:
            self.lease = ""
            return
        began = [each["policy_versions"][0][2] for each in answer["batch"]]
        assert all(self.version - version <= self.bound for version in began), "older than the bound"
        self.lease, self.is_served = answer["lease"], False
        self.num_batches += 1

    @rule(says_so=st.booleans())
    def train(self, says_so: bool = True) -> None:
        """It may be killed, or the API be away, before it can say that a version is served."""
        if self.is_served:
            return
        self.version, self.is_served = self.version + 1, True
        if says_so:
            self.ask("POST", "/served", params={"lease": self.lease, "policy_version": self.version})

    @precondition(lambda self: not self.is_served)
    @rule()
    def kill_the_trainer(self) -> None:
        """The next one is offered the same batch."""
        lease = self.lease
        self.register()
        answer = self.ask("GET", "/batch", params={"ack": "", "policy_version": self.version})
        assert answer["lease"] == lease

    @rule()
    def kill_the_api(self) -> None:
        self.num_lives += 1
        left = self.folder / f"{self.num_lives}.sqlite"
        for suffix in ("", "-wal"):
            if Path(f"{self.store}{suffix}").exists():
                shutil.copy(f"{self.store}{suffix}", f"{left}{suffix}")
        self.stop()
        self.start(left)

    @invariant()
    def no_more_is_on_the_way_than_there_are_slots(self) -> None:
        text = self.loop.run_until_complete(self.http.get("/metrics")).text
        (queued,) = (line.split()[1] for line in text.splitlines() if line.startswith("grpo_api_queued_sequences "))
        sampled = sum(len(sampler.began) * sampler.group_size for sampler in self.samplers.values())
        trained_on = 0 if self.is_served else BATCH
        slots = (self.bound + 1) * BATCH
        assert float(queued) + sampled + trained_on <= slots + self.largest - 1


TestAnySpeeds = pytest.mark.slow(AnySpeeds.TestCase)
TestAnySpeeds.settings = settings(
    max_examples=int(os.environ.get("ROLLOUT_EXAMPLES", "10")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
