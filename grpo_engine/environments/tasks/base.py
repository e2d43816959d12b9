"""Base of tasks: settings, endless and deterministic items, and a reward for a completion.

A task knows no model, tokenizer or server. Importing one loads no data; `check()` does, before any server is contacted.
Scoring may be slow: `rewards` runs it in a thread, never in the event loop.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_engine.config import Config

DATA_EXTRA = "pip install 'grpo-tui[data]'"
"""Installs the packages of the tasks that need some."""

Split = Literal["train", "held_out"]
"""Items to train on, and items that are never trained on."""

HELD_OUT_ONE_IN = 16
"""If held-out items have no source of their own, a question is held out when its checksum is a multiple of this.

Only the question decides, not seed or order, so the split is the same for every seed, also when a file grows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question and its reference answer."""

    question: str
    answer: str
    entry: Mapping[str, Any] | None = None
    """The source's record of it, if scoring needs it."""
    level: int = 0
    """Index of the task's `levels()` that it was drawn from."""
    before: tuple[tuple[str, str], ...] = ()
    """Messages of the prompt before the question, each a role and its text; a system message takes the place of
    `system_prompt`. Not for games."""


class Task(Config):
    """Base of all tasks."""

    def label(self) -> str:
        """Name under which an environment registers by default."""
        return str(getattr(self, "name", type(self).__name__))

    def check(self) -> None:
        """Load what the task needs; raises `ConfigError` if it is missing."""

    @property
    def has_user_code(self) -> bool:
        """Whether `check` runs code of the user, which may need what an earlier service of a run starts."""
        return False

    def packages(self) -> Mapping[str, str]:
        """Packages that it imports besides those of every environment, and what to do where one is missing."""
        return {}

    def hub_datasets(self) -> Sequence[str]:
        """Data sets that it loads from the hub."""
        return ()

    def check_files(self, folder: Path, search_path: Sequence[Path] = ()) -> None:
        """Check the files that it reads, in well under a second and without running the user's code.

        Args:
            folder: where the environment will run.
            search_path: folders of its PYTHONPATH.

        Raises:
            ConfigError: one is missing or malformed; the message begins with the setting.
        """

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """Endless items; deterministic for a seed, and no question is in both splits under any seed.

        Raises:
            ConfigError: the split is empty.
        """
        raise NotImplementedError

    def score(self, item: Item, completion: str) -> float:
        """Reward of a completion's text, special tokens removed."""
        raise NotImplementedError

    async def rewards(
        self, item: Item, completions: Sequence[str], token_ids: Sequence[Sequence[int]] | None = None
    ) -> list[float]:
        """Reward of each completion of an item; does not block the event loop.

        Args:
            token_ids: of each completion, as sampled, its end token included; None where nothing was sampled.
        """
        from grpo_engine.environments.tasks.concurrency import (
            run_in_thread,  # imported late: loads asyncio, which reading settings does not need
        )

        return await run_in_thread(lambda: [self.score(item, completion) for completion in completions])

    def levels(self) -> Sequence[Task]:
        """The task in each difficulty of a curriculum, the easiest first, itself last.

        Only itself if it has one difficulty.
        """
        return [self]


def belongs_to(split: Split, question: str) -> bool:
    """Whether a question is in `split` by its checksum."""
    return (zlib.crc32(plain(question).encode()) % HELD_OUT_ONE_IN == 0) == (split == "held_out")


def plain(question: str) -> str:
    """A question with normalized white space, by which equal questions are recognized."""
    return " ".join(question.split())


def generator(task: str, seed: int, split: Split) -> random.Random:
    """Random generator of one stream of items; seeded by a string, so equal on every machine."""
    return random.Random(f"{task}/{split}/{seed}")
