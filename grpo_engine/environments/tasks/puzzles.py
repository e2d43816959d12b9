"""Puzzles with one right answer: sort, copy or reverse six digits, and add two numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from grpo_engine.data.puzzles import MAX_ARITHMETIC_DIGITS, PuzzleTask, make_item, score
from grpo_engine.environments.tasks.base import Item, Split, Task, belongs_to, generator
from grpo_engine.flags import Flag


class PuzzleTaskBase(Task):
    """A puzzle; subclasses select it by their `name`."""

    def puzzle(self) -> PuzzleTask:
        """The puzzle of this task."""
        return PuzzleTask(self.label())

    def operand_digits(self) -> int:
        """Difficulty of puzzles that have levels."""
        return 1

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """Endless puzzles."""
        rng = generator(self.label(), seed, split)
        while True:
            drawn = make_item(self.puzzle(), rng, difficulty=self.operand_digits())
            if belongs_to(split, drawn.question):
                yield Item(question=drawn.question, answer=drawn.answer)

    def score(self, item: Item, completion: str) -> float:
        """Share of correct positions, or 1 for a correct sum."""
        return score(self.puzzle(), item.answer, completion)


class Sort6(PuzzleTaskBase):
    """Sort six digits: `sort 660487` → `046678`. The reward is the share of correct positions."""

    name: Annotated[Literal["sort6"], Flag(("--task", "--task.name"))] = "sort6"


class Copy6(PuzzleTaskBase):
    """Repeat six digits: `copy 660487` → `660487`. The reward is the share of correct positions."""

    name: Annotated[Literal["copy6"], Flag(("--task", "--task.name"))] = "copy6"


class Reverse6(PuzzleTaskBase):
    """Reverse six digits: `reverse 660487` → `784066`. The reward is the share of correct positions."""

    name: Annotated[Literal["reverse6"], Flag(("--task", "--task.name"))] = "reverse6"


class Arithmetic(PuzzleTaskBase):
    """Add two numbers. The reward is 1 when the first integer of the completion is the sum."""

    name: Annotated[Literal["arithmetic"], Flag(("--task", "--task.name"))] = "arithmetic"
    difficulty: int = Field(1, ge=1, le=MAX_ARITHMETIC_DIGITS)
    """Digits of both numbers; with the curriculum rising, those of its last level."""

    def levels(self) -> Sequence[Arithmetic]:
        """One for each number of digits."""
        return [self.model_copy(update={"difficulty": digits}) for digits in range(1, self.difficulty + 1)]

    def operand_digits(self) -> int:
        """Digits of both numbers."""
        return self.difficulty
