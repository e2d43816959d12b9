"""Any dataset of the package reasoning-gym: procedural puzzles with their own scoring."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Field

from grpo_engine.config import did_you_mean
from grpo_engine.environments.tasks.base import Item, Split, Task, belongs_to
from grpo_engine.errors import ConfigError
from grpo_engine.flags import Flag

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class _Dataset(Protocol):
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float: ...


def _read_options(value: Any) -> Any:
    """A flag gives the options as JSON text."""
    return json.loads(value) if isinstance(value, str) else value


class ReasoningGym(Task):
    """A dataset of reasoning-gym; `reasoning_gym:chain_sum` is short for its name and dataset."""

    name: Annotated[Literal["reasoning_gym"], Flag(("--task", "--task.name"))] = "reasoning_gym"
    dataset: str
    """As reasoning-gym calls it, e.g. chain_sum, gsm_symbolic, number_sorting."""
    size: int = Field(10_000, ge=16)
    """Different items before they repeat."""
    options: Annotated[dict[str, Any], BeforeValidator(_read_options)] = {}
    """Settings of the dataset itself, e.g. { min_terms = 2, max_terms = 2 }."""

    def label(self) -> str:
        """Name of the dataset."""
        return self.dataset

    def check(self) -> None:
        """Make the first item."""
        next(self.items(0))

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """The dataset's items; those of a seed repeat after `size`."""
        dataset = self._dataset(seed, self.size)
        found = False
        while True:
            for index in range(self.size):
                entry = dataset[index]
                if belongs_to(split, entry["question"]):
                    found = True
                    yield Item(question=entry["question"], answer=str(entry["answer"]), entry=entry)
            if not found:
                raise ConfigError(
                    f"task.dataset: {self.dataset!r} has no {split} item among {self.size}: raise task.size"
                )

    def score(self, item: Item, completion: str) -> float:
        """The dataset's own score, of what stands between `<answer>` tags, else of the whole completion."""
        tagged = _ANSWER_TAG.findall(completion)
        answer = (tagged[-1] if tagged else completion).strip()
        return float(_scorer(self.model_dump_json()).score_answer(answer, item.entry or {}))

    def _dataset(self, seed: int, size: int) -> _Dataset:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError:
            raise ConfigError(
                f"task.dataset: {self.dataset!r} needs the package reasoning-gym: install the `data` extra"
            ) from None
        if self.dataset not in DATASETS:
            hint = did_you_mean(self.dataset, DATASETS) or f"; reasoning-gym has {len(DATASETS)}, e.g. chain_sum"
            raise ConfigError(f"task.dataset: {self.dataset!r} is not a dataset of reasoning-gym{hint}")
        try:
            made: _Dataset = reasoning_gym.create_dataset(self.dataset, **{**self.options, "seed": seed, "size": size})
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"task.options: {self.options} do not fit {self.dataset}: {error}") from None
        return made


@lru_cache(maxsize=8)
def _scorer(task_json: str) -> _Dataset:
    """A dataset of one item, for its scoring: making one takes milliseconds, scoring with it microseconds."""
    return ReasoningGym.model_validate_json(task_json)._dataset(0, 1)
