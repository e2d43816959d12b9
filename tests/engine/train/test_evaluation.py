"""Evaluation: the estimators against enumeration, metrics and problems of answers, and a trainer that awaits them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_fakes import ENVIRONMENT, RUN, served_api
from training import ListedSource, made_up_groups, metrics_lines, settings, train_in

from grpo_engine.algo.evaluation import avg_at_k, ks_up_to, over_prompts, pass_at_k
from grpo_engine.data.source import RolloutApiSource
from grpo_engine.errors import PeerUnavailable
from grpo_engine.train.evaluation import Evaluator, answer_problems, evaluation_metrics
from grpo_engine.wire.rollouts import EvaluationAnswer, EvaluationOrder, EvaluationState, NamedAnswer

samples_of_prompts = st.integers(1, 8).flatmap(
    lambda num: st.lists(st.lists(st.booleans(), min_size=num, max_size=num), min_size=1, max_size=5)
)


@given(samples_of_prompts, st.data())
def test_pass_at_k_is_the_share_of_all_k_subsets_that_hold_a_solution(
    solved: list[list[bool]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(solved[0])))
    by_hand = [
        sum(map(any, itertools.combinations(row, k))) / math.comb(len(row), k)  # every subset, one by one
        for row in solved
    ]
    assert pass_at_k(torch.tensor(solved), k).tolist() == pytest.approx(by_hand, abs=1e-12)


def test_pass_at_k_of_ten_thousand_completions_does_not_overflow() -> None:
    solved = torch.zeros(1, 10_000, dtype=torch.bool)
    solved[0, :3] = True
    exact = 1 - math.comb(9_997, 5_000) / math.comb(10_000, 5_000)
    assert float(pass_at_k(solved, 5_000)[0]) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_a_k_that_cannot_be_estimated_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=rf"pass@{k} of 4 completions: k must be between 1 and 4"):
        pass_at_k(torch.zeros(2, 4, dtype=torch.bool), k)


def test_errors_go_over_prompts_and_not_over_completions() -> None:
    means = avg_at_k(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))
    assert means.tolist() == [0.5, 1.0, 0.0]
    estimate = over_prompts(means)
    assert float(estimate.mean) == 0.5
    assert float(estimate.standard_error) == pytest.approx(0.5 / math.sqrt(3))  # standard deviation 0.5 of 3 prompts
    assert math.isnan(float(over_prompts(torch.tensor([0.5])).standard_error))


@pytest.mark.parametrize(("num_samples", "ks"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_the_ks_that_are_reported(num_samples: int, ks: list[int]) -> None:
    assert ks_up_to(num_samples) == ks


# --- answers -------------------------------------------------------------------------------------------------------

ORDER = EvaluationOrder(id="a1", step=3, policy_version=7, num_prompts=2, num_samples=2)


def answered(name: str = "sums", number: int = 0, **changes: Any) -> NamedAnswer:
    """Two prompts: one half solved, one solved whole but in one completion of an older version."""
    table: dict[str, Any] = {
        "env_id": number,
        "rewards": [[1.0, 0.5], [1.0, 1.0]],
        "lengths": [[2, 4], [6, 8]],
        "truncated": [[False, True], [False, False]],
        "policy_versions": [[[7], [7]], [[7], [6, 7]]],
        **changes,
    }
    answer = EvaluationAnswer.model_validate(table)
    return NamedAnswer(environment=f"{name}_{number}", desired_name=name, answer=answer)


def state(*answers: NamedAnswer, **changes: Any) -> EvaluationState:
    table: dict[str, Any] = {"is_over": True, "waiting_for": [], "missing": [], "unable": [], **changes}
    return EvaluationState(order=ORDER, answers=list(answers), **table)


def test_the_metrics_of_one_environment_by_hand() -> None:
    assert evaluation_metrics(state(answered())) == pytest.approx(
        {
            "eval/avg@2": 0.875,
            "eval/avg@2_se": 0.125,  # of 0.75 and 1
            "eval/pass@1": 0.75,
            "eval/pass@1_se": 0.25,  # of 0.5 and 1
            "eval/pass@2": 1.0,
            "eval/pass@2_se": 0.0,
            "eval/num_prompts": 2,
            "eval/length_mean": 5,
            "eval/truncated_fraction": 0.25,
            "eval/other_version_fraction": 0.25,
        }
    )
    assert evaluation_metrics(state(answered(solved_from=0.5)))["eval/pass@1"] == 1.0


def test_several_environments_have_metrics_of_their_own_and_together() -> None:
    metrics = evaluation_metrics(state(answered(), answered("sorts", 1, rewards=[[0.0, 0.0], [0.0, 1.0]])))
    assert (metrics["eval/sums/avg@2"], metrics["eval/sorts/avg@2"]) == (0.875, 0.25)
    assert metrics["eval/avg@2"] == pytest.approx((0.875 + 0.25) / 2)
    assert metrics["eval/num_prompts"] == 4
    twins = evaluation_metrics(state(answered("sums", 0), answered("sums", 1)))
    assert {"eval/sums_0/avg@2", "eval/sums_1/avg@2"} <= twins.keys()


@pytest.mark.parametrize(
    "incomplete",
    [
        state(answered(), missing=["sorts"]),
        state(answered(), is_over=False, waiting_for=["sorts_1"]),
        state(answered(), answered("sorts", 1, rewards=[], problem="no server")),
    ],
    ids=["gone", "late", "unable"],
)
def test_without_every_environment_there_is_no_common_metric(incomplete: EvaluationState) -> None:
    metrics = evaluation_metrics(incomplete)
    assert metrics["eval/sums/avg@2"] == 0.875
    assert "eval/avg@2" not in metrics


def test_one_prompt_has_no_standard_error_and_a_server_without_versions_no_fraction_of_them() -> None:
    one = answered(rewards=[[1.0, 0.0]], lengths=[[1, 1]], truncated=[[False, False]], policy_versions=None)
    metrics = evaluation_metrics(state(one))
    assert metrics["eval/pass@2"] == 1.0
    assert not [name for name in metrics if name.endswith(("_se", "version_fraction"))]


@pytest.mark.parametrize(
    ("found", "problems"),
    [
        (state(answered(policy_versions=[[[7], [7]], [[7], [7]]])), []),
        (state(answered()), ["1 completions were not sampled by the published version 7 (1 by version 6, 7)"]),
        (
            state(unable=["gsm8k_0"]),
            ["none of gsm8k_0 evaluates: use environments of grpo-engine, or set eval_every 0"],
        ),
        (state(answered(policy_versions=None), missing=["sorts"]), ["sorts disconnected without an answer"]),
        (state(answered(rewards=[], problem="no held-out item")), ["sums_0: no held-out item"]),
    ],
)
def test_the_problems_of_an_evaluation_are_reported(found: EvaluationState, problems: list[str]) -> None:
    for problem, reported in zip(problems, answer_problems(found), strict=True):
        assert problem in reported


# --- the trainer ---------------------------------------------------------------------------------------------------


def evaluator(source: RolloutApiSource, **changes: Any) -> Evaluator:
    hooks = {name: changes.pop(name) for name in ("stop", "meanwhile") if name in changes}
    return Evaluator(settings(eval_every=2, training_steps=5, **changes), source, **hooks)


def test_it_is_due_at_first_every_so_many_steps_and_at_last() -> None:
    source = RolloutApiSource("http://api.test")
    assert [step for step in range(6) if evaluator(source).is_due(step)] == [0, 2, 4, 5]
    assert not any(Evaluator(settings(eval_every=0), source).is_due(step) for step in range(6))
    source.close()


def test_a_stock_api_is_named_and_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(404, json={"detail": "Not Found"}))
    with RolloutApiSource("http://api.test", transport=transport) as source:
        assert evaluator(source).measure_if_due(0, 0) == {}
    assert "http://api.test has no evaluations (a stock rollout API)" in caplog.text


@pytest.mark.slow
def test_an_evaluation_without_answers_times_out_and_names_the_environments(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with served_api() as api, RolloutApiSource(api) as source:
        source.register(**RUN)
        source.poll()
        httpx.post(f"{api}/register-env", json={**ENVIRONMENT, "evaluates": True})
        assert evaluator(source, eval_timeout_s=0.2).measure_if_due(0, 0) == {}
        assert "not complete within 0.2 s (eval_timeout_s); no answer from sums_0" in caplog.text
        order = httpx.request("GET", f"{api}/status-env", json={"env_id": 0}).json()
        assert "evaluation" not in order


@pytest.mark.slow
def test_a_stop_ends_the_wait_during_which_the_bridge_is_polled() -> None:
    rounds: list[int] = []
    with served_api() as api, RolloutApiSource(api) as source:
        source.register(**RUN)
        waiting = evaluator(source, stop=lambda: len(rounds) >= 2, meanwhile=lambda: rounds.append(1))
        assert waiting.measure_if_due(0, 0) == {}
    assert len(rounds) == 2


def test_an_unreachable_server_skips_the_evaluation_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def poll_server() -> None:
        raise PeerUnavailable("no inference server within 60 s")

    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={}))
    with RolloutApiSource("http://api.test", transport=transport) as source:
        assert evaluator(source, meanwhile=poll_server).measure_if_due(0, 0) == {}
    assert "evaluation of step 0: no inference server within 60 s; skipped" in caplog.text


class EvaluatedSource(ListedSource):
    """Batches from a list, and evaluations that are answered at once with the version for a reward."""

    def __init__(self, seeds: range) -> None:
        super().__init__([made_up_groups(seed) for seed in seeds])
        self.orders: list[EvaluationOrder] = []

    def evaluation(self, order: EvaluationOrder, wait_s: float = 0.0) -> EvaluationState:
        self.orders.append(order)
        rewards = [[float(order.policy_version)] * order.num_samples] * 2
        lengths, truncated = [[1] * order.num_samples] * 2, [[False] * order.num_samples] * 2
        answer = EvaluationAnswer(env_id=0, rewards=rewards, lengths=lengths, truncated=truncated)
        named = NamedAnswer(environment="sums_0", desired_name="sums", answer=answer)
        return EvaluationState(order=order, is_over=True, answers=[named], waiting_for=[], missing=[], unable=[])

    def close_evaluation(self, order: EvaluationOrder) -> None:
        pass


def run(folder: Path, seeds: range, **changes: Any) -> EvaluatedSource:
    config = settings(eval_every=2, eval_prompts=2, eval_samples=2, training_steps=5, checkpoint_interval=3, **changes)
    source = EvaluatedSource(seeds)
    train_in(folder, config, source)
    return source


def test_an_evaluation_is_part_of_its_steps_line_and_the_first_one_is_step_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, range(5))
    lines = metrics_lines(tmp_path)
    found = [(line.step, line.policy_version, line.metrics.get("eval/avg@2")) for line in lines]
    assert found == [(0, 0, 0.0), (1, 1, None), (2, 2, 2.0), (3, 3, None), (4, 4, 4.0), (5, 5, 5.0)]
    assert all(name.startswith("eval/") for name in lines[0].metrics)
    assert "train/loss" in lines[2].metrics
    assert "Step 0/" not in capsys.readouterr().out  # parsers of the console expect steps alone


@pytest.mark.parametrize(("resume", "seeds", "steps"), [(True, range(4, 5), [5]), (False, range(5), [0, 2, 4, 5])])
def test_a_resumed_run_repeats_no_recorded_evaluation_and_a_new_one_all(
    tmp_path: Path, resume: bool, seeds: range, steps: list[int]
) -> None:
    first = run(tmp_path, range(4))  # the batches end after step 4
    assert [order.step for order in first.orders] == [0, 2, 4]
    second = run(tmp_path, seeds, resume=resume)
    assert [order.step for order in second.orders] == steps
    assert [line.step for line in metrics_lines(tmp_path)] == [0, 1, 2, 3, 4, 5]
