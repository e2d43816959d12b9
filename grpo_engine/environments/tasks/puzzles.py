"""The part that the built-in puzzles share: drawing from `grpo_engine.data.puzzles` and scoring with it."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_engine.data.puzzles import PuzzleTask, make_item, score
from grpo_engine.environments.tasks.base import Item, Split, Task, belongs_to, generator


class PuzzleTaskBase(Task):
    """A puzzle; its subclasses say which by their `name`."""

    def puzzle(self) -> PuzzleTask:
        """Which puzzle this is."""
        return PuzzleTask(self.label())

    def operand_digits(self) -> int:
        """Difficulty of a puzzle that has several."""
        return 1

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """Puzzles without end."""
        rng = generator(self.label(), seed, split)
        while True:
            drawn = make_item(self.puzzle(), rng, difficulty=self.operand_digits())
            if belongs_to(split, drawn.question):
                yield Item(question=drawn.question, answer=drawn.answer)

    def score(self, item: Item, completion: str) -> float:
        """Share of the answer that is right, or 1 for a right sum."""
        return score(self.puzzle(), item.answer, completion)
