"""The source of training items: a task, a curriculum that orders its items, and a filter by difficulty.

The runner calls `next()` for an item and `result()` with its rewards. With a state file, solve rates and the state of
the curriculum survive a restart. Without a curriculum the items go on where they were: those that were being sampled
are left out, and after a kill up to `_RESERVED` others. With one, the order of the items differs after each restart.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from pydantic import Field, FiniteFloat, ValidationError

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.items.curriculum import Curriculum, Unordered
from grpo_engine.environments.items.difficulty import DifficultyFilter, SolveRates
from grpo_engine.environments.tasks.base import Item, Task, plain
from grpo_engine.errors import ConfigError
from grpo_engine.wire.codec import Message, first_fault, read_whole, write_atomically

log = logging.getLogger(__name__)

_SAVE_EVERY_S = 30.0
_RESERVED = 64
"""Items whose use is noted at once, ahead of it, so that none is used twice however the environment ends."""
_PASS_WITHIN_S = 120.0
"""Time limit for generating again the items that earlier starts drew: a state file from elsewhere may claim 10¹²."""
_MAX_DRAWS = 100
"""Consecutive items that may be filtered; if all of a task are, one is used anyway."""


EVALUATION_SEED = 0
"""Not the environment's seed: runs with different seeds are evaluated on the same items."""
_DRAWS_A_FIND = 16
"""Draws per found item without a new one, after which the search ends; it misses an item with probability e^-16."""


def held_out_items(task: Task, count: int) -> list[Item]:
    """`count` different held-out items, or all there are; those of a smaller count are the first of a larger one.

    Raises:
        ConfigError: the task has no held-out items.
    """
    found: dict[str, Item] = {}
    num_repeated = 0
    for item in task.items(EVALUATION_SEED, "held_out"):
        is_new = plain(item.question) not in found
        found.setdefault(plain(item.question), item)
        num_repeated = 0 if is_new else num_repeated + 1
        if len(found) == count or num_repeated > _DRAWS_A_FIND * len(found):
            break
    return list(found.values())


class ItemSource:
    """Endless training items."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """
        Raises:
            ConfigError: the user's curriculum cannot be loaded.
        """
        self._path = config.state_file
        self._label = config.task.label()
        self._owner = f"{config.task.model_dump_json()} {config.curriculum!r}"
        saved = self._saved()
        self._num_starts = saved.num_starts
        seed = config.seed + _SEEDS_APART * self._num_starts
        self._num_drawn = self._num_reserved = saved.drawn
        self._curriculum = self._unordered(config) if config.curriculum is None else _curriculum(config, seed)
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
        self._logged_progress = self._curriculum_progress()
        self._failure: ConfigError | None = None

    def _unordered(self, config: EnvironmentConfig) -> Unordered:
        """The items of the settings' own seed, after those that earlier starts have drawn."""
        items = config.task.items(config.seed)
        until = time.monotonic() + _PASS_WITHIN_S
        for number, _ in enumerate(islice(items, self._num_drawn), 1):
            if time.monotonic() > until and number < self._num_drawn:
                log.warning(
                    "state_file: %s: passing over the %d items that were drawn takes longer than %g s: goes on after "
                    "%d, so that later ones may be used again",
                    *(self._path, self._num_drawn, _PASS_WITHIN_S, number),
                )
                self._num_drawn = self._num_reserved = number
                break
        return Unordered(items)

    def next(self) -> Item:
        """The next item to sample.

        Raises:
            ConfigError: the items fail or end; every later call raises it again, since a failed generator only stops.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return self._draw()
        except ConfigError as error:
            self._failure = error
            raise
        except StopIteration:
            raise ConfigError(f"task {self._label}: its items ended: items() must be endless") from None

    @property
    def num_drawn(self) -> int:
        """Items that were drawn, filtered ones included; over all starts with the same state file."""
        return self._num_drawn

    def _draw(self) -> Item:
        for _ in range(_MAX_DRAWS):
            self._note_draw()
            item = self._curriculum.next()
            if not isinstance(item, Item):
                raise ConfigError(f"curriculum: next() returned {item!r}, which is not an Item: draw it from `levels`")
            if self._filter.admits(item):
                break
        return item

    def _note_draw(self) -> None:
        self._num_drawn += 1
        if self._path is not None and self._num_drawn > self._num_reserved:
            self._num_reserved = self._num_drawn + _RESERVED - 1
            self.save()

    def result(self, item: Item, scores: Sequence[float]) -> None:
        """Record the rewards of an item's completions."""
        self._curriculum.result(item, scores)
        if self._is_filtering:
            self._rates.add(item, scores)
        if self._curriculum_progress() != self._logged_progress:
            self._logged_progress = self._curriculum_progress()
            log.info("curriculum: %s", self._logged_progress)
        if self._path is not None and time.monotonic() - self._saved_at > _SAVE_EVERY_S:
            self.save()

    def progress(self) -> str:
        """Text for the progress line; empty when there is none."""
        parts = [
            f"{self._filter.num_easy} skipped as too easy" if self._filter.num_easy else "",
            f"{self._filter.num_hard} skipped as too hard" if self._filter.num_hard else "",
            self._curriculum_progress(),
        ]
        return "; ".join(part for part in parts if part)

    def _curriculum_progress(self) -> str:
        return str(self._curriculum.told()) if hasattr(self._curriculum, "told") else ""

    # --- state file ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write the state file, if one is configured; no item is drawn any more."""
        self._num_reserved = self._num_drawn
        self.save()

    def save(self) -> None:
        """Write the state file, if one is configured."""
        if self._path is None:
            return
        state: dict[str, Any] = {
            "owner": self._owner,
            "num_starts": self._num_starts + 1,
            "drawn": self._num_reserved,
            "rates": self._rates.state(),
        }
        if hasattr(self._curriculum, "state"):
            state["curriculum"] = self._curriculum.state()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(state).encode())
        except TypeError as error:
            raise ConfigError(f"curriculum: state() returned a value that is not JSON: {error}") from None
        except OSError as error:
            log.warning("state_file: %s cannot be written: %s", self._path, error.strerror)
        self._saved_at = time.monotonic()

    def _saved(self) -> _ItemState:
        """State that an earlier start of the same task and curriculum wrote."""
        nothing = _ItemState(owner=self._owner)
        if self._path is None or not self._path.exists():
            return nothing
        try:
            saved = _ItemState.model_validate_json(read_whole(self._path))
        except (OSError, ValueError) as error:
            why = first_fault(error) if isinstance(error, ValidationError) else error
            log.warning("state_file: %s cannot be read (%s): starting without it", self._path, why)
            return nothing
        if saved.owner != self._owner:
            log.warning("state_file: %s belongs to another task or curriculum: starting without it", self._path)
            return nothing
        return saved

    def _restore(self, saved: _ItemState) -> None:
        self._rates.restore(saved.rates)
        if "curriculum" in saved.model_fields_set and hasattr(self._curriculum, "restore"):
            try:
                self._curriculum.restore(saved.curriculum)
            except (ValueError, TypeError, LookupError, OverflowError) as error:
                log.warning(
                    "state_file: %s: the curriculum starts from its beginning: its state is damaged: %r",
                    self._path,
                    error,
                )
        if saved.num_starts:
            seen = f"after {self._num_drawn} items" if self._num_drawn else "at the first item"
            log.info("state_file: resumed %s, with rates of %d%s", seen, len(self._rates), _after(self.progress()))
        if self._path is not None:
            self.save()


class _ItemState(Message):
    """The state file: what a later start of the same task and curriculum goes on from."""

    owner: str
    """Task and curriculum that it is of."""
    num_starts: int = Field(0, ge=0, lt=2**31)
    drawn: int = Field(0, ge=0, lt=2**40)
    """Items, as of all starts together."""
    rates: dict[str, list[FiniteFloat]] = {}
    """Rewards by item, as `SolveRates` has them."""
    curriculum: Any = None
    """What its `state` returned."""


_SEEDS_APART = 1_000_003
"""Distance between the seeds of two starts; large, because neighbouring seeds belong to other environments."""


def _curriculum(config: EnvironmentConfig, seed: int) -> Curriculum:
    """The curriculum of a start."""
    assert config.curriculum is not None
    levels = config.task.levels()
    streams = [_of_level(task, number, seed) for number, task in enumerate(levels)]
    if config.curriculum.name == "rising" and len(levels) == 1:
        log.warning(
            "curriculum: no effect: task %s has one level; arithmetic has them by its difficulty, ifeval by its "
            "num_instructions, reasoning_gym by its level, which set its last level",
            config.task.label(),
        )
    return config.curriculum.make(streams, seed)


def _of_level(task: Task, level: int, seed: int) -> Iterator[Item]:
    for item in task.items(seed):
        yield item if item.level == level else replace(item, level=level)


def _after(text: str) -> str:
    return f", {text}" if text else ""
