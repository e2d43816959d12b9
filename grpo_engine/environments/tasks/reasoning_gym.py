"""Any dataset of the package reasoning-gym: procedural puzzles with scoring.

Scorers of a dozen data sets evaluate an answer as Python, so answers are scored in a confined process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Field

from grpo_engine.config import did_you_mean
from grpo_engine.environments.tasks.base import DATA_EXTRA, Item, Split, Task, belongs_to
from grpo_engine.errors import ConfigError
from grpo_engine.flags import Flag

if TYPE_CHECKING:
    from grpo_engine.environments.tasks.confined.client import ConfinedScorers
    from grpo_engine.environments.tasks.confined.process import Scorer

_OPENS, _CLOSES = "<answer>", "</answer>"


class _Dataset(Protocol):
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float: ...


def _read_options(value: Any) -> Any:
    """Parse options from a flag, which are JSON text."""
    return json.loads(value) if isinstance(value, str) else value


class ReasoningGym(Task):
    """A dataset of reasoning-gym; `reasoning_gym:chain_sum` is short for its name and dataset."""

    name: Annotated[Literal["reasoning_gym"], Flag(("--task", "--task.name"))] = "reasoning_gym"
    dataset: str
    """Its name in reasoning-gym, e.g. chain_sum, gsm_symbolic, number_sorting."""
    size: int = Field(10_000, ge=16)
    """Number of distinct items."""
    level: int | None = Field(None, ge=0)
    """Level of the dataset's curriculum in reasoning-gym, 0 the easiest; with the curriculum rising, its last level;
    unset: the dataset's defaults."""
    options: Annotated[dict[str, Any], BeforeValidator(_read_options)] = {}
    """Settings of the dataset, e.g. { min_terms = 2, max_terms = 2 }; they override those of a level."""

    allow_unconfined: bool = False
    """Score also where the kernel cannot confine the process that scores. Some data sets evaluate answers as Python: a
    completion could then run programs as you."""

    def label(self) -> str:
        """Name of the dataset."""
        return self.dataset

    def check(self) -> None:
        """Generate the first item of every level, and start the process that scores.

        Raises:
            ConfigError: the data set or a setting is unknown, or the kernel cannot confine the process.
        """
        for task in reversed(self.levels()):
            next(task.items(0))
            self._scorers().prepare(task.model_dump_json())

    def packages(self) -> Mapping[str, str]:
        """reasoning-gym."""
        return {"reasoning_gym": DATA_EXTRA}

    def levels(self) -> Sequence[ReasoningGym]:
        """Those of the dataset's curriculum up to `level`."""
        if self.level is None:
            return [self]
        return [self.model_copy(update={"level": level}) for level in range(self.level + 1)]

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """The dataset's items, repeated after `size`."""
        dataset = self._dataset(seed, self.size)
        found = False
        while True:
            for index in range(self.size):
                entry = dataset[index]
                if belongs_to(split, entry["question"]):
                    found = True
                    yield Item(
                        question=entry["question"], answer=str(entry["answer"]), entry=entry, level=self.level or 0
                    )
            if not found:
                raise ConfigError(
                    f"task.dataset: {self.dataset!r} has no {split} item among {self.size}: raise task.size"
                )

    def score(self, item: Item, completion: str) -> float:
        """The dataset's score of the text between `<answer>` tags, else of the whole completion.

        0 where there is none: the text takes too long, or is none that the dataset expects.
        """
        from grpo_engine.environments.tasks.confined.client import NotScored

        of_level = self if self.level is None else self.model_copy(update={"level": item.level})
        try:
            return self._scorers().score(of_level.model_dump_json(), answer_of(completion), item.entry or {})
        except NotScored:
            return 0.0

    def _scorers(self) -> ConfinedScorers:
        return scorers(must_confine=not self.allow_unconfined)

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
        options = {**self._options_of_level(), **self.options, "seed": seed, "size": size}
        try:
            made: _Dataset = reasoning_gym.create_dataset(self.dataset, **options)
        except (TypeError, AssertionError, ValueError) as error:
            at_level = "" if self.level is None else f" at level {self.level}"
            raise ConfigError(f"task.options: {self.options} do not fit {self.dataset}{at_level}: {error}") from None
        return made

    def _options_of_level(self) -> dict[str, Any]:
        """Options of a level in the dataset's curriculum."""
        if self.level is None:
            return {}
        from reasoning_gym.factory import create_curriculum, has_curriculum

        if not has_curriculum(self.dataset):
            raise ConfigError(f"task.level: {self.dataset!r} has no curriculum: remove task.level, or set task.options")
        curriculum = create_curriculum(self.dataset)
        num_levels = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1)
        if self.level >= num_levels:
            raise ConfigError(
                f"task.level: {self.level} is beyond the last level of {self.dataset!r}, {num_levels - 1}"
            )
        curriculum.set_global_level(self.level)
        return dict(vars(curriculum.generate_configuration()))


def answer_of(completion: str) -> str:
    """The text between the last `<answer>` tags that are closed, else the whole completion."""
    tagged, begin = completion, completion.find(_OPENS)
    while begin >= 0 and (end := completion.find(_CLOSES, begin)) >= 0:
        tagged, begin = completion[begin + len(_OPENS) : end], completion.find(_OPENS, end)
    return tagged.strip()


@cache
def scorers(*, must_confine: bool) -> ConfinedScorers:
    """The process that scores, which all tasks share."""
    from grpo_engine.environments.tasks.confined.client import ConfinedScorers  # imported late: loads subprocess

    return ConfinedScorers(__name__, must_confine=must_confine)


def load_scorer(task_json: str) -> Scorer:
    """Scoring by a dataset of one item; called in the template, whose forks then have it.

    What the scorer loads when it is first called is loaded here: a confined process may not find it.
    """
    dataset = ReasoningGym.model_validate_json(task_json)._dataset(0, 1)
    entry = dataset[0]
    for answer in (entry["answer"], "x + 1"):
        with suppress(Exception):  # as some do on an answer of another form
            dataset.score_answer(answer, entry)
    return dataset.score_answer
