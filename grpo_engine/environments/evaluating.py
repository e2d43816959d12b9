"""Evaluations, as an environment does them: held-out items, completions of each, their rewards to the rollout API.

One order at a time; a newer one ends it, and so does its disappearance. An environment that cannot do it says why and
goes on training. What was measured is kept until the next order, for an API that forgot it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.held_out import held_out_items
from grpo_engine.environments.peers import InferenceServer, RolloutApi, UnknownEvaluation
from grpo_engine.environments.policy import Policy, PromptTooLong
from grpo_engine.environments.prompts import Tokenizer
from grpo_engine.environments.rolling_out import Rollouts, num_groups, roll_out, sample_rewards
from grpo_engine.environments.tasks.base import Item
from grpo_engine.environments.together import together
from grpo_engine.errors import ConfigError, GrpoError, PeerError
from grpo_engine.wire.rollouts import EvaluationAnswer, EvaluationOrder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the completions of one prompt came to, one entry each."""

    rewards: list[float]
    lengths: list[int]
    truncated: list[bool]
    versions: list[list[int]] | None


class Evaluator:
    """An environment's part in evaluations."""

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Tokenizer,
        api: RolloutApi,
        inference: InferenceServer,
        *,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """Look whether the task has anything held out.

        Args:
            tell: called when there is room for training groups again, and at the end.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._api = api
        self._inference = inference
        self._tell = tell
        self._order: EvaluationOrder | None = None
        self._answer: EvaluationAnswer | None = None
        """To `_order`, once it is there."""
        self._working: asyncio.Task[None] | None = None
        self._items: list[Item] = []
        self._num_items_wanted = 0
        self._env_id = -1
        self._num_unasked = 0
        self.is_able = True
        """Whether there is anything to evaluate on."""
        try:
            held_out_items(config.task, 1)
        except ConfigError as error:
            log.warning("this environment answers no evaluations: %s", error)
            self.is_able = False

    @property
    def is_at_work(self) -> bool:
        """Whether an evaluation is in hand."""
        return self._working is not None and not self._working.done()

    @property
    def needs_everything(self) -> bool:
        """Whether prompts of it still wait to be asked: then no training group should begin."""
        return self.is_at_work and self._num_unasked > 0

    def follow(self, order: EvaluationOrder | None, *, env_id: int, longest: int, tasks: asyncio.TaskGroup) -> None:
        """Do what is ordered now, and nothing that no longer is.

        Args:
            longest: tokens that a prompt and its completion may have together.
            tasks: where the work is done.
        """
        self._env_id = env_id
        is_known = order is not None and self._order is not None and order.id == self._order.id
        if self.is_at_work and is_known:
            return
        self.give_up()
        if order is None:
            return
        if not is_known:
            self._order, self._answer = order, None
            self._num_unasked = order.num_prompts
        self._working = tasks.create_task(self._work(order, longest))
        self._working.add_done_callback(lambda _: self._tell())

    def give_up(self) -> None:
        """End what is in hand."""
        if self._working is not None:
            self._working.cancel()

    async def _work(self, order: EvaluationOrder, longest: int) -> None:
        if self._answer is None:
            self._answer = await self._measured(order, longest)
        try:
            await self._api.answer(order.id, self._answer.model_copy(update={"env_id": self._env_id}))
        except UnknownEvaluation as error:  # the trainer went on without it, or will tell the API of it again
            log.warning("evaluation of step %d was not taken: %s", order.step, error)
        except PeerError as error:
            log.warning("evaluation of step %d was refused: %s", order.step, error)
            self._answer = EvaluationAnswer(env_id=self._env_id, problem=str(error))  # what is said next

    async def _measured(self, order: EvaluationOrder, longest: int) -> EvaluationAnswer:
        """Everything that was ordered, or the reason why not."""
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
        """Ask every prompt, as many at the same time as when groups are made of them."""
        if self._num_items_wanted != order.num_prompts:
            self._items = await asyncio.to_thread(held_out_items, self._config.task, order.num_prompts)
            self._num_items_wanted = order.num_prompts
        self._num_unasked = len(self._items)
        slots = asyncio.Semaphore(max(1, self._config.max_workers // num_groups(self._config.task)))
        asked = await together(self._one_prompt(item, longest, order.num_samples, slots) for item in self._items)
        measured = [prompt for prompt in asked if prompt is not None]
        if not measured:
            raise ConfigError(
                f"max_token_length: none of {len(asked)} held-out prompts leaves room within {longest} tokens: "
                "raise it, or the trainer's seq_len"
            )
        if len(measured) < order.num_prompts:
            log.info("%d of %d held-out prompts: there are no more that fit", len(measured), order.num_prompts)
        return measured

    async def _one_prompt(
        self, item: Item, longest: int, num_samples: int, slots: asyncio.Semaphore
    ) -> Measured | None:
        """What came of one item; None where it leaves no room for a completion."""
        config = self._config
        temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
        # Greedy samples are all the same, and vLLM refuses to make several.
        num_different = num_samples if temperature > 0 else 1
        policy = Policy(
            config=config,
            tokenizer=self._tokenizer,
            inference=self._inference,
            temperature=temperature,
            longest=longest,
        )
        async with slots:
            self._num_unasked -= 1
            if self._num_unasked == 0:
                self._tell()
            try:
                of_seats = await roll_out(policy, item, num_different)
            except PromptTooLong:
                return None
        return measured_prompt(of_seats, num_samples // num_different)


def measured_prompt(of_seats: Sequence[Rollouts], num_copies: int = 1) -> Measured:
    """One entry a sample: of a game the mean reward of its seats, and what all of them said together."""
    samples = list(zip(*(rollouts.conversations for rollouts in of_seats), strict=True))
    spoken = [conversation for sample in samples for conversation in sample]
    versions = [sorted({version for each in sample for version in each.sampled_versions}) for sample in samples]
    return Measured(
        rewards=sample_rewards(of_seats) * num_copies,
        lengths=[sum(each.num_sampled for each in sample) for sample in samples] * num_copies,
        truncated=[any(each.is_truncated for each in sample) for sample in samples] * num_copies,
        versions=versions * num_copies if all(each.has_versions for each in spoken) else None,
    )
