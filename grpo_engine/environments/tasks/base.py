"""What a task is: settings, an endless and deterministic supply of items, and a reward for a completion.

A task knows no model, tokenizer or server. Importing one loads no data; `check()` does, before anything waits for it.
Scoring may take its time: it is done beside the event loop (`rewards`), never in it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_engine.config import Config

Split = Literal["train", "held_out"]
"""Items to train on, and items that training never sees."""

HELD_OUT_ONE_IN = 16
"""Where the held-out items have no source of their own, a question is held out when its checksum is a multiple of this.

The question itself decides, and neither seed nor order: so training never sees one, whatever its seed, and also when a
file grows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question with what a completion is compared to."""

    question: str
    answer: str
    entry: Mapping[str, Any] | None = None
    """The source's own record of it, where its scoring needs that."""
    level: int = 0
    """Which of its task's `levels()` it was drawn from."""


class Task(Config):
    """Base of all tasks."""

    def label(self) -> str:
        """The name under which an environment registers unless it is given one."""
        return str(getattr(self, "name", type(self).__name__))

    def check(self) -> None:
        """Load what the task needs; raises `ConfigError` when it is not there."""

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """Endless items; the same seed gives the same ones, and no question is in both splits, whatever their seeds.

        Raises:
            ConfigError: the split holds nothing.
        """
        raise NotImplementedError

    def score(self, item: Item, completion: str) -> float:
        """Reward of a completion's text, special tokens removed."""
        raise NotImplementedError

    async def rewards(self, item: Item, completions: Sequence[str]) -> list[float]:
        """Reward of each completion of an item; the event loop goes on meanwhile."""
        from grpo_engine.environments.tasks.threads import in_a_thread  # loads asyncio: not for those who read settings

        return await in_a_thread(lambda: [self.score(item, completion) for completion in completions])

    def levels(self) -> Sequence[Task]:
        """The task in every difficulty that a curriculum climbs through, the easiest first, itself last.

        Only itself where there is one difficulty.
        """
        return [self]


def belongs_to(split: Split, question: str) -> bool:
    """Whether a question is of `split`, where its checksum decides that."""
    return (zlib.crc32(plain(question).encode()) % HELD_OUT_ONE_IN == 0) == (split == "held_out")


def plain(question: str) -> str:
    """A question without what does not make it another one: how its words are spaced."""
    return " ".join(question.split())


def generator(task: str, seed: int, split: Split) -> random.Random:
    """Randomness of one stream of items; strings seed it alike on every machine and in every process."""
    return random.Random(f"{task}/{split}/{seed}")
