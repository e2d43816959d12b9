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
from grpo_engine.environments.sampling.scoring import rewards_of
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
        own, _ = await _games(policy, task, item, num_samples, opponent)
        return own
    prompt = policy.first_prompt(item.question, item.before)
    answer = await policy.complete(prompt, num_samples)
    conversations = [Conversation() for _ in answer.text]
    for index, conversation in enumerate(conversations):
        conversation.add_prompt(prompt)
        conversation.add_completion(answer, index)
    rewards = await rewards_of(policy.config, item, answer.text, [each.sampled_tokens for each in conversations])
    _refuse_unless_finite(task, item, rewards, len(conversations))
    return [Rollouts(conversations=conversations, rewards=rewards)]


async def sample_game(
    policy: Policy, item: Item, num_samples: int, *, opponent: Policy
) -> tuple[list[Rollouts], list[Rollouts]]:
    """Play a game `num_samples` times concurrently; returns one `Rollouts` per seat of the policy, and of its opponent.

    Raises:
        PromptTooLong: a first prompt leaves no room for a completion.
        DataError: a reward is not finite, or a game does not return one per seat.
        PeerError: an inference server refuses the request.
    """
    task = policy.config.task
    assert isinstance(task, MultiTurnTask)
    return await _games(policy, task, item, num_samples, opponent, rewards_both=True)


async def _games(
    policy: Policy,
    task: MultiTurnTask,
    item: Item,
    num_games: int,
    opponent: Policy | None,
    *,
    rewards_both: bool = False,
) -> tuple[list[Rollouts], list[Rollouts]]:
    num_seats, num_others = task.num_seats(), task.num_other_seats() if opponent else 0
    tables = [[PolicySeat(policy, f"{game}/{seat}") for seat in range(num_seats)] for game in range(num_games)]
    others = [
        [PolicySeat(opponent, f"{game}/{seat}") for seat in range(num_others)] if opponent else []
        for game in range(num_games)
    ]
    rewards = await gather_all(
        _game(task, item, *each, rewards_both=rewards_both) for each in zip(tables, others, strict=True)
    )
    of_others = _rollouts(others, [each for _, each in rewards]) if rewards_both else []
    return _rollouts(tables, [each for each, _ in rewards]), of_others


def _rollouts(tables: Sequence[Sequence[PolicySeat]], rewards_GP: Sequence[Sequence[float]]) -> list[Rollouts]:
    """(P,) those of each seat."""
    return [
        Rollouts(
            conversations=[seats[place].conversation for seats in tables],
            rewards=[rewards[place] for rewards in rewards_GP],
        )
        for place in range(len(tables[0]))
    ]


async def _game(
    task: MultiTurnTask, item: Item, seats: Sequence[PolicySeat], others: Sequence[PolicySeat], *, rewards_both: bool
) -> tuple[list[float], list[float]]:
    """(P,) rewards of one game, and those of the other seats, where they are rewarded."""
    of_others: Sequence[float] = ()
    if rewards_both:
        own, of_others = await task.play_both(item, seats, others)
    else:
        own = await (task.play_against(item, seats, others) if others else task.play(item, seats))
    rewards, rewards_of_others = ([float(reward) for reward in each] for each in (own, of_others))
    _refuse_unless_finite(task, item, rewards, len(seats))
    _refuse_unless_finite(task, item, rewards_of_others, len(others) if rewards_both else 0)
    return rewards, rewards_of_others


def _refuse_unless_finite(task: Task, item: Item, rewards: Sequence[float], count: int) -> None:
    if len(rewards) != count or not all(map(math.isfinite, rewards)):
        raise DataError(
            f"task {task.label()}: rewards {rewards} of {item.question[:80]!r} are not {count} finite numbers"
        )
