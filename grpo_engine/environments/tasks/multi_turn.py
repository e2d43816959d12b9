"""What a task in which the policy speaks more than once is: a conversation of one seat, or a game of several.

See `guess_number` for the smallest one, and `mafia` for one with several seats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from grpo_engine.environments.tasks.base import Item, Task


class Seat(Protocol):
    """A place at which the policy plays: it is told something, and says something to that."""

    @property
    def has_room(self) -> bool:
        """Whether another turn fits into the longest sequence; a seat without room is silent to the end."""

    async def ask(self, text: str) -> str:
        """What the policy says when it is told `text`; "" from a seat without room."""


class MultiTurnTask(Task):
    """Base of the tasks whose items are played instead of answered.

    An item is played `group_size` times. The conversations of one seat make one group, so that an item becomes
    `num_seats` groups: each seat's reward is compared to what the same seat earned in the other games of the item.
    """

    def num_seats(self) -> int:
        """Seats that the policy plays: the same of every item."""
        return 1

    async def play(self, item: Item, seats: Sequence[Seat]) -> Sequence[float]:
        """Play one game and return the reward of every seat.

        Whatever is drawn at random comes from the item, so that the games of one item differ by what the policy says
        alone. A game that goes on for long ends when none of its seats `has_room`.
        """
        raise NotImplementedError

    def score(self, item: Item, completion: str) -> float:
        """Nothing: the end of a game decides, and not a single completion."""
        raise NotImplementedError(f"{self.label()} is played, not scored")


async def ask_together(questions: Mapping[Seat, str]) -> dict[Seat, str]:
    """Tell several seats something, each its own, at the same time; returns what each says to it."""
    from grpo_engine.environments.together import together  # loads asyncio: not for those who read settings

    answers = await together(seat.ask(text) for seat, text in questions.items())
    return dict(zip(questions, answers, strict=True))
