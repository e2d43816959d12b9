"""Measures the policy on held-out items: rewards, lengths and policy versions of their completions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.items.source import held_out_items
from grpo_engine.environments.sampling.policy import Inference, Opponent, Policy, PromptTooLong
from grpo_engine.environments.sampling.prompts import Tokenizer
from grpo_engine.environments.sampling.sample import Rollouts, num_groups, sample_item, sample_rewards
from grpo_engine.environments.tasks.base import Item
from grpo_engine.environments.tasks.concurrency import gather_all
from grpo_engine.errors import ConfigError, GrpoError
from grpo_engine.wire.rollouts import MAX_SEQUENCES, EvaluationAnswer, EvaluationOrder

log = logging.getLogger(__name__)

_MOST_COMPLETIONS = 1 << 24
"""Of one evaluation, whose order may be any token holder's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Results of one prompt, one entry per completion."""

    rewards: list[float]
    lengths: list[int]
    truncated: list[bool]
    versions: list[list[int]] | None


class HeldOutMeasure:
    """Answers the orders of evaluations, one at a time."""

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Tokenizer,
        inference: Inference,
        *,
        opponent: Opponent | None = None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """Check whether the task has held-out items.

        Args:
            notify: called when every prompt of an order has been sent.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._inference = inference
        self._opponent = opponent
        self._notify = notify
        self._items: list[Item] = []
        self._num_items_wanted = 0
        self.num_unstarted = 0
        """Prompts of the order that have not been sent."""
        self.is_able = True
        """Whether the task has held-out items."""
        try:
            held_out_items(config.task, 1)
        except ConfigError as error:
            log.warning("this environment answers no evaluations: %s", error)
            self.is_able = False

    async def answer(self, order: EvaluationOrder, *, longest: int, env_id: int) -> EvaluationAnswer:
        """The measured rewards, or the reason why there are none.

        Args:
            longest: tokens that a prompt and its completion may have together.
        """
        began = time.monotonic()
        try:
            measured = await self._all_prompts(order, longest)
        except GrpoError as error:
            log.warning("evaluation of step %d failed: %s", order.step, error)
            return EvaluationAnswer(env_id=env_id, problem=str(error))
        versions = [prompt.versions for prompt in measured if prompt.versions is not None]
        answer = EvaluationAnswer(
            env_id=env_id,
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
            num_prompts = min(order.num_prompts, MAX_SEQUENCES)  # of some tasks there is any number
            self._items = await asyncio.to_thread(held_out_items, self._config.task, num_prompts)
            self._num_items_wanted = order.num_prompts
        if (num_wanted := len(self._items) * order.num_samples) > _MOST_COMPLETIONS:
            raise ConfigError(
                f"eval_samples: {order.num_samples:,} completions of {len(self._items):,} prompts are {num_wanted:,}, "
                f"more than {_MOST_COMPLETIONS:,}: lower it, or eval_prompts"
            )
        self.num_unstarted = len(self._items)
        slots = asyncio.Semaphore(max(1, self._config.max_workers // num_groups(self._config.task)))
        asked = await gather_all(
            self._one_prompt(number, item, longest, order.num_samples, slots) for number, item in enumerate(self._items)
        )
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
        self, number: int, item: Item, longest: int, num_samples: int, slots: asyncio.Semaphore
    ) -> Measured | None:
        """Results of one item; None when its prompt leaves no room for a completion."""
        config = self._config
        temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
        # Greedy samples are identical, and vLLM refuses n > 1.
        num_different = num_samples if temperature > 0 else 1
        seeds = f"{config.seed}/evaluation/{number}" if config.seed_completions else None
        policy = Policy(
            config=config,
            tokenizer=self._tokenizer,
            inference=self._inference,
            temperature=temperature,
            longest=longest,
            seeds=seeds,
        )
        opponent = self._opponent.as_policy(config, temperature, longest, seeds) if self._opponent else None
        async with slots:
            self.num_unstarted -= 1
            if self.num_unstarted == 0:
                self._notify()
            try:
                of_seats = await sample_item(policy, item, num_different, opponent=opponent)
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
