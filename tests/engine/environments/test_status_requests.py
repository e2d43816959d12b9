"""Requests for the statuses of all environments of a process, against a rollout API whose answers the tests choose."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from environment_runs import at_work, served_run, settings
from rollout_fakes import fake_inference

from grpo_engine.environments import main, trainer_link
from grpo_engine.environments.clients import RolloutApi
from grpo_engine.environments.peers import UnknownEnvironment
from grpo_engine.environments.status_requests import StatusRequests
from grpo_engine.wire.rollouts import EnvironmentStatus, StatusRequest

ZEROS = dict.fromkeys(("current_step", "queue_size", "self_queue_size", "max_group_size"), 0)
STATUS = {**ZEROS, "unallocated_fraction": 0.0, "env_weight": 1.0}


def nothing_new(env_id: int) -> dict[str, Any] | None:
    return STATUS


@dataclass(kw_only=True)
class FakeApi:
    """Answers as the rollout API does, each request when the test lets it."""

    status_of: Callable[[int], dict[str, Any] | None] = nothing_new
    is_stock: bool = False
    asked: list[tuple[float, list[int]]] = field(default_factory=list)
    """How long each list may be held, and its environments; or one at a time."""
    answers: list[asyncio.Event] = field(default_factory=list)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/info":
            return httpx.Response(200, json={"batch_size": 8, "max_token_len": 32})
        is_list, body = request.url.path == "/status-env-list", json.loads(request.content)
        if is_list and self.is_stock:
            return httpx.Response(404, json={"detail": "Not Found"})
        ids = [each["env_id"] for each in body["environments"]] if is_list else [body["env_id"]]
        self.asked.append((body["wait_s"], ids))
        self.answers.append(asyncio.Event())
        await self.answers[-1].wait()
        statuses = [self.status_of(each) for each in ids]
        limits = {"batch_size": 16, "max_token_len": 64}
        return httpx.Response(200, json={**limits, "environments": statuses} if is_list else statuses[0])


@contextlib.asynccontextmanager
async def requests_to(api: FakeApi) -> AsyncIterator[StatusRequests]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(api), base_url="http://api") as http:
        requests = StatusRequests(http)
        running = asyncio.create_task(requests.run())
        try:
            yield requests
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def ask(requests: StatusRequests, env_id: int, **more: Any) -> asyncio.Task[EnvironmentStatus]:
    return asyncio.create_task(requests.ask(StatusRequest(env_id=env_id, sampled=0, wanted_items=1, **more)))


def wait(requests: StatusRequests, env_id: int) -> asyncio.Task[EnvironmentStatus]:
    return ask(requests, env_id, wait_s=5.0, current_step=0, queue_size=0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - of tasks that the test does not own
            await asyncio.sleep(0.001)


async def test_environments_that_ask_meanwhile_are_in_one_request() -> None:
    """Up to 64 of them asked after a post, each with a request of its own, and the next post waited for all of them."""
    api = FakeApi()
    async with requests_to(api) as requests:
        first = ask(requests, 0)
        await until(lambda: bool(api.asked))
        others = [ask(requests, env_id) for env_id in range(1, 65)]
        await asyncio.sleep(0)
        api.answers[0].set()
        assert (await first).current_step == 0
        await until(lambda: len(api.asked) == 2)
        api.answers[1].set()
        assert {(await each).env_weight for each in others} == {1.0}
        assert api.asked == [(0.0, [0]), (0.0, list(range(1, 65)))]
        assert requests.limits is not None
        assert requests.limits.batch_size == 16, "the limits come with the statuses"


async def test_of_environments_that_wait_those_without_news_are_asked_for_again() -> None:
    news = {1: {**STATUS, "may_start": 3}}
    api = FakeApi(status_of=lambda env_id: news.get(env_id, STATUS))
    async with requests_to(api) as requests:
        waiting = [wait(requests, env_id) for env_id in range(3)]
        await until(lambda: bool(api.asked))
        asking = ask(requests, 7)
        await until(lambda: len(api.asked) == 2)
        api.answers[1].set()
        await asking  # though the API holds the other request
        api.answers[0].set()
        assert (await waiting[1]).may_start == 3
        await until(lambda: len(api.asked) == 3)
        assert not waiting[0].done()
        assert not waiting[2].done()
        api.answers[2].set()  # at the end of its time, without news for anyone
        assert [(await waiting[env_id]).may_start for env_id in (0, 2)] == [None, None]
        assert api.asked == [(5.0, [0, 1, 2]), (0.0, [7]), (5.0, [0, 2])]


async def test_of_environments_in_one_request_only_the_unknown_one_registers_again() -> None:
    api = FakeApi(status_of=lambda env_id: None if env_id == 1 else STATUS)
    async with requests_to(api) as requests:
        asking = [ask(requests, env_id) for env_id in range(3)]
        await until(lambda: bool(api.asked))
        api.answers[0].set()
        assert (await asking[0], await asking[2])[0].current_step == 0
        with pytest.raises(UnknownEnvironment, match="environment 1"):
            await asking[1]


async def test_environments_that_were_cancelled_are_not_asked_for() -> None:
    api = FakeApi()
    async with requests_to(api) as requests:
        cancelled, asking = ask(requests, 0), ask(requests, 1)
        await asyncio.sleep(0)
        cancelled.cancel()
        await until(lambda: bool(api.asked))
        api.answers[0].set()
        await asking
        assert api.asked == [(0.0, [1])]


async def test_a_stock_api_is_asked_for_one_environment_at_a_time() -> None:
    api = FakeApi(is_stock=True)
    async with requests_to(api) as requests:
        first = [ask(requests, env_id) for env_id in range(2)]
        await until(lambda: len(api.answers) == 2)
        for each in api.answers:
            each.set()
        assert [(await each).env_weight for each in first] == [1.0, 1.0]
        later = ask(requests, 2)
        await until(lambda: len(api.answers) == 3)
        api.answers[2].set()
        await later
        assert sorted(api.asked) == [(0.0, [0]), (0.0, [1]), (0.0, [2])]
        async with httpx.AsyncClient(transport=httpx.MockTransport(api), base_url="http://api") as http:
            limits = await RolloutApi(http, statuses=requests).limits_at_status()
        assert limits.batch_size == 8, "asked for, since they came with no status"


@pytest.mark.slow
async def test_copies_that_wait_begin_again_once_their_batch_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many copies, one whose request was held without news paused as one that samples does: up to ten seconds."""
    monkeypatch.setattr(main, "_MOST_ASKED_PER_S", 1e-3)
    monkeypatch.setattr(main, "_LONGEST_ASK_S", 1e3)
    monkeypatch.setattr(trainer_link, "_HOLD_S", 0.15)
    fake = fake_inference(lambda prompt, index: "123456"[: index + 1])
    with served_run(fake, batch_size=80, num_steps=10, max_staleness=0) as (api, inference, source):
        async with asyncio.timeout(30), at_work(settings(api, inference, copies=20, max_workers=1)):
            for version in range(2):
                while (batch := await asyncio.to_thread(source.poll, 1.0, policy_version=version)) is None:
                    pass
                assert len(batch) == 20
                await asyncio.sleep(0.3)  # longer than a request is held
                await asyncio.to_thread(source.mark_used)
