"""Where the items to train on come from: a task, a curriculum that orders them, a filter of those that teach nothing.

The runner asks for `next()` and tells each `result()`. What was learned of the items outlives a restart in a file, if
there is one; the order of the items does not, but is another one after each restart.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.curriculum import Curriculum, Unordered
from grpo_engine.environments.difficulty import DifficultyFilter, SolveRates
from grpo_engine.environments.tasks.base import Item, Task
from grpo_engine.errors import ConfigError

log = logging.getLogger(__name__)

_SAVE_EVERY_S = 30.0
_MAX_DRAWS = 100
"""Items that are left out in a row; where all of a task teach nothing, one of them is asked all the same."""


class ItemSource:
    """Items to train on, one after another."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """
        Raises:
            ConfigError: a curriculum of one's own is not there.
        """
        self._path = config.state_file
        self._label = config.task.label()
        self._owner = f"{config.task.model_dump_json()} {config.curriculum!r}"
        saved = self._saved()
        self._num_starts = int(saved.get("num_starts", 0))
        seed = config.seed + _SEEDS_APART * self._num_starts
        self._curriculum = _curriculum(config, seed)
        self._rates = SolveRates()
        self._is_filtering = config.easy_threshold is not None or config.hard_threshold is not None
        self._filter = DifficultyFilter(
            self._rates,
            easy=config.easy_threshold,
            hard=config.hard_threshold,
            revisit_rate=config.revisit_rate,
            seed=seed,
        )
        self._restore(saved)
        self._saved_at = time.monotonic()
        self._said = self._words()
        self._failure: ConfigError | None = None

    def next(self) -> Item:
        """The next item to ask.

        Raises:
            ConfigError: the items fail, or end; from then on every time, since a generator that failed only ends.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return self._draw()
        except ConfigError as error:
            self._failure = error
            raise
        except StopIteration:
            raise ConfigError(f"task {self._label}: its items have come to an end: they must go on for ever") from None

    def _draw(self) -> Item:
        for _ in range(_MAX_DRAWS):
            item = self._curriculum.next()
            if not isinstance(item, Item):
                raise ConfigError(
                    f"curriculum: next() gave {item!r}, which is no Item: draw it from the `levels` it was made with"
                )
            if self._filter.lets_through(item):
                break
        return item

    def result(self, item: Item, scores: Sequence[float]) -> None:
        """Take note of the rewards of an item's completions."""
        self._curriculum.result(item, scores)
        if self._is_filtering:
            self._rates.add(item, scores)
        if self._words() != self._said:
            self._said = self._words()
            log.info("curriculum: %s", self._said)
        if self._path is not None and time.monotonic() - self._saved_at > _SAVE_EVERY_S:
            self.save()

    def told(self) -> str:
        """What there is to say in a line on progress; empty when nothing is."""
        parts = [
            f"{self._filter.num_easy} left out as too easy" if self._filter.num_easy else "",
            f"{self._filter.num_hard} left out as too hard" if self._filter.num_hard else "",
            self._words(),
        ]
        return "; ".join(part for part in parts if part)

    def _words(self) -> str:
        return str(self._curriculum.told()) if hasattr(self._curriculum, "told") else ""

    # --- over restarts ---------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write down what was learned, where there is a file for it."""
        if self._path is None:
            return
        state: dict[str, Any] = {"owner": self._owner, "num_starts": self._num_starts + 1, "rates": self._rates.state()}
        if hasattr(self._curriculum, "state"):
            state["curriculum"] = self._curriculum.state()
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(state), encoding="utf-8")
            draft.replace(self._path)
        except TypeError as error:
            raise ConfigError(f"state() of the curriculum gave something that JSON cannot hold: {error}") from None
        except OSError as error:
            log.warning("state_file: %s cannot be written: %s", self._path, error.strerror)
        self._saved_at = time.monotonic()

    def _saved(self) -> dict[str, Any]:
        """What an earlier start of the same task and curriculum wrote down."""
        if self._path is None or not self._path.exists():
            return {}
        try:
            saved = json.loads(self._path.read_text(encoding="utf-8"))
            owner = saved["owner"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("state_file: %s cannot be read (%s): beginning anew", self._path, error)
            return {}
        if owner != self._owner:
            log.warning("state_file: %s is of another task or curriculum: beginning anew", self._path)
            return {}
        return dict(saved)

    def _restore(self, saved: dict[str, Any]) -> None:
        self._rates.restore(saved.get("rates", {}))
        if "curriculum" in saved and hasattr(self._curriculum, "restore"):
            self._curriculum.restore(saved["curriculum"])
        if saved:
            log.info("state_file: going on with %d remembered items%s", len(self._rates), _after(self.told()))
        if self._path is not None:
            self.save()


_SEEDS_APART = 1_000_003
"""Between the seed of a start and that of the next; far apart, since seeds side by side are other environments'."""


def _curriculum(config: EnvironmentConfig, seed: int) -> Curriculum:
    if config.curriculum is None:
        return Unordered(config.task.items(seed))
    levels = config.task.levels()
    streams = [_of_level(task, number, seed) for number, task in enumerate(levels)]
    if config.curriculum.name == "rising" and len(levels) == 1:
        log.warning(
            "curriculum: no effect: task %s has one level; arithmetic has them by its difficulty, ifeval by its "
            "num_instructions, reasoning_gym by its level, which say where the curriculum ends",
            config.task.label(),
        )
    return config.curriculum.make(streams, seed)


def _of_level(task: Task, level: int, seed: int) -> Iterator[Item]:
    for item in task.items(seed):
        yield item if item.level == level else replace(item, level=level)


def _after(text: str) -> str:
    return f", {text}" if text else ""
