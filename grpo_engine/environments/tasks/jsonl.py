"""Questions and answers from a user's JSON Lines file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from grpo_engine.environments.tasks.answers import final_answer, is_same_answer
from grpo_engine.environments.tasks.base import DATA_EXTRA, Item, Split, Task
from grpo_engine.environments.tasks.records import FIRST_LINES, endless, of_files, read_items
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

    def packages(self) -> Mapping[str, str]:
        """math-verify, unless texts are compared."""
        return {} if self.reward == "exact" else {"math_verify": DATA_EXTRA}

    def check_files(self, folder: Path, search_path: Sequence[Path] = ()) -> None:
        """Read the first lines of both files."""
        for key, path in {"path": self.path, "held_out_path": self.held_out_path}.items():
            if path is not None:
                self._read(folder / path, f"task.{key}", FIRST_LINES)

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """The file's records, reshuffled at every pass."""
        return endless(self._records(split), task=self.label(), seed=seed, split=split)

    def score(self, item: Item, completion: str) -> float:
        """1 for the correct answer, else 0."""
        if self.reward == "exact":
            return float(completion.split() == item.answer.split())
        given = final_answer(completion)
        return float(given is not None and is_same_answer(item.answer, given))

    def _records(self, split: Split) -> list[Item]:
        return of_files(split, self.path, self.held_out_path, self._read)

    def _read(self, path: Path, where: str, most_lines: int | None = None) -> list[Item]:
        fields = {"question_field": self.question_field, "answer_field": self.answer_field}
        items = read_items(path, **fields, where=where, most_lines=most_lines)
        if self.reward == "exact":
            return items
        return [replace(item, answer=final_answer(item.answer) or item.answer) for item in items]
