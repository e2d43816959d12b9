"""Evaluations at the rollout API: who is asked, when one is over, what a restart leaves, what stock clients see."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_fakes import ENVIRONMENT, REGISTRATION, api_client, group

from grpo_engine.rollouts.state import evaluations
from grpo_engine.rollouts.state.evaluations import state_of
from grpo_engine.rollouts.state.records import EnvironmentRecord, EvaluationRecord
from grpo_engine.wire.rollouts import EvaluationAnswer, EvaluationOrder

ORDER: dict[str, Any] = {"id": "a1", "step": 3, "policy_version": 4, "num_prompts": 2, "num_samples": 2}


def answer(env_id: int, **changes: Any) -> dict[str, Any]:
    return {
        "env_id": env_id,
        "rewards": [[1.0, 0.0], [0.5, 0.5]],
        "lengths": [[3, 4], [5, 6]],
        "truncated": [[False, True], [False, False]],
        "policy_versions": [[[4], [4]], [[4], [3, 4]]],
        **changes,
    }


@contextlib.asynccontextmanager
async def run_with(*names: str, database: Path = Path(":memory:"), **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An API with a run and environments that evaluate, ids from 0 on."""
    async with api_client(database, **settings) as api:
        await api.post("/register", json={**REGISTRATION, "eval_every": 3})
        await api.get("/batch")
        for name in names:
            await api.post("/register-env", json={**ENVIRONMENT, "desired_name": name, "evaluates": True})
        yield api


@contextlib.asynccontextmanager
async def ordered_from(*names: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The same, with the order."""
    async with run_with(*names, **settings) as api:
        await api.post("/evaluations", json=ORDER)
        yield api


@pytest.fixture(autouse=True)
def _no_more_environments_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of `state_of`, which takes the time as an argument, cover the wait for environments to register."""
    monkeypatch.setattr(evaluations, "SETTLE_S", 0.0)
    monkeypatch.setattr(evaluations, "SETTLE_WITHOUT_ANSWER_S", 0.0)


async def status_of(api: httpx.AsyncClient, env_id: int, **more: Any) -> dict[str, Any]:
    answered = await api.request("GET", "/status-env", json={"env_id": env_id, **more})
    assert answered.status_code == 200
    return answered.json()  # type: ignore[no-any-return]


async def state(api: httpx.AsyncClient, **params: float) -> dict[str, Any]:
    return (await api.get("/evaluations/a1", params=params)).json()  # type: ignore[no-any-return]


async def test_an_evaluation_ends_with_the_last_answer_of_all_environments_that_evaluate() -> None:
    async with run_with("sums", "sorts") as api:
        assert "evaluation" not in await status_of(api, 0)
        ordered = (await api.post("/evaluations", json=ORDER)).json()
        assert (ordered["is_over"], ordered["waiting_for"]) == (False, ["sums_0", "sorts_0"])
        assert (await status_of(api, 0))["evaluation"] == ORDER
        assert (await api.post("/evaluations/a1/answers", json=answer(0))).json() == {"status": "received"}
        assert "evaluation" not in await status_of(api, 0)
        assert (await status_of(api, 1))["evaluation"] == ORDER
        assert (await state(api))["waiting_for"] == ["sorts_0"]
        await api.post("/evaluations/a1/answers", json=answer(1))
        over = await state(api)
        assert (over["is_over"], over["missing"]) == (True, [])
        assert [(each["desired_name"], each["answer"]["rewards"]) for each in over["answers"]] == [
            ("sums", [[1.0, 0.0], [0.5, 0.5]]),
            ("sorts", [[1.0, 0.0], [0.5, 0.5]]),
        ]


async def test_environments_may_register_from_the_first_order_on() -> None:
    async with api_client() as api:
        assert (await api.post("/evaluations", json=ORDER)).status_code == 409
        await api.post("/register", json=REGISTRATION)
        assert (await api.post("/register-env", json=ENVIRONMENT)).json()["status"] != "success"
        ordered = (await api.post("/evaluations", json=ORDER)).json()
        assert not ordered["is_over"]  # no environment yet, and one is awaited
        joined = await api.post("/register-env", json={**ENVIRONMENT, "evaluates": True})
        assert joined.json()["status"] == "success"
        assert (await status_of(api, 0))["evaluation"]["id"] == "a1"


async def test_a_stock_environment_never_sees_an_evaluation_and_is_not_awaited() -> None:
    stock_keys = [
        "current_step",
        "queue_size",
        "unallocated_fraction",
        "self_queue_size",
        "max_group_size",
        "env_weight",
    ]
    async with run_with() as api:
        await api.post("/register-env", json=ENVIRONMENT)
        before = (await api.request("GET", "/status-env", json={"env_id": 0})).content
        ordered = (await api.post("/evaluations", json=ORDER)).json()
        assert (ordered["is_over"], ordered["unable"], ordered["answers"]) == (True, ["sums_0"], [])
        after = await api.request("GET", "/status-env", json={"env_id": 0})
        assert after.content == before
        assert list(after.json()) == stock_keys
        await api.post("/scored_data", json=group(4, env_id=0))
        assert (await api.get("/batch")).json()["batch"] is not None


async def test_a_held_status_is_answered_when_an_order_is_posted_and_when_it_is_deleted() -> None:
    async with run_with("sums") as api:
        waiting = asyncio.create_task(status_of(api, 0, wait_s=20, current_step=0, queue_size=0))
        await asyncio.sleep(0)
        await api.post("/evaluations", json=ORDER)
        async with asyncio.timeout(10):
            assert (await waiting)["evaluation"]["id"] == "a1"
        waiting = asyncio.create_task(status_of(api, 0, wait_s=20, current_step=0, queue_size=0, evaluation="a1"))
        await asyncio.sleep(0)
        assert not waiting.done()
        await api.delete("/evaluations/a1")
        async with asyncio.timeout(10):
            assert "evaluation" not in await waiting


async def test_a_held_evaluation_request_returns_with_the_last_answer() -> None:
    async with ordered_from("sums") as api:
        waiting = asyncio.create_task(state(api, wait_s=20))
        await asyncio.sleep(0)
        await api.post("/evaluations/a1/answers", json=answer(0))
        async with asyncio.timeout(10):
            assert (await waiting)["is_over"]


async def test_a_killed_api_comes_back_with_the_order_and_the_answers(tmp_path: Path) -> None:
    database = tmp_path / "rollouts.sqlite"
    async with ordered_from("sums", "sorts", database=database) as api:
        await api.post("/evaluations/a1/answers", json=answer(0))
    async with api_client(database) as api:
        assert "evaluation" not in await status_of(api, 0)
        assert (await status_of(api, 1))["evaluation"] == ORDER
        again = await state(api)
        assert [each["environment"] for each in again["answers"]] == ["sums_0"]
        assert again["waiting_for"] == ["sorts_0"]
        await api.post("/evaluations/a1/answers", json=answer(1))
        await api.delete("/evaluations/a1")
    async with api_client(database) as api:
        assert (await state(api))["is_over"]


async def test_an_evaluation_ends_though_the_clock_of_the_machine_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, unix_time = tmp_path / "rollouts.sqlite", time.time
    async with run_with("sums", database=database) as api:
        monkeypatch.setattr(time, "time", lambda: unix_time() - 3600)
        await api.post("/evaluations", json=ORDER)
        await api.post("/evaluations/a1/answers", json=answer(0))
        assert (await state(api))["is_over"]
        await api.post("/evaluations", json={**ORDER, "id": "a2"})
    async with api_client(database) as api:
        await api.post("/disconnect-env", json={"env_id": 0})
        assert (await api.get("/evaluations/a2")).json()["is_over"]


async def test_a_repeated_order_keeps_its_answers_each_once_and_another_order_replaces_it() -> None:
    async with ordered_from("sums") as api:
        for _ in range(2):
            await api.post("/evaluations/a1/answers", json=answer(0))
        assert len((await api.post("/evaluations", json=ORDER)).json()["answers"]) == 1
        assert (await api.post("/evaluations", json={**ORDER, "id": "a2"})).json()["answers"] == []
        assert (await api.get("/evaluations/a1")).status_code == 404
        assert (await status_of(api, 0))["evaluation"]["id"] == "a2"


async def test_answers_to_unknown_evaluations_are_refused() -> None:
    async with run_with("sums") as api:
        assert (await api.post("/evaluations/a1/answers", json=answer(0))).status_code == 404
        await api.post("/evaluations", json=ORDER)
        stranger = await api.post("/evaluations/a1/answers", json=answer(7))
        assert stranger.status_code == 404
        assert "environment 7 is not registered" in stranger.text
        await api.delete("/evaluations/a1")
        assert (await api.post("/evaluations/a1/answers", json=answer(0))).status_code == 404
        assert (await api.delete("/evaluations/unknown")).json() == {"status": "success"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rewards": []}, "rewards: 0 prompts where 1 to 2 were ordered"),
        ({"rewards": [[0.0, 0.0]] * 3}, "rewards: 3 prompts where 1 to 2 were ordered"),
        ({"rewards": [[0.0], [0.0, 1.0]]}, "rewards: prompt 0 has 1 entries where 2 were ordered"),
        ({"lengths": [[1, 2]]}, "lengths: 1 entries for 2 prompts"),
        ({"policy_versions": [[[1], [1]], [[1]]]}, "policy_versions: prompt 1 has 1 entries where 2 were ordered"),
    ],
)
async def test_an_answer_that_does_not_fit_its_order_is_refused_with_the_place(
    changes: dict[str, Any], words: str
) -> None:
    async with ordered_from("sums") as api:
        refused = await api.post("/evaluations/a1/answers", json=answer(0, **changes))
        assert refused.status_code == 422
        assert f"environment 0 (sums_0): {words}" in refused.text
        assert (await state(api))["answers"] == []


async def test_a_reward_that_is_not_finite_is_refused() -> None:
    async with ordered_from("sums") as api:
        body = b'{"env_id": 0, "rewards": [[NaN, 0.0]], "lengths": [[1, 1]], "truncated": [[false, false]]}'
        headers = {"content-type": "application/json"}
        refused = await api.post("/evaluations/a1/answers", content=body, headers=headers)
        assert refused.status_code == 422
        assert "rewards.0.0: Input should be a finite number" in refused.text


async def test_an_environment_that_cannot_evaluate_is_not_awaited_and_its_reason_is_in_the_answers() -> None:
    async with ordered_from("sums") as api:
        await api.post("/evaluations/a1/answers", json={"env_id": 0, "problem": "no held-out item"})
        over = await state(api)
        assert over["is_over"]
        assert over["answers"][0]["answer"]["problem"] == "no held-out item"


async def test_a_killed_environment_is_awaited_only_until_its_liveness_ends() -> None:
    async with ordered_from("sums", "sorts", liveness_s=0.2) as api:
        await api.post("/evaluations/a1/answers", json=answer(0))
        async with asyncio.timeout(20):
            while not (now := await state(api))["is_over"]:  # `sorts` sends no request
                await status_of(api, 0)
        assert (now["waiting_for"], now["missing"]) == ([], ["sorts"])


async def test_a_held_status_request_does_not_reconnect_an_environment() -> None:
    async with run_with("sums") as api:
        held = asyncio.create_task(status_of(api, 0, wait_s=20, current_step=0, queue_size=0))
        await asyncio.sleep(0)
        await api.post("/disconnect-env", json={"env_id": 0})
        await api.post("/register-env", json={**ENVIRONMENT, "evaluates": True})
        await api.post("/evaluations", json=ORDER)
        async with asyncio.timeout(10):
            await held
        assert (await state(api))["waiting_for"] == ["sums_1"]


async def test_the_replacement_of_a_killed_environment_answers_in_its_place() -> None:
    async with ordered_from("sums", liveness_s=0.2) as api:
        await api.post("/register-env", json={**ENVIRONMENT, "evaluates": True})
        await api.post("/evaluations/a1/answers", json=answer(1))
        async with asyncio.timeout(20):
            while not (now := await state(api))["is_over"]:
                await status_of(api, 1)
        assert (now["missing"], [each["environment"] for each in now["answers"]]) == ([], ["sums_1"])


async def test_a_new_registration_of_the_trainer_or_a_reset_deletes_its_evaluation(tmp_path: Path) -> None:
    database = tmp_path / "rollouts.sqlite"
    async with ordered_from("sums", database=database) as api:
        await api.post("/register", json={**REGISTRATION, "eval_every": 3})
        assert "evaluation" not in await status_of(api, 0)
    async with api_client(database) as api:
        assert (await api.get("/evaluations/a1")).status_code == 404
        await api.post("/evaluations", json=ORDER)
        await api.get("/reset_data", params={"force": True})
        assert (await api.get("/evaluations/a1")).status_code == 404


async def test_after_the_last_batch_environments_wait_for_the_last_evaluation() -> None:
    async with api_client() as api:
        await api.post("/register", json={**REGISTRATION, "eval_every": 5, "num_steps": 1})
        await api.post("/evaluations", json={**ORDER, "step": 0})
        await api.post("/register-env", json={**ENVIRONMENT, "evaluates": True})
        await api.post("/evaluations/a1/answers", json=answer(0))
        assert "is_evaluation_to_come" not in await status_of(api, 0)  # batches come first
        await api.post("/scored_data", json=group(4, env_id=0))
        lease = (await api.get("/batch", params={"ack": ""})).json()["lease"]
        assert (await status_of(api, 0))["is_evaluation_to_come"] is True
        await api.post("/evaluations", json={**ORDER, "id": "last", "step": 1})
        assert (await status_of(api, 0))["is_evaluation_to_come"] is True
        await api.post("/evaluations/last/answers", json=answer(0))
        assert "is_evaluation_to_come" not in await status_of(api, 0)
        await api.post("/acknowledge", params={"lease": lease})


async def test_a_trainer_that_ends_without_its_last_evaluation_releases_environments() -> None:
    async with api_client() as api:
        await api.post("/register", json={**REGISTRATION, "eval_every": 5, "num_steps": 1})
        await api.get("/batch", params={"ack": ""})
        await api.post("/register-env", json={**ENVIRONMENT, "evaluates": True})
        await api.post("/scored_data", json=group(4, env_id=0))
        lease = (await api.get("/batch", params={"ack": ""})).json()["lease"]
        assert (await status_of(api, 0))["is_evaluation_to_come"] is True
        await api.post("/acknowledge", params={"lease": lease})
        assert "is_evaluation_to_come" not in await status_of(api, 0)


# --- the rules, with the time as an argument -----------------------------------------------------------------------


def environment(id_: int, name: str, *, evaluates: bool = True) -> EnvironmentRecord:
    return EnvironmentRecord(
        id=id_,
        desired_name=name,
        name=f"{name}_{id_}",
        weight=1.0,
        group_size=2,
        max_token_length=64,
        min_batch_allocation=None,
        evaluates=evaluates,
    )


def record(*answered: int) -> EvaluationRecord:
    answers = tuple(EvaluationAnswer.model_validate(answer(id_)) for id_ in answered)
    return EvaluationRecord(order=EvaluationOrder.model_validate(ORDER), ordered_at=100.0, answers=answers)


@pytest.mark.parametrize(
    ("answered", "since_newcomer_s", "is_over"),
    [((0,), 0.9, False), ((0,), 1.0, True), ((), 9.9, False), ((), 10, True)],
)
def test_an_evaluation_waits_for_environments_that_are_about_to_register(
    monkeypatch: pytest.MonkeyPatch, answered: tuple[int, ...], since_newcomer_s: float, is_over: bool
) -> None:
    monkeypatch.undo()
    one = environment(0, "sums", evaluates=bool(answered))
    found = state_of(
        record(*answered),
        {0: one},
        {0: 100.0},
        [one],
        known_since=90.0,
        registered_at=100.0,
        now=100.0 + since_newcomer_s,
    )
    assert found.is_over is is_over


facts = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=5)


@given(facts)
def test_every_live_environment_that_evaluates_is_awaited_or_has_answered(facts: list[tuple[bool, bool, bool]]) -> None:
    """Each environment: whether it evaluates, is alive, and has answered; those that are not alive have crashed."""
    everybody = {id_: environment(id_, f"task{id_}", evaluates=facts[id_][0]) for id_ in range(len(facts))}
    live = [everybody[id_] for id_ in everybody if facts[id_][1]]
    answered = [id_ for id_ in everybody if facts[id_][0] and facts[id_][2]]
    found = state_of(
        record(*answered),
        everybody,
        dict.fromkeys(everybody, 100.0),
        live,
        known_since=90.0,
        registered_at=0.0,
        now=200.0,
    )
    at_it = {each.name for each in live if each.evaluates and each.id not in answered}
    assert set(found.waiting_for) == at_it
    is_hopeless = bool(everybody) and not any(each.evaluates for each in everybody.values())
    assert found.is_over == (not at_it and (bool(live or answered) or is_hopeless))
    gone = {f"task{id_}" for id_, (evaluates, is_live, _) in enumerate(facts) if evaluates and not is_live}
    assert set(found.missing) == gone - {f"task{id_}" for id_ in answered}


@pytest.mark.parametrize(
    ("evaluates", "is_connected", "is_over"),
    [(True, False, True), (False, True, True), (False, False, True), (True, True, False)],
    ids=["left", "a stock one that ended", "one that cannot and left", "crashed"],
)
def test_without_live_environments_only_a_crashed_one_is_awaited(
    monkeypatch: pytest.MonkeyPatch, evaluates: bool, is_connected: bool, is_over: bool
) -> None:
    monkeypatch.undo()
    one = replace(environment(0, "sums", evaluates=evaluates), is_connected=is_connected)

    def is_over_at(now: float) -> bool:
        return state_of(record(), {0: one}, {0: 50.0}, [], known_since=90.0, registered_at=0.0, now=now).is_over

    assert (is_over_at(109.0), is_over_at(110.0)) == (False, is_over)  # ordered at 100
