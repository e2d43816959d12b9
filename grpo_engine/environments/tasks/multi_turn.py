"""Base of multi-turn tasks: a conversation of one seat, or a game of several.

`guess_number` is the smallest one; `mafia` has several seats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from grpo_engine.environments.tasks.base import Item, Task


class Seat(Protocol):
    """A place at which the policy plays: it gets text and answers it."""

    @property
    def has_room(self) -> bool:
        """Whether another turn fits into the longest sequence; without room every further answer is empty."""

    async def ask(self, text: str) -> str:
        """The policy's answer to `text`; "" from a seat without room."""


class MultiTurnTask(Task):
    """Base of tasks whose items are played in several turns.

    An item is played `group_size` times. The conversations of one seat make one group, so that an item becomes
    `num_seats` groups: each seat's reward is compared to those of the same seat in the other games of the item.
    """

    def num_seats(self) -> int:
        """Number of seats that the policy plays; the same for every item."""
        return 1

    def num_other_seats(self) -> int:
        """Number of further seats that another policy may play, which is not trained; the same for every item."""
        return 0

    async def play(self, item: Item, seats: Sequence[Seat]) -> Sequence[float]:
        """Play one game and return the reward of every seat.

        Seed all randomness from the item, so that the games of one item differ only in the policy's answers. A long
        game ends when none of its seats `has_room`.
        """
        raise NotImplementedError

    async def play_against(self, item: Item, seats: Sequence[Seat], others: Sequence[Seat]) -> Sequence[float]:
        """As `play`, with `num_other_seats` seats of another policy, whose rewards do not count."""
        raise NotImplementedError

    async def play_both(
        self, item: Item, seats: Sequence[Seat], others: Sequence[Seat]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """As `play_against`, with the rewards of both policies' seats: the other one is trained too."""
        raise NotImplementedError

    def as_others_play(self) -> Self:
        """The task from the side of the other policy, with the objective of that one: its seats are the policy's."""
        raise NotImplementedError

    def score(self, item: Item, completion: str) -> float:
        """Not supported: rewards come from the end of a game, not from one completion."""
        raise NotImplementedError(f"{self.label()} is played, not scored")


async def ask_seats(questions: Mapping[Seat, str]) -> dict[Seat, str]:
    """Ask several seats concurrently, each its own text; returns the answer of each."""
    # Imported late: loads asyncio, which reading settings does not need.
    from grpo_engine.environments.tasks.concurrency import gather_all

    answers = await gather_all(seat.ask(text) for seat, text in questions.items())
    return dict(zip(questions, answers, strict=True))
