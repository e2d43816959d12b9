"""Guess a number from the hints "higher" and "lower": the smallest multi-turn task, and a template for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from grpo_engine.data.puzzles import stated_result
from grpo_engine.environments.tasks.base import Item, Split, belongs_to, generator
from grpo_engine.environments.tasks.multi_turn import MultiTurnTask, Seat
from grpo_engine.errors import ConfigError
from grpo_engine.flags import Flag


class GuessNumber(MultiTurnTask):
    """Guess a number in several turns. The reward falls from 1 with each guess; if the number is not found it is 0."""

    name: Annotated[Literal["guess_number"], Flag(("--task", "--task.name"))] = "guess_number"
    highest: int = Field(99, ge=2)
    """Largest number."""
    num_guesses: int = Field(7, ge=1)
    """Most turns; 7 guesses find any number up to 127."""

    async def play(self, item: Item, seats: Sequence[Seat]) -> list[float]:
        """One seat, which gets a hint after each guess."""
        [seat] = seats
        number = int(item.answer)
        text = f"Guess my number from 1 to {self.highest}. Answer with the number only."
        for num_failed in range(self.num_guesses):
            guess = stated_result(await seat.ask(text))
            if guess == number:
                return [1.0 - num_failed / self.num_guesses]
            text = "No number." if guess is None else "Higher." if guess < number else "Lower."
        return [0.0]

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """Endless numbers; one in sixteen is held out."""
        numbers = [number for number in range(1, self.highest + 1) if belongs_to(split, self._question(number))]
        if not numbers:
            raise ConfigError(f"task.highest: no {split} number from 1 to {self.highest}: raise it")
        rng = generator(self.label(), seed, split)
        while True:
            number = rng.choice(numbers)
            yield Item(question=self._question(number), answer=str(number))

    def _question(self, number: int) -> str:
        """Identifies the item; no seat sees it."""
        return f"number {number} of {self.highest}"
