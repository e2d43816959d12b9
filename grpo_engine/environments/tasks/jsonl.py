"""Questions and answers from a user's JSON Lines file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from grpo_engine.environments.tasks.answers import final_answer, is_same_answer
from grpo_engine.environments.tasks.base import Item, Split, Task
from grpo_engine.environments.tasks.records import endless, of_files, read_items
from grpo_engine.flags import Flag


class Jsonl(Task):
    """Questions and answers from a JSON Lines file; one question in sixteen is held out unless it has its own file."""

    name: Annotated[Literal["jsonl"], Flag(("--task", "--task.name"))] = "jsonl"
    path: Path
    """File with one object per line."""
    held_out_path: Path | None = None
    """File with the held-out records; training excludes them, also if the other file contains them."""
    question_field: str = "question"
    answer_field: str = "answer"
    reward: Literal["math", "exact"] = "math"
    """math: 1 when the final answers are equal (math-verify); exact: 1 when the texts are, ignoring white space."""

    def label(self) -> str:
        """Name of the file."""
        return self.path.stem

    def check(self) -> None:
        """Read the file once."""
        self._records("train")

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """The file's records, reshuffled at every pass."""
        return endless(self._records(split), task=self.label(), seed=seed, split=split)

    def score(self, item: Item, completion: str) -> float:
        """1 for the correct answer, else 0."""
        if self.reward == "exact":
            return float(completion.split() == item.answer.split())
        given, expected = final_answer(completion), final_answer(item.answer) or item.answer
        return float(given is not None and is_same_answer(expected, given))

    def _records(self, split: Split) -> list[Item]:
        return of_files(split, self.path, self.held_out_path, self._read)

    def _read(self, path: Path, where: str) -> list[Item]:
        return read_items(path, question_field=self.question_field, answer_field=self.answer_field, where=where)
