"""Filters items whose completions are all right or all wrong, which give no gradient. Pure.

They are still sampled at `revisit_rate`, because the policy changes: an item that was never solved may become solvable.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

from grpo_engine.environments.tasks.base import Item, plain

_NUM_TRIES = 4
"""Groups of an item over which its solve rate is taken: one different result admits it for the next three groups."""
_MAX_ITEMS = 65_536
"""Items that are kept; beyond it the least recently sampled ones are dropped (16 MB)."""


class SolveRates:
    """The mean reward of each item over its last groups."""

    def __init__(self, max_items: int = _MAX_ITEMS) -> None:
        self._max_items = max_items
        self._tries: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, item: Item, scores: Sequence[float]) -> None:
        """Add the rewards of one group of an item."""
        tries = self._tries.setdefault(_key(item), deque(maxlen=_NUM_TRIES))
        tries.append(sum(scores) / len(scores))
        self._tries.move_to_end(_key(item))
        if len(self._tries) > self._max_items:
            self._tries.popitem(last=False)

    def of(self, item: Item) -> float | None:
        """The item's mean reward; None before its first group."""
        tries = self._tries.get(_key(item))
        return sum(tries) / len(tries) if tries else None

    def __len__(self) -> int:
        """Items that are kept."""
        return len(self._tries)

    def state(self) -> Any:
        """State for `restore` after a restart."""
        return {key: list(tries) for key, tries in self._tries.items()}

    def restore(self, state: Any) -> None:
        """Add a saved state: the newest items of one that has more than are kept."""
        for key in islice(state, max(0, len(state) - self._max_items), None):
            self._tries[str(key)] = deque(map(float, state[key]), maxlen=_NUM_TRIES)


class DifficultyFilter:
    """Admits items; those that are too easy or too hard only at `revisit_rate`."""

    def __init__(
        self, rates: SolveRates, *, easy: float | None, hard: float | None, revisit_rate: float, seed: int
    ) -> None:
        """
        Args:
            easy: mean reward at or above which an item is too easy; None: no bound.
            hard: mean reward at or below which an item is too hard; None: no bound.
            revisit_rate: probability with which such an item is admitted anyway.
        """
        self._rates = rates
        self._easy = easy
        self._hard = hard
        self._revisit_rate = revisit_rate
        self._rng = random.Random(f"difficulty/{seed}")
        self.num_easy = 0
        """Skips of items that are too easy."""
        self.num_hard = 0
        """Skips of items that are too hard."""

    def admits(self, item: Item) -> bool:
        """Whether to sample the item now."""
        rate = self._rates.of(item)
        if rate is None:
            return True
        is_easy = self._easy is not None and rate >= self._easy
        is_hard = self._hard is not None and rate <= self._hard
        if not (is_easy or is_hard) or self._rng.random() < self._revisit_rate:
            return True
        self.num_easy += is_easy
        self.num_hard += is_hard and not is_easy
        return False


def _key(item: Item) -> str:
    """A short hash, because tens of thousands are kept."""
    return blake2b(f"{item.level}/{plain(item.question)}".encode(), digest_size=8).hexdigest()
