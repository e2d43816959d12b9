"""A curriculum decides on the next item, seeing how earlier ones came out: the built-in one, and a user's own. Pure.

It gives training its items and nothing else: evaluations ask the task's own held-out items, whatever is trained on.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from grpo_engine.config import Config
from grpo_engine.environments.tasks.base import Item
from grpo_engine.environments.tasks.loading import load_attribute, told
from grpo_engine.errors import ConfigError, GrpoError
from grpo_engine.flags import Flag

Levels = Sequence[Iterator[Item]]
"""Endless items to train on in each difficulty of a task, the easiest first; one that is held out is in none."""


class Curriculum(Protocol):
    """What decides on the next item.

    More methods are used where there are any: `told()` for a few words in the log; `state()`, which returns what JSON
    can hold, and `restore(state)` for what is to outlive a restart.
    """

    def next(self) -> Item:
        """The item to ask now."""

    def result(self, item: Item, scores: Sequence[float]) -> None:
        """Take note of the rewards of an item's group; groups end in another order than they began in."""


class Rising(Config):
    """Begin with the task's easiest level and go one up when the mean reward passes a threshold, up to the task as set.

    What has levels: arithmetic with a `difficulty`, reasoning_gym with a `level`. Evaluations ask the task as set.
    """

    name: Annotated[Literal["rising"], Flag(("--curriculum", "--curriculum.name"))] = "rising"
    threshold: float = 0.8
    """Mean reward from which the next level begins."""
    window: int = Field(32, ge=1)
    """Groups of a level that the mean is taken over; a level lasts at least so many."""
    review: float = Field(0.1, ge=0, lt=1)
    """Share of items that are drawn from the levels below, so that they are not forgotten."""

    def make(self, levels: Levels, seed: int) -> Climb:
        """The curriculum at its beginning."""
        return Climb(self, levels, seed)


class OwnCurriculum(Config):
    """A class or function of one's own; `python:my_curriculum:Order` is short for its module and object."""

    name: Annotated[Literal["python"], Flag(("--curriculum", "--curriculum.name"))] = "python"
    module: str
    """Module that Python finds, the current folder first, or a file that ends in .py."""
    object: str
    """Called with (levels, seed), it gives something with `next()` and `result(item, scores)`."""

    def make(self, levels: Levels, seed: int) -> Curriculum:
        """The user's curriculum.

        Raises:
            ConfigError: it is not there, or not one.
        """
        where = f"curriculum: {self.module}:{self.object}"
        maker = load_attribute(self.module, self.object, where="curriculum")
        try:
            made = maker(levels, seed)
        # The user's code can fail in any way.
        except Exception as error:
            raise ConfigError(f"{where} failed: {told(error)}: it is called with (levels, seed)") from error
        for method in ("next", "result"):
            if not callable(getattr(made, method, None)):
                raise ConfigError(
                    f"{where} made a {type(made).__name__} without a method {method}(): "
                    "it needs next() -> Item and result(item, scores)"
                )
        own: Curriculum = _Told(made, where)
        return own


class _Told:
    """A user's object, whose failures are told with their line."""

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
            # The user's code can fail in any way.
            except Exception as error:
                raise ConfigError(f"{self._where}: {name}() failed: {told(error)}") from error

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
    """The task as set, in its own order."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items

    def next(self) -> Item:
        """The task's next item."""
        return next(self._items)

    def result(self, item: Item, scores: Sequence[float]) -> None:
        """Nothing follows from it."""


class Climb:
    """`Rising` at work.

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
        """An item of the level, or now and then of one below."""
        level = self.level
        if level and self._rng.random() < self._settings.review:
            level = self._rng.randrange(level)
        return next(self._levels[level])

    def result(self, item: Item, scores: Sequence[float]) -> None:
        """Go one level up when the last groups of this one are good enough."""
        if item.level != self.level or self.level == len(self._levels) - 1:
            return
        self._means.append(sum(scores) / len(scores))
        if len(self._means) == self._settings.window and _mean(self._means) >= self._settings.threshold:
            self.level += 1
            self._means.clear()

    def state(self) -> Any:
        """What `restore` needs after a restart."""
        return {"level": self.level, "means": list(self._means)}

    def restore(self, state: Any) -> None:
        """Go on where another left off."""
        self.level = min(int(state["level"]), len(self._levels) - 1)
        self._means.extend(float(mean) for mean in state["means"])

    def told(self) -> str:
        """How far it is, for the log."""
        return f"level {self.level + 1} of {len(self._levels)}"


def _mean(values: Sequence[float] | deque[float]) -> float:
    return sum(values) / len(values)
