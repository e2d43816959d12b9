"""Turns the next item of a task into scored groups: one group, or for a game one per seat that the policy plays."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.items.source import ItemSource
from grpo_engine.environments.sampling.groups import NotFinite, scored_group
from grpo_engine.environments.sampling.policy import Inference, Opponent, Policy, PromptTooLong
from grpo_engine.environments.sampling.prompts import Tokenizer
from grpo_engine.environments.sampling.sample import (
    Rollouts,
    num_groups,
    sample_game,
    sample_item,
    sample_rewards,
    without_empty,
)
from grpo_engine.environments.tasks.base import Item
from grpo_engine.errors import ConfigError, GrpoError
from grpo_engine.wire.rollouts import ScoredGroup

log = logging.getLogger(__name__)

_MAX_SKIPPED_ITEMS = 100
"""Consecutive items that are too long, or whose log-probabilities are not finite: with more, the limit or the model is
wrong, and not the items."""


class GroupGenerator:
    """Groups of training items, several at a time if `next` is called concurrently."""

    def __init__(
        self, config: EnvironmentConfig, tokenizer: Tokenizer, inference: Inference, opponent: Opponent | None = None
    ) -> None:
        """
        Raises:
            ConfigError: the user's curriculum cannot be loaded.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._inference = inference
        self._opponent = opponent
        self._source = ItemSource(config)
        self.num_per_item = num_groups(config.task)
        """Groups of each item, those that are dropped included."""
        self.num_too_long = 0
        """Items that were left out, since their prompt leaves no room for a completion."""
        self.num_not_finite = 0
        """Items that were left out, since a sampled token had no finite log-probability."""

    def progress(self) -> str:
        """What the curriculum and the filter say of themselves, for a log line."""
        return self._source.progress()

    async def next(self, longest: int) -> list[ScoredGroup]:
        """Sample and score the next item; groups that are not wanted are left out.

        Args:
            longest: tokens that a prompt and its completion may have together.

        Raises:
            ConfigError: none of `_MAX_SKIPPED_ITEMS` consecutive prompts leaves room.
            NotFinite: a log-probability of each of so many consecutive items is not finite.
            GrpoError: the inference server refuses a request, or a reward is not finite.
        """
        item, own, _ = await self._sample(longest, None)
        self._source.result(item, sample_rewards(own))
        return self._groups_of(own)

    async def next_of_both(self, longest: int, longest_of_opponent: int) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
        """Play the next game; returns the groups of the policy's seats, and those of its opponent's.

        Raises:
            ConfigError, GrpoError: as `next`.
        """
        item, own, of_opponent = await self._sample(longest, longest_of_opponent)
        self._source.result(item, sample_rewards(own))
        return self._groups_of(own), self._groups_of(of_opponent)

    def _groups_of(self, of_seats: Sequence[Rollouts]) -> list[ScoredGroup]:
        return [
            scored_group(sampled.conversations, sampled.rewards, temperature=self._config.temperature)
            for sampled in map(without_empty, of_seats)
            if self._is_wanted(sampled)
        ]

    def close(self) -> None:
        """Write the state file, if one is configured."""
        self._source.close()

    def _is_wanted(self, sampled: Rollouts) -> bool:
        """Whether the group has at least two samples, and different rewards where that is required."""
        if len(sampled.conversations) < min(2, self._config.group_size):
            return False
        return not self._config.ensure_scores_are_not_same or len(set(sampled.rewards)) > 1

    def _players(
        self, longest: int, longest_of_opponent: int | None, seeds: str | None
    ) -> tuple[Policy, Policy | None]:
        """The policy, and its opponent if it has one."""
        config = self._config
        policy = Policy(
            config=config,
            tokenizer=self._tokenizer,
            inference=self._inference,
            temperature=config.temperature,
            longest=longest,
            seeds=seeds,
        )
        if self._opponent is None:
            return policy, None
        of_opponent = longest if longest_of_opponent is None else longest_of_opponent
        return policy, self._opponent.as_policy(config, config.temperature, of_opponent, seeds)

    async def _sample(
        self, longest: int, longest_of_opponent: int | None
    ) -> tuple[Item, list[Rollouts], list[Rollouts]]:
        """Sample the next item whose prompt leaves room for a completion; rollouts of the opponent where it is trained.

        Args:
            longest_of_opponent: as `longest`, of an opponent that is trained too; None: it is not.
        """
        config = self._config
        last: GrpoError
        for _ in range(_MAX_SKIPPED_ITEMS):
            item = self._source.next()
            seeds = f"{config.seed}/{self._source.num_drawn}" if config.seed_completions else None
            policy, opponent = self._players(longest, longest_of_opponent, seeds)
            try:
                if opponent is not None and longest_of_opponent is not None:
                    return item, *await sample_game(policy, item, config.group_size, opponent=opponent)
                return item, await sample_item(policy, item, config.group_size, opponent=opponent), []
            except PromptTooLong as error:
                self.num_too_long += 1
                last = error
            except NotFinite as error:
                self.num_not_finite += 1
                last = error
                if self.num_not_finite.bit_count() == 1:  # 1, 2, 4, …
                    log.warning(
                        "items left out until now, without finite log-probabilities: %d (%s)",
                        self.num_not_finite,
                        error,
                    )
        if isinstance(last, PromptTooLong):
            raise ConfigError(
                f"max_token_length: {_MAX_SKIPPED_ITEMS} prompts in a row leave no room within {longest} tokens "
                f"(the last has at least {last.num_tokens}): raise it, or the trainer's seq_len"
            )
        raise last
