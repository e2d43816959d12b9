"""Evaluates held-out items, on the trainer's order or at `steps_per_eval`; posts rewards that were ordered.

One order at a time; a newer one, or its withdrawal, cancels it. An environment that cannot evaluate answers with the
reason and goes on training. The answer is kept until the next order, in case the API was reset.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from grpo_engine.environments.clients import RolloutApi
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.inference_servers import InferenceServers
from grpo_engine.environments.measuring import HeldOutMeasure
from grpo_engine.environments.peers import UnknownEvaluation
from grpo_engine.environments.sampling.policy import Opponent
from grpo_engine.environments.sampling.prompts import Tokenizer
from grpo_engine.errors import PeerError
from grpo_engine.wire.rollouts import EvaluationAnswer, EvaluationOrder

log = logging.getLogger(__name__)


class Evaluator:
    """Runs one evaluation at a time beside the training groups."""

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Tokenizer,
        api: RolloutApi,
        inference: InferenceServers,
        *,
        opponent: Opponent | None = None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """Check whether the task has held-out items.

        Args:
            notify: called when there is room for training groups again, and at the end.
        """
        self._config = config
        self._api = api
        self._notify = notify
        self._measure = HeldOutMeasure(config, tokenizer, inference, opponent=opponent, notify=notify)
        self._order: EvaluationOrder | None = None
        self._answer: EvaluationAnswer | None = None
        """Answer to `_order`, once measured."""
        self._task: asyncio.Task[None] | None = None
        self._env_id = -1
        self._own: EvaluationOrder | None = None
        """The evaluation of `steps_per_eval` that is due or was made last."""
        self._own_metrics: dict[str, float] = {}

    @property
    def is_able(self) -> bool:
        """Whether the task has held-out items."""
        return self._measure.is_able

    @property
    def is_running(self) -> bool:
        """Whether an evaluation is in progress."""
        return self._task is not None and not self._task.done()

    @property
    def has_unstarted_prompts(self) -> bool:
        """Whether any of its prompts has not been sent: then no training group should begin."""
        return self.is_running and self._measure.num_unstarted > 0

    def own_order(self, step: int) -> EvaluationOrder | None:
        """The evaluation that `steps_per_eval` wants at this step of the trainer, until it is made."""
        every = self._config.steps_per_eval
        if not every or not self.is_able:
            return None
        if self._own is None or step >= self._own.step + every:
            num_prompts = self._config.steps_per_eval_prompts
            self._own = EvaluationOrder(
                id=f"own-{step}", step=step, policy_version=0, num_prompts=num_prompts, num_samples=1
            )
        is_made = self._order == self._own and self._answer is not None
        return None if is_made else self._own

    def take_own_metrics(self) -> dict[str, float]:
        """What own evaluations measured since the last call."""
        taken, self._own_metrics = self._own_metrics, {}
        return taken

    def follow(self, order: EvaluationOrder | None, *, env_id: int, longest: int, tasks: asyncio.TaskGroup) -> None:
        """Start the current order, and cancel one that no longer stands.

        Args:
            longest: tokens that a prompt and its completion may have together.
            tasks: task group in which it runs.
        """
        self._env_id = env_id
        is_known = order is not None and self._order is not None and order.id == self._order.id
        if self.is_running and is_known:
            return
        self.cancel()
        if order is None:
            return
        if not is_known:
            self._order, self._answer = order, None
            self._measure.num_unstarted = order.num_prompts
        self._task = tasks.create_task(self._evaluate(order, longest))
        self._task.add_done_callback(lambda _: self._notify())

    def cancel(self) -> None:
        """Cancel the evaluation in progress."""
        if self._task is not None:
            self._task.cancel()

    async def _evaluate(self, order: EvaluationOrder, longest: int) -> None:
        if self._answer is None:
            self._answer = await self._measure.answer(order, longest=longest, env_id=self._env_id)
        if order == self._own:
            self._own_metrics = _own_metrics(self._answer)
            return
        try:
            await self._api.answer(order.id, self._answer.model_copy(update={"env_id": self._env_id}))
        except UnknownEvaluation as error:  # the trainer went on without it, or will order it again
            log.warning("evaluation of step %d was not taken: %s", order.step, error)
        except PeerError as error:
            log.warning("evaluation of step %d was refused: %s", order.step, error)
            self._answer = EvaluationAnswer(env_id=self._env_id, problem=str(error))  # posted at the next order


def _own_metrics(answer: EvaluationAnswer) -> dict[str, float]:
    """Mean reward, share of solved prompts and length, by the names of the trainer's evaluations."""
    rewards = [reward for prompt in answer.rewards for reward in prompt]
    if not rewards:
        return {}
    return {
        "eval/avg@1": sum(rewards) / len(rewards),
        "eval/pass@1": sum(reward >= answer.solved_from for reward in rewards) / len(rewards),
        "eval/length_mean": sum(sum(prompt) for prompt in answer.lengths) / len(rewards),
        "eval/num_prompts": float(len(answer.rewards)),
    }
