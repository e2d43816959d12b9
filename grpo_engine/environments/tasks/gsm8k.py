"""Grade-school word problems: `openai/gsm8k` from the hub, or the same records in local JSON Lines files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from grpo_engine.environments.tasks.answers import final_answer, is_same_answer
from grpo_engine.environments.tasks.base import Item, Split, Task
from grpo_engine.environments.tasks.records import endless, of_split, read_items
from grpo_engine.errors import ConfigError
from grpo_engine.flags import Flag

_DATASET = ("openai/gsm8k", "main")
_HUB_SPLITS: dict[Split, str] = {"train": "train", "held_out": "test"}


class Gsm8k(Task):
    r"""Grade-school word problems. The reward is 1 when the final number (or `\boxed{…}`) is the right one."""

    name: Annotated[Literal["gsm8k"], Flag(("--task", "--task.name"))] = "gsm8k"
    path: Path | None = None
    """JSON Lines file with `question` and `answer` (the dataset's own format), or a folder with train.jsonl and
    test.jsonl; unset: the hub. Without test.jsonl one question in sixteen is held out."""

    def check(self) -> None:
        """Find the training records."""
        self._records("train")

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """The split's problems, reshuffled at every pass."""
        return endless(self._records(split), task=self.label(), seed=seed, split=split)

    def score(self, item: Item, completion: str) -> float:
        """1 for the right final number, else 0."""
        given = final_answer(completion)
        return float(given is not None and is_same_answer(item.answer, given))

    def _records(self, split: Split) -> list[Item]:
        train = self._from_hub("train") if self.path is None else self._from_file(self.path, "train")
        held_out = self._from_hub("held_out") if self.path is None else self._from_file(self.path, "held_out")
        records = of_split(
            split,
            train or [],
            held_out,
            where=f"task.path: {self.path}",
            instead="give a folder with train.jsonl and test.jsonl, or more records",
        )
        return [Item(question=item.question, answer=final_answer(item.answer) or item.answer) for item in records]

    def _from_file(self, path: Path, split: Split) -> list[Item] | None:
        """The records of a split's own file; None where held-out ones have none."""
        file = path / f"{_HUB_SPLITS[split]}.jsonl" if path.is_dir() else path
        if split == "held_out" and (file == path or not file.exists()):
            return None
        return read_items(file, question_field="question", answer_field="answer", where="task.path")

    def _from_hub(self, split: Split) -> list[Item]:
        instead = "give task.path = a folder with train.jsonl, or use the task reasoning_gym:gsm_symbolic"
        try:
            import datasets
        except ImportError:
            raise ConfigError(f"task gsm8k: neither task.path nor the package `datasets` is there: {instead}") from None
        try:
            rows = datasets.load_dataset(*_DATASET, split=_HUB_SPLITS[split])
        # The hub's client raises requests', huggingface_hub's and its own errors; each means that it is not there.
        except Exception as error:
            raise ConfigError(f"task gsm8k: {_DATASET[0]} cannot be loaded ({error}): {instead}") from error
        return [Item(question=str(row["question"]), answer=str(row["answer"])) for row in rows]
