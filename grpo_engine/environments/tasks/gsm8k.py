"""Grade-school word problems: `openai/gsm8k` from the hub, or the same records in local JSON Lines files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, assert_never

from pydantic import Field

from grpo_engine.environments.tasks.answers import final_answer, is_same_answer, last_boxed
from grpo_engine.environments.tasks.base import DATA_EXTRA, Item, Split, Task
from grpo_engine.environments.tasks.hub import hub_rows
from grpo_engine.environments.tasks.records import FIRST_LINES, endless, of_split, read_items
from grpo_engine.flags import Flag

_DATASET = ("openai/gsm8k", "main")
_HUB_SPLITS: dict[Split, str] = {"train": "train", "held_out": "test"}

AnswerFormat = Literal["boxed", "hashes", "think"]

_UNIT = re.compile(r"(?<=\d)\s+[A-Za-z][A-Za-z .]*$")
"""Unit after a number, as in `72 clips`; answers of this data set are numbers."""
_HASHED_LINE = re.compile(r"####\s*[-−]?\s?\$?\d[\d,]*(?:\.\d+)?\s*%?")
_THOUGHT = re.compile(r"\s*<think>(?P<thought>.*)</think>(?P<answer>.*)", re.DOTALL)


class Gsm8k(Task):
    r"""Grade-school word problems. The reward is 1 when the final number (or `\boxed{…}`) is correct."""

    name: Annotated[Literal["gsm8k"], Flag(("--task", "--task.name"))] = "gsm8k"
    path: Path | None = None
    """JSON Lines file with `question` and `answer` (the dataset's format), or a folder with train.jsonl and
    test.jsonl; unset: the hub. Without test.jsonl one question in sixteen is held out."""
    formats: tuple[AnswerFormat, ...] = ()
    r"""Formats that a completion should have, besides being correct: boxed (`\boxed{72}`), hashes (ends in `#### 72`)
    or think (it begins with one `<think>…</think>`, and the answer comes after)."""
    format_weight: float = Field(0.1, ge=0)
    """Reward for having all formats, a share of it for some of them; added to the reward for the answer."""

    def check(self) -> None:
        """Find the training records."""
        self._records("train")

    def packages(self) -> Mapping[str, str]:
        """math-verify, and `datasets` for the hub."""
        from_hub = {} if self.path is not None else {"datasets": f"{DATA_EXTRA}, or set task.path"}
        return {"math_verify": DATA_EXTRA, **from_hub}

    def hub_datasets(self) -> Sequence[str]:
        """The published data set, unless `path` has it."""
        return (_DATASET[0],) if self.path is None else ()

    def check_files(self, folder: Path, search_path: Sequence[Path] = ()) -> None:
        """Read the first lines of both files."""
        if self.path is not None:
            for split in _HUB_SPLITS:
                self._from_file(folder / self.path, split, FIRST_LINES)

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """The split's problems, reshuffled at every pass."""
        return endless(self._records(split), task=self.label(), seed=seed, split=split)

    def score(self, item: Item, completion: str) -> float:
        """1 for the correct final number, else 0, plus the reward for formats."""
        if "think" in self.formats and (parted := _THOUGHT.fullmatch(completion)):
            given = final_answer(parted["answer"])
        else:
            given = final_answer(completion)
        correct = float(given is not None and is_same_answer(item.answer, _UNIT.sub("", given.strip(" *."))))
        if not self.formats:
            return correct
        return correct + self.format_weight * sum(has_format(completion, each) for each in self.formats) / len(
            self.formats
        )

    def _records(self, split: Split) -> list[Item]:
        train = self._from_hub("train") if self.path is None else self._from_file(self.path, "train")
        held_out = self._from_hub("held_out") if self.path is None else self._from_file(self.path, "held_out")
        records = of_split(
            split,
            train or [],
            held_out,
            where=f"task.path: {self.path}",
            instead="give a folder with train.jsonl and test.jsonl, or add records",
        )
        return [Item(question=item.question, answer=final_answer(item.answer) or item.answer) for item in records]

    def _from_file(self, path: Path, split: Split, most_lines: int | None = None) -> list[Item] | None:
        """The records of a split's file, or of its first lines; None if held-out records have no file."""
        file = path / f"{_HUB_SPLITS[split]}.jsonl" if path.is_dir() else path
        if split == "held_out" and (file == path or not file.exists()):
            return None
        fields = {"question_field": "question", "answer_field": "answer"}
        return read_items(file, **fields, where="task.path", most_lines=most_lines)

    def _from_hub(self, split: Split) -> list[Item]:
        name, config = _DATASET
        rows = hub_rows(
            name,
            config=config,
            split=_HUB_SPLITS[split],
            task=self.name,
            instead="give task.path = a folder with train.jsonl, or use the task reasoning_gym:gsm_symbolic",
        )
        return [Item(question=str(row["question"]), answer=str(row["answer"])) for row in rows]


def has_format(completion: str, wanted: AnswerFormat) -> bool:
    """Whether a completion has a format."""
    match wanted:
        case "boxed":
            return bool(last_boxed(completion))
        case "hashes":
            lines = completion.split("\n")
            return (
                _HASHED_LINE.fullmatch(next((line.strip() for line in reversed(lines) if line.strip()), "")) is not None
            )
        case "think":
            found = _THOUGHT.fullmatch(completion)
            tags = ("<think>", "</think>")
            return (
                found is not None and bool(found["answer"].strip()) and all(completion.count(tag) == 1 for tag in tags)
            )
        case _:
            assert_never(wanted)
