"""Curricula: which item is trained on next, given the rewards of earlier ones. One is built in; users add theirs. Pure.

A curriculum affects training only: evaluations use the task's held-out items.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from grpo_engine.config import Config, ModuleText, PathText
from grpo_engine.environments.tasks.base import Item
from grpo_engine.environments.tasks.python.loading import describe_error, load_attribute
from grpo_engine.environments.tasks.python.reading import check_attribute
from grpo_engine.errors import ConfigError, GrpoError
from grpo_engine.flags import Flag

Levels = Sequence[Iterator[Item]]
"""Endless training items per difficulty level of a task, the easiest first, without held-out ones."""


class Curriculum(Protocol):
    """Chooses the next item.

    Optional methods: `told()` returns text for the progress line; `state()` returns a JSON value that `restore(state)`
    gets after a restart.
    """

    def next(self) -> Item:
        """The item to sample now."""

    def result(self, item: Item, scores: Sequence[float]) -> None:
        """Record the rewards of an item's group; groups do not finish in the order of `next()`."""


class Rising(Config):
    """Start at the task's easiest level and go up at a mean reward of `threshold`, up to the task as configured.

    Tasks with levels: arithmetic (`difficulty`), ifeval, reasoning_gym (`level`). Evaluations use the task itself.
    """

    name: Annotated[Literal["rising"], Flag(("--curriculum", "--curriculum.name"))] = "rising"
    threshold: float = 0.8
    """Mean reward at which the next level begins."""
    window: int = Field(32, ge=1)
    """Groups of a level over which the mean is taken; a level lasts at least this many."""
    review: float = Field(0.1, ge=0, lt=1)
    """Share of items drawn from lower levels, so that they are not forgotten."""

    def check_files(self, folder: Path, search_path: Sequence[Path] = ()) -> None:
        """It reads none."""

    def make(self, levels: Levels, seed: int) -> Climb:
        """The curriculum at its first level."""
        return Climb(self, levels, seed)


class OwnCurriculum(Config):
    """A user's class or function; `python:my_curriculum:Order` is short for its module and object."""

    name: Annotated[Literal["python"], Flag(("--curriculum", "--curriculum.name"))] = "python"
    module: Annotated[str, PathText(r".*\.py"), ModuleText()]
    """Module on the path, the current folder first, or a file that ends in .py."""
    object: str
    """Called with (levels, seed), it returns an object with `next()` and `result(item, scores)`."""

    def check_files(self, folder: Path, search_path: Sequence[Path] = ()) -> None:
        """Check the source of the module, as it is found from `folder` and then on `search_path`.

        Raises:
            ConfigError: it is missing, cannot be imported, or has no such object.
        """
        check_attribute(self.module, self.object, (folder, *search_path), where="curriculum")

    def make(self, levels: Levels, seed: int) -> Curriculum:
        """The user's curriculum.

        Raises:
            ConfigError: it cannot be loaded, or is not a curriculum.
        """
        where = f"curriculum: {self.module}:{self.object}"
        maker = load_attribute(self.module, self.object, where="curriculum")
        try:
            made = maker(levels, seed)
        # User code can raise anything.
        except Exception as error:
            raise ConfigError(f"{where} failed: {describe_error(error)}: it is called with (levels, seed)") from error
        for method in ("next", "result"):
            if not callable(getattr(made, method, None)):
                raise ConfigError(
                    f"{where} returned a {type(made).__name__} without a method {method}(): "
                    "it needs next() -> Item and result(item, scores)"
                )
        own: Curriculum = _UserCurriculum(made, where)
        return own


class _UserCurriculum:
    """A user's object; its exceptions become a ConfigError with the line of the user's code."""

    def __init__(self, made: Any, where: str) -> None:
        self._made = made
        self._where = where

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._made, name)

        def call(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            except GrpoError:
                raise
            # User code can raise anything.
            except Exception as error:
                raise ConfigError(f"{self._where}: {name}() failed: {describe_error(error)}") from error

        return call


AnyCurriculum = Rising | OwnCurriculum
"""Every curriculum, chosen by its `name`."""


def spell_out(value: Any) -> Any:
    """The table behind a curriculum's short form: `"rising"`, `"python:my_curriculum:Order"`."""
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not str(table.get("name")).startswith("python:"):
        return table
    module, _, name = table["name"].removeprefix("python:").rpartition(":")
    return {**table, "name": "python", **({"module": module, "object": name} if module else {"module": name})}


class Unordered:
    """The task as configured, in its own order."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items

    def next(self) -> Item:
        """The task's next item."""
        return next(self._items)

    def result(self, item: Item, scores: Sequence[float]) -> None:
        """Ignored."""


class Climb:
    """The state of `Rising`.

    >>> climb = Climb(Rising(threshold=0.5, window=2, review=0), [iter([easy] * 9), iter([hard] * 9)], seed=0)
    >>> climb.result(easy, [1, 0]), climb.result(easy, [1, 1]), climb.next() is hard
    (None, None, True)
    """

    def __init__(self, settings: Rising, levels: Levels, seed: int) -> None:
        self._settings = settings
        self._levels = levels
        self._rng = random.Random(f"curriculum/{seed}")
        self._means: deque[float] = deque(maxlen=settings.window)
        self.level = 0

    def next(self) -> Item:
        """An item of the current level, or with probability `review` of a lower one."""
        level = self.level
        if level and self._rng.random() < self._settings.review:
            level = self._rng.randrange(level)
        return next(self._levels[level])

    def result(self, item: Item, scores: Sequence[float]) -> None:
        """Go one level up when the mean reward of the last groups of this level reaches the threshold."""
        if item.level != self.level or self.level == len(self._levels) - 1:
            return
        self._means.append(sum(scores) / len(scores))
        if len(self._means) == self._settings.window and _mean(self._means) >= self._settings.threshold:
            self.level += 1
            self._means.clear()

    def state(self) -> Any:
        """State for `restore` after a restart."""
        return {"level": self.level, "means": list(self._means)}

    def restore(self, state: Any) -> None:
        """Continue from a saved state."""
        level, means = int(state["level"]), [float(mean) for mean in state["means"]]
        self.level = max(0, min(level, len(self._levels) - 1))
        self._means.extend(means)

    def told(self) -> str:
        """The level, for the progress line."""
        return f"level {self.level + 1} of {len(self._levels)}"


def _mean(values: Sequence[float] | deque[float]) -> float:
    return sum(values) / len(values)
