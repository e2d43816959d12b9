"""Evaluates held-out items on the trainer's order and posts the rewards to the rollout API.

One order at a time; a newer one, or its withdrawal, cancels it. An environment that cannot evaluate answers with the
reason and goes on training. The answer is kept until the next order, in case the API was reset.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_engine.environments.clients import InferenceServer, RolloutApi, UnknownEvaluation
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.items.source import held_out_items
from grpo_engine.environments.sampling.policy import Policy, PromptTooLong
from grpo_engine.environments.sampling.prompts import Tokenizer
from grpo_engine.environments.sampling.sample import Rollouts, num_groups, sample_item, sample_rewards
from grpo_engine.environments.tasks.base import Item
from grpo_engine.environments.tasks.concurrency import gather_all
from grpo_engine.errors import ConfigError, GrpoError, PeerError
from grpo_engine.wire.rollouts import EvaluationAnswer, EvaluationOrder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Results of one prompt, one entry per completion."""

    rewards: list[float]
    lengths: list[int]
    truncated: list[bool]
    versions: list[list[int]] | None


class Evaluator:
    """Runs one evaluation at a time beside the training groups."""

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Tokenizer,
        api: RolloutApi,
        inference: InferenceServer,
        *,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """Check whether the task has held-out items.

        Args:
            notify: called when there is room for training groups again, and at the end.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._api = api
        self._inference = inference
        self._notify = notify
        self._order: EvaluationOrder | None = None
        self._answer: EvaluationAnswer | None = None
        """Answer to `_order`, once measured."""
        self._task: asyncio.Task[None] | None = None
        self._items: list[Item] = []
        self._num_items_wanted = 0
        self._env_id = -1
        self._num_unstarted = 0
        self.is_able = True
        """Whether the task has held-out items."""
        try:
            held_out_items(config.task, 1)
        except ConfigError as error:
            log.warning("this environment answers no evaluations: %s", error)
            self.is_able = False

    @property
    def is_running(self) -> bool:
        """Whether an evaluation is in progress."""
        return self._task is not None and not self._task.done()

    @property
    def has_unstarted_prompts(self) -> bool:
        """Whether any of its prompts has not been sent: then no training group should begin."""
        return self.is_running and self._num_unstarted > 0

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
            self._num_unstarted = order.num_prompts
        self._task = tasks.create_task(self._evaluate(order, longest))
        self._task.add_done_callback(lambda _: self._notify())

    def cancel(self) -> None:
        """Cancel the evaluation in progress."""
        if self._task is not None:
            self._task.cancel()

    async def _evaluate(self, order: EvaluationOrder, longest: int) -> None:
        if self._answer is None:
            self._answer = await self._measured(order, longest)
        try:
            await self._api.answer(order.id, self._answer.model_copy(update={"env_id": self._env_id}))
        except UnknownEvaluation as error:  # the trainer went on without it, or will order it again
            log.warning("evaluation of step %d was not taken: %s", order.step, error)
        except PeerError as error:
            log.warning("evaluation of step %d was refused: %s", order.step, error)
            self._answer = EvaluationAnswer(env_id=self._env_id, problem=str(error))  # posted at the next order

    async def _measured(self, order: EvaluationOrder, longest: int) -> EvaluationAnswer:
        """The measured rewards, or the reason why there are none."""
        began = time.monotonic()
        try:
            measured = await self._all_prompts(order, longest)
        except GrpoError as error:
            log.warning("evaluation of step %d failed: %s", order.step, error)
            return EvaluationAnswer(env_id=self._env_id, problem=str(error))
        versions = [prompt.versions for prompt in measured if prompt.versions is not None]
        answer = EvaluationAnswer(
            env_id=self._env_id,
            rewards=[prompt.rewards for prompt in measured],
            lengths=[prompt.lengths for prompt in measured],
            truncated=[prompt.truncated for prompt in measured],
            policy_versions=versions if len(versions) == len(measured) else None,
            solved_from=self._config.eval_solved_from,
            time_s=time.monotonic() - began,
        )
        log.info(
            "evaluated step %d: %d held-out prompts × %d, mean reward %.3f, %.1f s",
            order.step,
            len(measured),
            order.num_samples,
            sum(map(sum, answer.rewards)) / (len(measured) * order.num_samples),
            answer.time_s,
        )
        return answer

    async def _all_prompts(self, order: EvaluationOrder, longest: int) -> list[Measured]:
        """Sample every prompt, with as many requests at a time as for training groups."""
        if self._num_items_wanted != order.num_prompts:
            self._items = await asyncio.to_thread(held_out_items, self._config.task, order.num_prompts)
            self._num_items_wanted = order.num_prompts
        self._num_unstarted = len(self._items)
        slots = asyncio.Semaphore(max(1, self._config.max_workers // num_groups(self._config.task)))
        asked = await gather_all(self._one_prompt(item, longest, order.num_samples, slots) for item in self._items)
        measured = [prompt for prompt in asked if prompt is not None]
        if not measured:
            raise ConfigError(
                f"max_token_length: none of {len(asked)} held-out prompts leaves room within {longest} tokens: "
                "raise it, or the trainer's seq_len"
            )
        if len(measured) < order.num_prompts:
            log.info("%d of %d held-out prompts: no others fit the limit", len(measured), order.num_prompts)
        return measured

    async def _one_prompt(
        self, item: Item, longest: int, num_samples: int, slots: asyncio.Semaphore
    ) -> Measured | None:
        """Results of one item; None when its prompt leaves no room for a completion."""
        config = self._config
        temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
        # Greedy samples are identical, and vLLM refuses n > 1.
        num_different = num_samples if temperature > 0 else 1
        policy = Policy(
            config=config,
            tokenizer=self._tokenizer,
            inference=self._inference,
            temperature=temperature,
            longest=longest,
        )
        async with slots:
            self._num_unstarted -= 1
            if self._num_unstarted == 0:
                self._notify()
            try:
                of_seats = await sample_item(policy, item, num_different)
            except PromptTooLong:
                return None
        return measured_prompt(of_seats, num_samples // num_different)


def measured_prompt(of_seats: Sequence[Rollouts], num_copies: int = 1) -> Measured:
    """One entry per sample; for a game the mean reward and the total length over its seats."""
    samples = list(zip(*(rollouts.conversations for rollouts in of_seats), strict=True))
    conversations = [conversation for sample in samples for conversation in sample]
    versions = [sorted({version for each in sample for version in each.sampled_versions}) for sample in samples]
    return Measured(
        rewards=sample_rewards(of_seats) * num_copies,
        lengths=[sum(each.num_sampled for each in sample) for sample in samples] * num_copies,
        truncated=[any(each.is_truncated for each in sample) for sample in samples] * num_copies,
        versions=versions * num_copies if all(each.has_versions for each in conversations) else None,
    )
