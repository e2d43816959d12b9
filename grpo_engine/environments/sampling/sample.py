"""Samples an item: the completions of a question, or the conversations of every seat of a game.

P: seats that the policy plays (1 for a question), G: samples of the item.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from grpo_engine.environments.sampling.groups import Conversation
from grpo_engine.environments.sampling.policy import Policy, PolicySeat
from grpo_engine.environments.sampling.prompts import prompt_tokens
from grpo_engine.environments.tasks.base import Item, Task
from grpo_engine.environments.tasks.concurrency import gather_all
from grpo_engine.environments.tasks.multi_turn import MultiTurnTask
from grpo_engine.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The conversations and rewards of one seat in the G samples of an item: one group."""

    conversations: list[Conversation]
    """(G,); without sampled tokens in a game in which the seat never had a turn."""
    rewards: list[float]
    """(G,)"""


def num_groups(task: Task) -> int:
    """Groups per item of a task: P."""
    return task.num_seats() if isinstance(task, MultiTurnTask) else 1


def sample_rewards(of_seats: Sequence[Rollouts]) -> list[float]:
    """(G,) rewards of the samples of an item: the mean over its seats."""
    return [fmean(rewards) for rewards in zip(*(rollouts.rewards for rollouts in of_seats), strict=True)]


def without_empty(rollouts: Rollouts) -> Rollouts:
    """The rollouts without games in which the seat never had a turn, which have no trained token."""
    sampled = [
        (each, reward)
        for each, reward in zip(rollouts.conversations, rollouts.rewards, strict=True)
        if each.num_sampled > 0
    ]
    return Rollouts(conversations=[each for each, _ in sampled], rewards=[reward for _, reward in sampled])


async def sample_item(
    policy: Policy, item: Item, num_samples: int, *, opponent: Policy | None = None
) -> list[Rollouts]:
    """Sample an item `num_samples` times concurrently; returns one `Rollouts` per seat of the policy.

    Args:
        opponent: plays the other seats of a game; None: whoever the task has for them.

    Raises:
        PromptTooLong: the prompt leaves no room for a completion.
        DataError: a reward is not finite, or a game does not return one per seat.
        PeerError: the inference server refuses the request.
    """
    task = policy.config.task
    if isinstance(task, MultiTurnTask):
        return await _games(policy, task, item, num_samples, opponent)
    prompt = prompt_tokens(policy.config, policy.tokenizer, item.question)
    answer = await policy.complete(prompt, num_samples)
    conversations = [Conversation() for _ in answer.text]
    for index, conversation in enumerate(conversations):
        conversation.add_prompt(prompt)
        conversation.add_completion(answer, index)
    rewards = await task.rewards(item, answer.text)
    _refuse_unless_finite(task, item, rewards, len(conversations))
    return [Rollouts(conversations=conversations, rewards=rewards)]


async def _games(
    policy: Policy, task: MultiTurnTask, item: Item, num_games: int, opponent: Policy | None
) -> list[Rollouts]:
    num_seats, num_others = task.num_seats(), task.num_other_seats() if opponent else 0
    tables = [[PolicySeat(policy) for _ in range(num_seats)] for _ in range(num_games)]
    rewards_GP = await gather_all(
        _game(task, item, seats, [PolicySeat(opponent) for _ in range(num_others)] if opponent else [])
        for seats in tables
    )
    return [
        Rollouts(
            conversations=[seats[place].conversation for seats in tables],
            rewards=[rewards[place] for rewards in rewards_GP],
        )
        for place in range(num_seats)
    ]


async def _game(
    task: MultiTurnTask, item: Item, seats: Sequence[PolicySeat], others: Sequence[PolicySeat]
) -> list[float]:
    """(P,) rewards of one game."""
    playing = task.play_against(item, seats, others) if others else task.play(item, seats)
    rewards = [float(reward) for reward in await playing]
    _refuse_unless_finite(task, item, rewards, len(seats))
    return rewards


def _refuse_unless_finite(task: Task, item: Item, rewards: Sequence[float], count: int) -> None:
    if len(rewards) != count or not all(map(math.isfinite, rewards)):
        raise DataError(
            f"task {task.label()}: rewards {rewards} of {item.question[:80]!r} are not {count} finite numbers"
        )
