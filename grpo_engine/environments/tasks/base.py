"""What a task is: settings, an endless and deterministic supply of items, and a reward for a completion.

A task knows no model, tokenizer or server. Importing one loads no data; `check()` does, before anything waits for it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from grpo_engine.config import Config

Split = Literal["train", "held_out"]
"""Items to train on, and items that training never sees."""

HELD_OUT_ONE_IN = 16
"""Procedural tasks hold out every question whose checksum is a multiple of this, so that the splits share none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question with what a completion is compared to."""

    question: str
    answer: str
    entry: Mapping[str, Any] | None = None
    """The source's own record of it, where its scoring needs that."""


class Task(Config):
    """Base of all tasks."""

    def label(self) -> str:
        """The name under which an environment registers unless it is given one."""
        return str(getattr(self, "name", type(self).__name__))

    def check(self) -> None:
        """Load what the task needs; raises `ConfigError` when it is not there."""

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """Endless items; the same seed gives the same ones, and no item is in both splits."""
        raise NotImplementedError

    def score(self, item: Item, completion: str) -> float:
        """Reward of a completion's text, special tokens removed."""
        raise NotImplementedError


def belongs_to(split: Split, question: str) -> bool:
    """Whether a procedurally made question is of `split`."""
    return (zlib.crc32(question.encode()) % HELD_OUT_ONE_IN == 0) == (split == "held_out")


def generator(task: str, seed: int, split: Split) -> random.Random:
    """Randomness of one stream of items; strings seed it alike on every machine and in every process."""
    return random.Random(f"{task}/{split}/{seed}")
