"""An environment that is asked for an evaluation, against the real rollout API and a fake inference server."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import environment_runs
import httpx
import pytest
from environment_runs import at_work, settings
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from rollout_fakes import FakeTokenizer, fake_inference, served, served_api

from grpo_engine.data.source import RolloutApiSource
from grpo_engine.environments.items.source import held_out_items
from grpo_engine.environments.main import work
from grpo_engine.environments.tasks.base import belongs_to
from grpo_engine.environments.tasks.puzzles import Sort6
from grpo_engine.models.tiny_tokenizer import tiny_tokenizer
from grpo_engine.wire.rollouts import EvaluationOrder, EvaluationState

pytestmark = pytest.mark.slow

RUN = {**environment_runs.RUN, "num_steps": 2, "eval_every": 2}
ORDER = EvaluationOrder(id="a1", step=0, policy_version=5, num_prompts=6, num_samples=3)


def first_right(prompt: str, index: int) -> str:
    """The right answer to a `sort` prompt in the first completion alone."""
    digits = prompt.strip().removeprefix("sort ")
    return "".join(sorted(digits)) if index == 0 else "x"


@pytest.fixture
def servers() -> Iterator[tuple[str, str, FastAPI]]:
    fake = fake_inference(first_right)
    with served_api() as api, served(fake) as inference:
        yield api, inference, fake


@pytest.fixture(autouse=True)
def _no_more_environments_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_engine.rollouts.state.evaluations.SETTLE_S", 0.05)  # there is one environment


def evaluated(url: str, order: EvaluationOrder = ORDER, **run: Any) -> EvaluationState:
    """Order an evaluation as the trainer does, and wait for it."""
    with RolloutApiSource(url) as source:
        source.register(**{**RUN, **run})
        while not (state := source.evaluation(order, wait_s=5)).is_over:
            pass
        return state


def asked_questions(fake: FastAPI, num_samples: int) -> list[str]:
    """The questions of the requests for so many completions, in order."""
    requests = [body for body in fake.state.requests if body["n"] == num_samples]
    return ["".join(map(chr, body["prompt"]["prompt_token_ids"])).strip() for body in requests]


async def test_held_out_items_are_answered_with_rewards_lengths_and_versions(
    servers: tuple[str, str, FastAPI],
) -> None:
    api, inference, fake = servers
    async with asyncio.timeout(120), at_work(settings(api, inference)):
        state = await asyncio.to_thread(evaluated, api)
    [named] = state.answers
    assert (named.environment, named.desired_name, named.answer.problem) == ("sort6_0", "sort6", None)
    assert named.answer.rewards == [[1.0, 0.0, 0.0]] * 6
    assert named.answer.lengths == [[7, 2, 2]] * 6  # the end token included
    assert named.answer.truncated == [[False] * 3] * 6
    assert named.answer.policy_versions == [[[5]] * 3] * 6
    assert named.answer.solved_from == 1.0
    asked = asked_questions(fake, 3)
    assert sorted(asked) == sorted(item.question for item in held_out_items(Sort6(), 6))
    assert all(belongs_to("held_out", question) for question in asked)
    trained = asked_questions(fake, 4)
    assert not any(belongs_to("held_out", question) for question in trained)


async def test_an_evaluation_has_precedence_over_training_groups(servers: tuple[str, str, FastAPI]) -> None:
    api, inference, fake = servers
    async with asyncio.timeout(120), at_work(settings(api, inference, max_workers=2)):
        await asyncio.to_thread(evaluated, api)
    sizes = [body["n"] for body in fake.state.requests]
    assert sizes[:6] == [3] * 6  # two at a time, and no group between them


async def test_no_more_prompts_are_sampled_concurrently_than_max_workers() -> None:
    fake = fake_inference(first_right)
    at_the_same_time: list[int] = []
    three_are_in = asyncio.Barrier(3)

    @fake.middleware("http")
    async def meet(request: Any, call_next: Any) -> Any:
        if b'"n":3' in await request.body():  # only prompts of the evaluation
            at_the_same_time.append(three_are_in.n_waiting + 1)
            await three_are_in.wait()  # times out if there are ever fewer than three
        return await call_next(request)

    with served_api() as api, served(fake) as inference:
        async with asyncio.timeout(120), at_work(settings(api, inference, max_workers=3)):
            await asyncio.to_thread(evaluated, api)
    assert at_the_same_time == [1, 2, 3] * 2


async def test_the_evaluation_temperature_is_the_trainings_unless_set_and_greedy_needs_one_sample(
    servers: tuple[str, str, FastAPI],
) -> None:
    api, inference, fake = servers
    async with asyncio.timeout(120):
        async with at_work(settings(api, inference, temperature=0.7)):
            await asyncio.to_thread(evaluated, api)
        assert {body["temperature"] for body in fake.state.requests} == {0.7}
        fake.state.requests.clear()
        async with at_work(settings(api, inference, eval_temperature=0.0)):
            state = await asyncio.to_thread(evaluated, api)
    greedy = [body for body in fake.state.requests if body["temperature"] == 0.0]
    # More than six where the environment still got the first trainer's order, before the second registered.
    assert {body["n"] for body in greedy} == {1}
    assert len({tuple(body["prompt"]["prompt_token_ids"]) for body in greedy}) == 6
    assert state.answers[0].answer.rewards == [[1.0] * 3] * 6  # the one sample, three times


async def test_an_environment_without_held_out_items_logs_it_and_trains(
    servers: tuple[str, str, FastAPI], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api, inference, _ = servers
    path = tmp_path / "one.jsonl"
    path.write_text('{"question": "sort 660487", "answer": "1"}\n')
    config = settings(api, inference, task={"name": "jsonl", "path": str(path)})

    def order_and_train() -> bool:
        with RolloutApiSource(api) as source:
            source.register(**RUN)
            assert source.evaluation(ORDER).waiting_for == []
            return source.next_batch(timeout_s=100) is not None

    async with asyncio.timeout(120), at_work(config):
        assert await asyncio.to_thread(order_and_train)
    assert "this environment answers no evaluations: task.path:" in caplog.text


async def test_a_refused_request_is_answered_as_a_problem_and_training_continues(
    servers: tuple[str, str, FastAPI],
) -> None:
    api, _, _ = servers
    fake = fake_inference(first_right)

    @fake.middleware("http")
    async def refuse_evaluations(request: Any, call_next: Any) -> Any:
        body = await request.body()
        return PlainTextResponse("three are too many", 400) if b'"n":3' in body else await call_next(request)

    with served(fake) as inference:
        async with asyncio.timeout(120), at_work(settings(api, inference)):
            state = await asyncio.to_thread(evaluated, api)
            assert state.answers[0].answer.rewards == []
            assert "/generate was refused with 400: three are too many" in (state.answers[0].answer.problem or "")
            with RolloutApiSource(api) as source:
                source.register(**RUN)
                assert await asyncio.to_thread(source.next_batch, timeout_s=100) is not None


async def test_a_repeated_order_after_a_reset_is_answered_without_sampling_again(
    servers: tuple[str, str, FastAPI],
) -> None:
    api, inference, fake = servers

    def reset_and_order_again() -> EvaluationState:
        with RolloutApiSource(api) as source:
            source.register(**RUN)
            while not source.evaluation(ORDER, wait_s=5).is_over:
                pass
            httpx.get(f"{api}/reset_data", params={"force": "true"})
            while not (state := source.evaluation(ORDER, wait_s=5)).is_over:  # registers again, too
                pass
            return state

    async with asyncio.timeout(120), at_work(settings(api, inference)):
        state = await asyncio.to_thread(reset_and_order_again)
    assert state.answers[0].answer.rewards == [[1.0, 0.0, 0.0]] * 6
    assert len(asked_questions(fake, 3)) == 6


async def test_a_withdrawn_order_is_cancelled_and_training_continues() -> None:
    may_answer = threading.Event()
    fake = fake_inference(first_right)

    @fake.middleware("http")
    async def hold_evaluations(request: Any, call_next: Any) -> Any:
        if b'"n":3' in await request.body():
            await asyncio.to_thread(may_answer.wait, 100)
        return await call_next(request)

    def order_withdraw_and_train(url: str) -> bool:
        with RolloutApiSource(url) as source:
            source.register(**RUN)
            while source.evaluation(ORDER).waiting_for != ["sort6_0"]:
                pass
            source.close_evaluation(ORDER)
            return source.next_batch(timeout_s=100) is not None

    with served_api() as api, served(fake) as inference:
        try:
            async with asyncio.timeout(120), at_work(settings(api, inference, max_workers=2)):
                assert await asyncio.to_thread(order_withdraw_and_train, api)
        finally:
            may_answer.set()


async def test_an_environment_answers_the_last_evaluation_before_it_exits(servers: tuple[str, str, FastAPI]) -> None:
    api, inference, _ = servers

    def train() -> EvaluationState:
        with RolloutApiSource(api) as source:
            source.register(**RUN)
            for _ in range(2):
                assert source.next_batch(timeout_s=100) is not None
            last = ORDER.model_copy(update={"id": "last", "step": 2})
            while not (state := source.evaluation(last, wait_s=5)).is_over:
                pass
            return state

    training = asyncio.create_task(asyncio.to_thread(train))
    async with asyncio.timeout(120):
        assert await work(settings(api, inference, total_steps=2), FakeTokenizer()) == 0
        assert len((await training).answers) == 1


async def test_own_evaluations_and_rewards_reach_wandb_in_the_trainers_project_while_it_goes_on(
    servers: tuple[str, str, FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    api, inference, fake = servers
    started: dict[str, Any] = {}
    logged: list[dict[str, float]] = []
    run = SimpleNamespace(log=lambda metrics, step: logged.append({"step": step, **metrics}), finish=lambda: None)
    wandb = SimpleNamespace(init=lambda **settings: started.update(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = settings(api, inference, use_wandb=True, steps_per_eval=2, steps_per_eval_prompts=5, api_key="k")

    def train() -> None:
        with RolloutApiSource(api) as source:
            source.register(**{**RUN, "num_steps": 1000}, wandb_project="mine", wandb_group="g")
            while not any("eval/pass@1" in metrics for metrics in logged):
                assert source.next_batch(timeout_s=100) is not None

    async with asyncio.timeout(120), at_work(config):
        await asyncio.to_thread(train)
    assert (started["project"], started["group"], started["name"]) == ("mine", "g", "sort6")
    assert "api_key" not in started["config"]
    [evaluated_once, *_] = [metrics for metrics in logged if "eval/pass@1" in metrics]
    assert (evaluated_once["eval/pass@1"], evaluated_once["eval/num_prompts"]) == (1.0, 5.0)
    assert any("reward/mean" in metrics for metrics in logged)
    asked = asked_questions(fake, 1)[:5]  # at the same time, so in any order
    assert sorted(asked) == sorted(item.question for item in held_out_items(Sort6(), 5))
    assert fake.state.authorizations == {"Bearer k"}


@pytest.mark.parametrize(("temperature", "num_different"), [(None, 3), (0.0, 1)])
async def test_games_are_evaluated_with_one_entry_each_of_all_their_seats(
    temperature: float | None, num_different: int
) -> None:
    order = ORDER.model_copy(update={"num_prompts": 2})
    task = {"name": "mafia", "max_days": 1, "explain": False, "policy_plays": "town"}
    fake = fake_inference(lambda prompt, index: "<pass/>")
    with served_api() as api, served(fake) as inference:
        config = settings(
            api, inference, task=task, group_size=8, max_token_length=512, eval_temperature=temperature, max_workers=4
        )
        async with asyncio.timeout(120), at_work(config, tiny_tokenizer()):
            state = await asyncio.to_thread(evaluated, api, order, max_token_len=512)
    [named] = state.answers
    assert named.answer.problem is None
    assert [len(row) for row in named.answer.rewards] == [3, 3]
    assert all(reward in (1.0, 2.0) for row in named.answer.rewards for reward in row)
    turns = len("<pass/>") + 1
    assert all(length % turns == 0 and length >= 4 * 2 * turns for row in named.answer.lengths for length in row)
    assert named.answer.policy_versions == [[[5]] * 3] * 2
    prompts = [bytes(body["prompt"]["prompt_token_ids"]) for body in fake.state.requests]
    # Another seat may be in its second turn already; the first item's games open before all others.
    openings = [prompt for prompt in prompts if prompt.count(b"\x02a") == 1][: 4 * num_different]
    assert len(set(openings)) == 4  # the seats of the town, the same in each game of the item
