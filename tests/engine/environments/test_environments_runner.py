"""The environment's loop against the real rollout API and a fake inference server that answers the stock route."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import rollout_fakes
from environment_runs import RUN, at_work, served_run, settings
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from ports import free_port
from rollout_fakes import END_TOKEN, FakeTokenizer, fake_inference, served, served_api

from grpo_engine.data.source import RolloutApiSource
from grpo_engine.environments import peers
from grpo_engine.environments.clients import RolloutApi
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.inference_servers import InferenceServers
from grpo_engine.environments.main import work
from grpo_engine.environments.runner import Progress
from grpo_engine.environments.status_requests import BatchLimits
from grpo_engine.environments.trainer_link import TrainerLink
from grpo_engine.errors import ConfigError, PeerError
from grpo_engine.models.tiny_tokenizer import tiny_tokenizer
from grpo_engine.wire.environment_variables import RUN_VARIABLE, SERVICE_VARIABLE
from grpo_engine.wire.rollouts import (
    EnvironmentStatus,
    RegisterEnvironmentRequest,
    RegisterEnvironmentResponse,
    ScoredGroup,
    StatusRequest,
)


def half_right(prompt: str, index: int) -> str:
    """Right for even completions, wrong for odd ones, of a `sort` prompt."""
    digits = prompt.strip().removeprefix("sort ")
    return "".join(sorted(digits)) if index % 2 == 0 else "xxxxxx"


def train(url: str, num_batches: int) -> list[list[ScoredGroup]]:
    """Fetch batches as the trainer does."""
    with RolloutApiSource(url) as source:
        source.register(**{**RUN, "num_steps": num_batches})
        batches = [source.next_batch(timeout_s=100) for _ in range(num_batches)]
    return [batch for batch in batches if batch is not None]


async def trained(config: EnvironmentConfig, num_batches: int = 3) -> list[list[ScoredGroup]]:
    """Run the environment beside a trainer until its steps are done."""
    fetching = asyncio.create_task(asyncio.to_thread(train, config.rollout_server_url, num_batches))
    async with asyncio.timeout(120):
        assert await work(config, FakeTokenizer()) == 0
        return await fetching


async def queue_that_stays(api: str, size: int, *, step: int = 0, stays_s: float = 0.5) -> None:
    """Wait until so many groups are queued, and see that it stays at that."""
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=api) as client:
        # Held while nothing changes for an environment, to which a longer queue is no news.
        question = {"env_id": 0, "wait_s": 0.05, "current_step": step, "queue_size": 0}
        while question["queue_size"] < size:
            answer = await client.request("GET", "/status-env", json=question)
            if answer.status_code == 200:
                question["queue_size"] = answer.json()["queue_size"]
        question["wait_s"] = stays_s  # nothing changes from here on: the answer comes only when the time is up
        assert (await client.request("GET", "/status-env", json=question)).json()["queue_size"] == size


@pytest.fixture
def servers() -> Iterator[tuple[str, str, FastAPI]]:
    """A rollout API and a fake inference server: their URLs, and the fake."""
    fake = fake_inference(half_right)
    with served_api() as api, served(fake) as inference:
        yield api, inference, fake


@pytest.mark.slow
async def test_items_become_groups_with_every_field_of_the_trainer(servers: tuple[str, str, FastAPI]) -> None:
    api, inference, fake = servers
    batches = await trained(settings(api, inference, total_steps=3))
    assert [len(batch) for batch in batches] == [2, 2, 2]
    group = batches[0][0]
    prompt = [ord(c) for c in "".join(map(chr, group.tokens[0])).partition("\n")[0] + "\n"]
    answer = [ord(c) for c in half_right("".join(map(chr, prompt)), 0)] + [END_TOKEN]
    assert group.tokens[0] == prompt + answer
    assert group.masks[0] == [-100] * len(prompt) + answer
    assert group.inference_logprobs is not None
    assert group.inference_logprobs[0] == [1.0] * len(prompt) + [-0.5] * len(answer)
    assert group.policy_versions is not None
    assert group.policy_versions[0] == [0] * len(prompt) + [5] * len(answer)
    assert group.scores == [1.0, 0.0, 1.0, 0.0]
    assert group.truncated == [False] * 4
    assert group.generation_params == {"temperature": 1.0, "logprobs_mode": "processed"}
    assert group.env_id == 0
    request = fake.state.requests[0]
    assert request["logprobs"] == 0
    assert request["n"] == 4


@pytest.mark.slow
async def test_a_stock_server_is_taken_at_its_documented_convention() -> None:
    with served_api() as api, served(fake_inference(half_right, stock=True)) as inference:
        batches = await trained(settings(api, inference, max_tokens=3, total_steps=1), 1)
    group = batches[0][0]
    assert group.policy_versions is None
    assert group.generation_params == {"temperature": 1.0, "logprobs_mode": "raw"}
    assert group.truncated == [True] * 4


@pytest.mark.slow
async def test_no_more_is_sampled_than_the_trainer_may_be_behind() -> None:
    fake = fake_inference(half_right)
    with served_run(fake) as (api, inference, _):
        async with at_work(settings(api, inference, max_batches_offpolicy=2)):
            await queue_that_stays(api, 4)
            assert len(fake.state.requests) == 4
        async with httpx.AsyncClient(base_url=api) as client:
            assert (await client.get("/status")).json()["environments"] == []


@pytest.mark.slow
async def test_groups_that_are_posted_while_the_status_is_on_its_way_are_among_those_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were in neither the queue of the status nor the groups to post: twice as many were sampled."""
    ask, post = RolloutApi.status, RolloutApi.post
    is_answered, are_posted = asyncio.Event(), asyncio.Event()
    num_posted = 0

    async def post_once_answered(api: RolloutApi, groups: Sequence[ScoredGroup]) -> None:
        nonlocal num_posted
        await is_answered.wait()
        await post(api, groups)
        num_posted += len(groups)
        if num_posted == 4:
            are_posted.set()

    async def late_status(api: RolloutApi, request: StatusRequest) -> EnvironmentStatus:
        status = await ask(api, request)
        if request.sampled == 4:
            is_answered.set()
            await are_posted.wait()
        return status

    monkeypatch.setattr(RolloutApi, "post", post_once_answered)
    monkeypatch.setattr(RolloutApi, "status", late_status)
    fake = fake_inference(half_right)
    with served_run(fake) as (api, inference, _):
        async with at_work(settings(api, inference, max_batches_offpolicy=2)):
            await queue_that_stays(api, 4)
            assert len(fake.state.requests) == 4


@pytest.mark.slow
async def test_with_no_staleness_nothing_is_sampled_ahead_of_the_weights_that_train_on_it() -> None:
    fake = fake_inference(half_right)
    with served_run(fake, max_staleness=0) as (api, inference, source):
        async with at_work(settings(api, inference)):
            for step in range(2):
                await queue_that_stays(api, 2, step=step, stays_s=0.1)
                assert len(fake.state.requests) == 2 * (step + 1)
                batch = await asyncio.to_thread(source.poll, policy_version=fake.state.version)
                assert batch is not None
                assert {v for each in batch for row in each.policy_versions or [] for v in row} == {0, 5 + step}
                await queue_that_stays(
                    api, 0, step=step + 1, stays_s=0.2
                )  # until the version is served that was trained
                assert len(fake.state.requests) == 2 * (step + 1)
                fake.state.version += 1
                await asyncio.to_thread(source.report_served, source.lease, fake.state.version)


@pytest.mark.slow
async def test_a_guaranteed_share_is_sampled_although_other_groups_fill_the_queue() -> None:
    with served_run(fake_inference(half_right)) as (api, inference, source):
        config = settings(api, inference, min_batch_allocation=0.5, max_batches_offpolicy=1)
        async with httpx.AsyncClient(base_url=api) as client:
            for tag in range(9):  # without an id: four batches and a half
                await client.post("/scored_data", json=rollout_fakes.group(4, tag=tag))
            async with at_work(config):
                while (await client.request("GET", "/status-env", json={"env_id": 0})).status_code != 200:
                    pass
                batches = [await asyncio.to_thread(source.next_batch, timeout_s=20) for _ in range(2)]
        assert [{each.env_id for each in batch} for batch in batches if batch] == [{None, 0}] * 2


@pytest.mark.slow
async def test_a_server_that_is_loading_is_waited_for() -> None:
    with served_api() as api, served(fake_inference(half_right, fail_first=3)) as inference:
        assert len(await trained(settings(api, inference, total_steps=1), 1)) == 1


@pytest.mark.slow
async def test_an_environment_registers_again_after_a_reset_of_the_api(servers: tuple[str, str, FastAPI]) -> None:
    api, inference, _ = servers
    config = settings(api, inference, total_steps=3)

    def train_during_a_reset() -> int:
        with RolloutApiSource(api) as source:
            source.register(**RUN)
            assert source.next_batch(timeout_s=100) is not None
            httpx.get(f"{api}/reset_data", params={"force": "true"})
            return sum(source.next_batch(timeout_s=100) is not None for _ in range(3))

    fetching = asyncio.create_task(asyncio.to_thread(train_during_a_reset))
    async with asyncio.timeout(120):
        assert await work(config, FakeTokenizer()) == 0
        assert await fetching == 3


@pytest.mark.slow
async def test_an_api_that_restarts_is_waited_for(tmp_path: Path) -> None:
    database = tmp_path / "rollouts.sqlite"
    with served(fake_inference(half_right)) as inference:
        port = free_port()  # that no connection has while the API is away
        with served_api(database, port=port) as api:
            config = settings(api, inference, total_steps=2)
            working = asyncio.create_task(work(config, FakeTokenizer()))
            await asyncio.to_thread(train, api, 1)
        with served_api(database, port=port):
            fetched = await asyncio.to_thread(train_more, api)
            assert await working == 0
    assert None not in fetched


def train_more(url: str) -> list[list[ScoredGroup] | None]:
    """The batch that the first trainer did not acknowledge, and one more of the same run."""
    with RolloutApiSource(url) as source:
        source.register(**{**RUN, "num_steps": 10, "starting_step": 1})
        return [source.next_batch(timeout_s=100) for _ in range(2)]


@pytest.mark.slow
async def test_groups_of_equal_scores_are_dropped_only_where_asked() -> None:
    turns = itertools.count()
    lock = threading.Lock()

    def mostly_equal(prompt: str, index: int) -> str:
        with lock:
            mixed = next(turns) // 4 % 2 == 0
        return half_right(prompt, index if mixed else 0)

    with served_api() as api, served(fake_inference(mostly_equal)) as inference:
        batches = await trained(settings(api, inference, ensure_scores_are_not_same=True, total_steps=2), 2)
    assert all(len(set(group.scores)) == 2 for batch in batches for group in batch)


@pytest.mark.slow
async def test_an_environment_whose_groups_are_all_dropped_samples_the_next_ones_at_once() -> None:
    """Not when the API has held its answer for five seconds because nothing had changed."""
    loop, is_enough = asyncio.get_running_loop(), asyncio.Event()
    num_asked = itertools.count(1)

    def equal(prompt: str, index: int) -> str:
        if next(num_asked) == 20 * 6 * 4:  # completions of twenty rounds of six groups: as many holds would take 100 s
            loop.call_soon_threadsafe(is_enough.set)
        return "x"

    with served_run(fake_inference(equal)) as (api, inference, _):
        async with at_work(settings(api, inference, ensure_scores_are_not_same=True)), asyncio.timeout(60):
            await is_enough.wait()


@pytest.mark.slow
async def test_a_worker_that_was_busy_takes_the_next_item_at_once() -> None:
    """Not when the API has held its answer for five seconds because the queue became no shorter."""

    def slowly_half_right(prompt: str, index: int) -> str:
        time.sleep(0.02)  # longer, for a group, than until the API is asked again
        return half_right(prompt, index)

    with served_run(fake_inference(slowly_half_right)) as (api, inference, _):
        async with (
            at_work(settings(api, inference, max_workers=1, max_batches_offpolicy=10)),
            asyncio.timeout(60),  # with a hold a group: 100 s
            httpx.AsyncClient(base_url=api) as client,
        ):
            while (await client.get("/status")).json()["queue_size"] < 20:
                pass


GAME = {"task": {"name": "mafia", "max_days": 1, "explain": False}, "max_token_length": 512}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "changes", "words"),
    [
        ({}, {"group_size": 16}, r"group_size \(16\) is more than the trainer's batch_size \(8\)"),
        (
            {"max_token_len": 12},
            {},
            r"100 prompts in a row leave no room within 11 tokens \(the last has at least 11\)",
        ),
        ({}, GAME, r"100 prompts in a row leave no room within 63 tokens"),
    ],
    ids=["group larger than a batch", "prompts without room", "games without room"],
)
async def test_settings_that_do_not_fit_the_run_are_refused(
    run: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    tokenizer = tiny_tokenizer() if changes is GAME else FakeTokenizer()
    with served_run(fake_inference(half_right), **run) as (api, inference, _):
        async with asyncio.timeout(60):
            with pytest.raises(ConfigError, match=words):
                await work(settings(api, inference, **changes), tokenizer)


# --- games of several seats ----------------------------------------------------------------------------------------

NUM_SEATS = 5


def passing(prompt: str, index: int) -> str:
    return "<pass/>"


@pytest.mark.slow
async def test_a_game_becomes_a_group_for_every_seat_of_all_its_turns() -> None:
    fake = fake_inference(passing)
    with served_run(fake, batch_size=4 * NUM_SEATS, max_token_len=512) as (api, inference, source):
        async with at_work(settings(api, inference, **GAME), tiny_tokenizer()):
            batch = await asyncio.to_thread(source.next_batch, 50)
    assert batch is not None
    prompts = [bytes(group.tokens[0][: group.masks[0].index(ord("<"))]) for group in batch]
    assert len(set(prompts)) == NUM_SEATS
    for group, prompt in zip(batch, prompts, strict=True):
        assert {bytes(tokens[: len(prompt)]) for tokens in group.tokens} == {prompt}
        assert group.scores == [1.0] * 4
        text = bytes(group.tokens[0])
        num_turns = 2 if b"citizen" in prompt else 3  # citizens sleep at night
        assert text.count(b"<pass/>\0") == num_turns
        said = bytes(label for label in group.masks[0] if label != -100)
        assert said == b"<pass/>\0" * num_turns
    assert all(body["n"] == 1 for body in fake.state.requests)


@pytest.mark.slow
async def test_two_policies_play_one_game_and_only_the_own_one_is_posted() -> None:
    town, mafia = fake_inference(passing), fake_inference(lambda prompt, index: "<say>hello</say>")
    game = {**GAME, "task": {**GAME["task"], "policy_plays": "town"}}
    with served(mafia) as opponent, served_run(town, batch_size=16, max_token_len=512) as (api, inference, source):
        keys = {"api_key": "ours alone", "api_token": "of the run"}
        config = settings(api, inference, opponent_urls=[opponent], **keys, **game)
        async with at_work(config, tiny_tokenizer()):
            batch = await asyncio.to_thread(source.next_batch, 50)
    assert batch is not None
    assert len(batch) == NUM_SEATS - 1
    assert not [group for group in batch if b", mafia" in bytes(group.tokens[0])]
    assert all(b": hello" in bytes(group.tokens[0]) for group in batch)  # read there, and not trained
    assert all(b"hello" not in bytes(label for label in group.masks[0] if label > 0) for group in batch)
    asked = ["".join(map(chr, body["prompt"]["prompt_token_ids"])) for body in mafia.state.requests]
    assert asked
    assert all(", mafia" in prompt for prompt in asked)
    assert (town.state.authorizations, mafia.state.authorizations) == (
        {"Bearer ours alone"},
        {"Bearer of the run"},  # on loopback; a key of its own goes first
    )


@pytest.mark.slow
@pytest.mark.parametrize(("num_ahead", "num_queued"), [(2, 5), (6, 10)])
async def test_no_more_games_are_played_than_the_trainer_may_be_behind(num_ahead: int, num_queued: int) -> None:
    """Batches are of two groups: one game is always begun, a second one when all its groups are wanted."""
    fake = fake_inference(passing)
    with served_run(fake, max_token_len=512) as (api, inference, _):
        async with at_work(settings(api, inference, max_batches_offpolicy=num_ahead, **GAME), tiny_tokenizer()):
            await queue_that_stays(api, num_queued)
            num_requests = 4 * (NUM_SEATS + NUM_SEATS + 3)  # talk, vote, and who is awake at night
            assert len(fake.state.requests) == num_requests * num_queued // NUM_SEATS


@pytest.mark.slow
async def test_all_acting_seats_are_sampled_concurrently_and_cancelled_together() -> None:
    fake = fake_inference(passing)
    are_all_asked = asyncio.Event()
    num_asked = 0
    loop = asyncio.get_running_loop()

    @fake.middleware("http")
    async def hold(request: Any, call_next: Any) -> Any:
        nonlocal num_asked
        if request.url.path != "/generate":
            return await call_next(request)
        num_asked += 1
        if num_asked == 4 * NUM_SEATS:
            loop.call_soon_threadsafe(are_all_asked.set)
        await asyncio.Event().wait()  # an answer never comes

    with served_run(fake, max_token_len=512) as (api, inference, _):
        async with asyncio.timeout(60), at_work(settings(api, inference, max_workers=5, **GAME), tiny_tokenizer()):
            await are_all_asked.wait()


@pytest.mark.slow
async def test_a_refusal_during_a_game_ends_the_environment_with_the_answer_of_the_server() -> None:
    fake = fake_inference(passing)

    @fake.middleware("http")
    async def refuse_votes(request: Any, call_next: Any) -> Any:
        body = await request.body()
        is_vote = request.url.path == "/generate" and bytes(json.loads(body)["prompt"]["prompt_token_ids"]).count(
            b"vote:"
        )
        return PlainTextResponse("no votes here", 400) if is_vote else await call_next(request)

    with served_run(fake, max_token_len=512) as (api, inference, _):
        async with asyncio.timeout(60):
            with pytest.raises(PeerError, match="/generate was refused with 400: no votes here"):
                await work(settings(api, inference, **GAME), tiny_tokenizer())


async def test_a_refused_post_is_an_error_with_the_answer_of_the_server() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(422, text="group 0: scores.1: not finite"))
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as http:
        with pytest.raises(
            PeerError, match=r"POST http://api\.test/scored_data was refused with 422: group 0: scores\.1"
        ):
            await RolloutApi(http).post([ScoredGroup(tokens=[[1]], masks=[[1]], scores=[0.0])])


async def test_an_unavailable_server_is_logged_once_for_many_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for limit, seconds in {"_REPORT_AFTER_S": 0.0, "_MIN_PAUSE_S": 0.001}.items():
        monkeypatch.setattr(peers, limit, seconds)
    asked = itertools.count()
    answers = httpx.MockTransport(lambda _request: httpx.Response(503 if next(asked) < 48 else 200, text="loading"))
    async with httpx.AsyncClient(transport=answers, base_url="http://server") as http:
        server = InferenceServers([http], timeout_s=5)
        with caplog.at_level("INFO"):
            await asyncio.gather(*(server.wait_until_healthy() for _ in range(16)))
    said = [record.message for record in caplog.records if record.name == peers.log.name]
    assert [line.partition(" for")[0].partition(" after")[0] for line in said] == [
        "inference server http://server has not answered",
        "inference server http://server answers again",
    ]


@pytest.mark.parametrize("ends_in", ["an answer", "silence"])
async def test_a_long_request_that_fails_at_its_end_does_not_count_as_silence_of_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends_in: str
) -> None:
    clock = itertools.chain([0.0], itertools.repeat(100.0))  # the first request takes so many seconds
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: next(clock), time=lambda: 0.0))
    monkeypatch.setattr(peers, "_MIN_PAUSE_S", 0.001)
    asked = itertools.count()

    def answer(request: httpx.Request) -> httpx.Response:
        if next(asked) == 0 and ends_in == "silence":
            raise httpx.ReadTimeout("no answer", request=request)
        return httpx.Response(503 if next(asked) == 1 else 200, text="this server is shutting down")

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as http:
        await InferenceServers([http], timeout_s=5).wait_until_healthy()
    said = [each.message for each in caplog.records if each.name == peers.log.name and each.levelname == "WARNING"]
    expected = ["inference server http://server has not answered for 100 s (no answer); retrying"]
    assert said == (expected if ends_in == "silence" else [])


def test_progress_is_logged_again_when_there_are_new_groups(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of groups in the last line was not noted, so that it came every ten seconds while all stood still."""
    now_s = itertools.count(step=20.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(now_s))
    status = EnvironmentStatus(
        current_step=1, queue_size=0, unallocated_fraction=0, self_queue_size=0, max_group_size=8, env_weight=1
    )
    group = ScoredGroup(tokens=[[1, 2]], masks=[[-100, 2]], scores=[0.5])
    progress = Progress()
    with caplog.at_level("INFO"):
        for posted in ([group], [], [], [group]):
            progress.posted(posted)
            progress.log_periodically(status)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "step 1: 1 groups sent, 0 queued",
        "step 1: 2 groups sent, 0 queued",
    ]


async def test_an_environment_says_which_service_of_which_run_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[RegisterEnvironmentRequest] = []

    class Api:
        async def register(self, request: RegisterEnvironmentRequest) -> RegisterEnvironmentResponse:
            registered.append(request)
            return RegisterEnvironmentResponse(status="success", env_id=0)

        async def limits(self) -> BatchLimits:
            return BatchLimits(batch_size=-1, max_token_len=-1)

    link_to: Any = TrainerLink
    config = settings("http://127.0.0.1:1", "http://127.0.0.1:2")
    for service in (None, "env"):
        if service is not None:
            monkeypatch.setenv(RUN_VARIABLE, "run")
            monkeypatch.setenv(SERVICE_VARIABLE, service)
        await link_to(config, Api(), SimpleNamespace(is_able=False), notify=None, limit_of_servers=None).register()
    assert [each.service for each in registered] == [None, "run/env"]
