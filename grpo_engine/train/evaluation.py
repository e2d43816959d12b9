"""Evaluation on held-out prompts: posts an order to the rollout API, waits for the answers, and makes metrics of them.

Prompts and rewards belong to the environments, which poll the rollout API for orders. The trainer waits, so that the
weights published last are measured; completions of other versions are logged. A failed evaluation is logged, and
training continues without it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from statistics import fmean

import torch

from grpo_engine.algo.evaluation import avg_at_k, ks_up_to, over_prompts, pass_at_k
from grpo_engine.data.rollout_source import RolloutSource
from grpo_engine.errors import GrpoError, PeerUnavailable, first_of
from grpo_engine.retrying import never
from grpo_engine.train.config import TrainConfig
from grpo_engine.wire.metrics import EVALUATION_PREFIX
from grpo_engine.wire.rollouts import EvaluationAnswer, EvaluationOrder, EvaluationState, NamedAnswer

log = logging.getLogger(__name__)

_HOLD_S = 1.0
"""Long-poll time of the API; a stop request is seen after at most this time."""
_PAUSE_S = 0.25
"""Between two requests to an API that does not answer."""
_MOST_NAMED = 1000
"""Environments with metrics of their own, which take a millisecond each."""


class Evaluator:
    """Orders evaluations and computes their metrics."""

    def __init__(
        self,
        config: TrainConfig,
        source: RolloutSource,
        *,
        stop: Callable[[], bool] = never,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Send no request yet.

        Args:
            stop: whether the run is stopping.
            meanwhile: called about once a second while waiting; its errors end the evaluation.
        """
        self._config = config
        self._source = source
        self._stop = stop
        self._meanwhile = meanwhile

    def is_due(self, step: int) -> bool:
        """Whether an evaluation is due after `step` steps: before the first, every `eval_every`, after the last."""
        every = self._config.eval_every
        return every > 0 and (step % every == 0 or step == self._config.training_steps)

    def measure_if_due(self, step: int, policy_version: int) -> dict[str, float]:
        """Metrics of the policy that inference serves; empty when none is due, or none was answered."""
        if not self.is_due(step) or self._stop():
            return {}
        began = time.perf_counter()
        order = EvaluationOrder(
            id=secrets.token_hex(8),
            step=step,
            policy_version=policy_version,
            num_prompts=self._config.eval_prompts,
            num_samples=self._config.eval_samples,
        )
        try:
            state = self._answered(order)
        except GrpoError as error:  # a lost server is an error of the next batch as well
            log.warning("evaluation of step %d: %s; skipped", step, error)
            return {}
        finally:
            self._source.close_evaluation(order)
        if state is None:
            return {}
        if (fault := _fault(state, order)) is not None:
            log.warning("evaluation of step %d: the rollout API has another answer: %s; skipped", step, fault)
            return {}
        for problem in answer_problems(state):
            log.warning("evaluation of step %d: %s", step, problem)
        metrics = evaluation_metrics(state)
        if metrics:
            metrics["eval/time"] = time.perf_counter() - began
            log.info("%s", summary(step, metrics))
        return metrics

    def _answered(self, order: EvaluationOrder) -> EvaluationState | None:
        """The answers, as soon as they are complete, or those that came within the time limit; None on a stop."""
        deadline = time.monotonic() + self._config.eval_timeout_s
        state: EvaluationState | None = None
        is_away = False
        while not self._stop():
            self._meanwhile()
            left_s = deadline - time.monotonic()
            try:
                state = self._source.evaluation(order, wait_s=min(_HOLD_S, max(0.0, left_s)))
                is_away = False
            except PeerUnavailable as error:
                if not is_away:
                    log.warning(
                        "evaluation of step %d: %s; waiting for the rollout API to come back", order.step, error
                    )
                is_away = True
                time.sleep(_PAUSE_S)
            if state is not None and state.is_over:
                return state
            if left_s <= 0:
                waited_for = first_of(state.waiting_for) if state else ""
                log.warning(
                    "evaluation of step %d: not complete within %g s (eval_timeout_s); no answer from %s; skipped",
                    order.step,
                    self._config.eval_timeout_s,
                    waited_for or "any environment",
                )
                return state
        return None


def answer_problems(state: EvaluationState) -> list[str]:
    """What is wrong with the answers, for the log."""
    found = [f"{named.environment}: {named.answer.problem}" for named in state.answers if named.answer.problem]
    if (num_more := len(found) - _MOST_NAMED) > 0:
        found[_MOST_NAMED:] = [f"{num_more} more environments have no results"]
    if state.missing:
        found.append(f"{first_of(state.missing)} disconnected without an answer")
    if not _usable(state) and not found and state.is_over:
        who = f"none of {first_of(state.unable)} evaluates" if state.unable else "there is no environment"
        found.append(f"{who}: use environments of grpo-engine, or set eval_every 0; skipped")
    off = Counter(
        first_of(map(str, versions))
        for named in _usable(state)
        for prompt in named.answer.policy_versions or []
        for versions in prompt
        if versions != [state.order.policy_version]
    )
    if off:
        others = first_of((f"{count} by version {versions}" for versions, count in sorted(off.items())), separator="; ")
        found.append(
            f"{sum(off.values())} completions were not sampled by the published version "
            f"{state.order.policy_version} ({others}): with a bridge that publishes every few steps, set eval_every "
            "to a multiple of them"
        )
    return found


def evaluation_metrics(state: EvaluationState) -> dict[str, float]:
    """Metrics of all environments together, and of the first ones where there are several; empty without an answer.

    The joint metrics are left out when an environment is missing, so that a curve does not jump.
    """
    usable = _usable(state)
    is_whole = len(usable) == len(state.answers) and not state.missing and not state.waiting_for
    metrics: dict[str, float] = {}
    if usable and is_whole:
        metrics |= _metrics_of([named.answer for named in usable], state.order, EVALUATION_PREFIX)
    if len(usable) > 1 or not is_whole:
        for name, answer in islice(_by_name(usable).items(), _MOST_NAMED):
            metrics |= _metrics_of([answer], state.order, f"{EVALUATION_PREFIX}{name}/")
    return metrics


def summary(step: int, metrics: dict[str, float]) -> str:
    """One line for a log's reader: `… step 50: avg@4 0.812 ± 0.021, pass@1 0.503 ± 0.027 (64 prompts, 0.8 s)`."""
    shown = [
        f"{name.removeprefix(EVALUATION_PREFIX)} {value:.3f}"
        + (f" ± {metrics[f'{name}_se']:.3f}" if f"{name}_se" in metrics else "")
        for name, value in metrics.items()
        if "@" in name and not name.endswith("_se")
    ]
    num_prompts = metrics.get("eval/num_prompts")
    size = f"{num_prompts:.0f} prompts, " if num_prompts is not None else ""
    return f"evaluated step {step}: {', '.join(shown)} ({size}{metrics['eval/time']:.1f} s)"


def _fault(state: EvaluationState, order: EvaluationOrder) -> str | None:
    """How the answers of a rollout API that did not check them fail the order; None where they match it."""
    if state.order != order:
        return f"order {state.order.id} of step {state.order.step}"
    faults = (named.answer.fault(order) for named in state.answers)
    return next((fault for fault in faults if fault is not None), None)


def _usable(state: EvaluationState) -> list[NamedAnswer]:
    return [named for named in state.answers if named.answer.problem is None and named.answer.rewards]


def _by_name(answers: Sequence[NamedAnswer]) -> dict[str, EvaluationAnswer]:
    """By the name that stays the same after a restart, unless two share it."""
    names = Counter(named.desired_name for named in answers)
    return {
        named.desired_name if names[named.desired_name] == 1 else named.environment: named.answer for named in answers
    }


def _metrics_of(answers: Sequence[EvaluationAnswer], order: EvaluationOrder, prefix: str) -> dict[str, float]:
    """Metrics over the prompts of all `answers`. P prompts, G completions of each."""
    rewards_PG = torch.tensor([row for answer in answers for row in answer.rewards], dtype=torch.float64)
    solved_PG = torch.tensor(
        [[reward >= answer.solved_from for reward in row] for answer in answers for row in answer.rewards]
    )
    values = {f"avg@{order.num_samples}": avg_at_k(rewards_PG)}
    values |= {f"pass@{k}": pass_at_k(solved_PG, k) for k in ks_up_to(order.num_samples)}
    metrics: dict[str, float] = {}
    for name, values_P in values.items():
        estimate = over_prompts(values_P)
        metrics[prefix + name] = float(estimate.mean)
        if len(values_P) > 1:
            metrics[f"{prefix}{name}_se"] = float(estimate.standard_error)
    metrics[prefix + "num_prompts"] = float(len(rewards_PG))
    metrics[prefix + "length_mean"] = fmean([n for answer in answers for row in answer.lengths for n in row])
    metrics[prefix + "truncated_fraction"] = fmean([t for answer in answers for row in answer.truncated for t in row])
    if all(answer.policy_versions is not None for answer in answers):
        published = [order.policy_version]
        metrics[prefix + "other_version_fraction"] = fmean(
            [v != published for answer in answers for row in answer.policy_versions or [] for v in row]
        )
    return metrics
