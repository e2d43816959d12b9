"""From an item to what becomes groups: the completions of a question, or the conversations of every seat of a game.

P seats that the policy plays (1 where a question is answered), G samples of the item.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from grpo_engine.environments.groups import Conversation
from grpo_engine.environments.policy import Policy, PolicySeat
from grpo_engine.environments.prompts import prompt_tokens
from grpo_engine.environments.tasks.base import Item, Task
from grpo_engine.environments.tasks.multi_turn import MultiTurnTask
from grpo_engine.environments.together import together
from grpo_engine.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What one seat said in the G samples of an item, and what it earned: one group."""

    conversations: list[Conversation]
    """(G,); nothing is said in a game in which the seat never had its turn."""
    rewards: list[float]
    """(G,)"""


def num_groups(task: Task) -> int:
    """Groups that an item of a task becomes: P."""
    return task.num_seats() if isinstance(task, MultiTurnTask) else 1


def sample_rewards(of_seats: Sequence[Rollouts]) -> list[float]:
    """(G,) rewards of the samples of an item: the mean over its seats."""
    return [fmean(rewards) for rewards in zip(*(rollouts.rewards for rollouts in of_seats), strict=True)]


def with_words(rollouts: Rollouts) -> Rollouts:
    """Without the games in which the seat never had its turn, and so has nothing that could be trained."""
    spoken = [
        (each, reward)
        for each, reward in zip(rollouts.conversations, rollouts.rewards, strict=True)
        if each.num_sampled > 0
    ]
    return Rollouts(conversations=[each for each, _ in spoken], rewards=[reward for _, reward in spoken])


async def roll_out(policy: Policy, item: Item, num_samples: int) -> list[Rollouts]:
    """Sample an item `num_samples` times, all at the same time; returns one `Rollouts` a seat.

    Raises:
        PromptTooLong: the item leaves no room to say anything.
        DataError: a reward is not finite, or a game does not give one to every seat.
        PeerError: the inference server refuses.
    """
    task = policy.config.task
    if isinstance(task, MultiTurnTask):
        return await _games(policy, task, item, num_samples)
    prompt = prompt_tokens(policy.config, policy.tokenizer, item.question)
    answer = await policy.complete(prompt, num_samples)
    conversations = [Conversation() for _ in answer.text]
    for index, conversation in enumerate(conversations):
        conversation.read(prompt)
        conversation.say(answer, index)
    rewards = await task.rewards(item, answer.text)
    _refuse_unless_finite(task, item, rewards, len(conversations))
    return [Rollouts(conversations=conversations, rewards=rewards)]


async def _games(policy: Policy, task: MultiTurnTask, item: Item, num_games: int) -> list[Rollouts]:
    num_seats = task.num_seats()
    tables = [[PolicySeat(policy) for _ in range(num_seats)] for _ in range(num_games)]
    rewards_GP = await together(_game(task, item, seats) for seats in tables)
    return [
        Rollouts(
            conversations=[seats[place].conversation for seats in tables],
            rewards=[rewards[place] for rewards in rewards_GP],
        )
        for place in range(num_seats)
    ]


async def _game(task: MultiTurnTask, item: Item, seats: Sequence[PolicySeat]) -> list[float]:
    """(P,) rewards of one game."""
    rewards = [float(reward) for reward in await task.play(item, seats)]
    _refuse_unless_finite(task, item, rewards, len(seats))
    return rewards


def _refuse_unless_finite(task: Task, item: Item, rewards: Sequence[float], count: int) -> None:
    if len(rewards) != count or not all(map(math.isfinite, rewards)):
        raise DataError(
            f"task {task.label()}: rewards {rewards} of {item.question[:80]!r} are not {count} finite numbers"
        )
