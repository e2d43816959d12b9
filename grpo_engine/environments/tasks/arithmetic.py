"""Add two numbers: `What is 3 + 4? Answer with the number only.` → `7`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from grpo_engine.data.puzzles import MAX_ARITHMETIC_DIGITS
from grpo_engine.environments.tasks.puzzles import PuzzleTaskBase
from grpo_engine.flags import Flag


class Arithmetic(PuzzleTaskBase):
    """Add two numbers. The reward is 1 when the first integer of the completion is the sum."""

    name: Annotated[Literal["arithmetic"], Flag(("--task", "--task.name"))] = "arithmetic"
    difficulty: int = Field(1, ge=1, le=MAX_ARITHMETIC_DIGITS)
    """Digits of both numbers; with the curriculum rising, those that it ends with."""

    def levels(self) -> Sequence[Arithmetic]:
        """One for each number of digits."""
        return [self.model_copy(update={"difficulty": digits}) for digits in range(1, self.difficulty + 1)]

    def operand_digits(self) -> int:
        """Digits of both numbers."""
        return self.difficulty
