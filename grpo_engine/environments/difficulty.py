"""Which items teach nothing now, because all their completions are right or all wrong: asked more seldom. Pure.

More seldom and not never, because the policy changes: what nobody solved yesterday may be solved now and then today.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from grpo_engine.environments.tasks.base import Item, plain

_NUM_TRIES = 4
"""Groups of an item that its solve rate goes over: so one that comes out otherwise is normal for the next three."""
_MAX_ITEMS = 65_536
"""Items that are remembered; beyond that, those that were tried longest ago are forgotten (16 MB)."""


class SolveRates:
    """The mean reward of each item over its last groups."""

    def __init__(self, max_items: int = _MAX_ITEMS) -> None:
        self._max_items = max_items
        self._tries: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, item: Item, scores: Sequence[float]) -> None:
        """Remember one more group of an item."""
        tries = self._tries.setdefault(_key(item), deque(maxlen=_NUM_TRIES))
        tries.append(sum(scores) / len(scores))
        self._tries.move_to_end(_key(item))
        if len(self._tries) > self._max_items:
            self._tries.popitem(last=False)

    def of(self, item: Item) -> float | None:
        """The item's mean reward; None while nothing is known of it."""
        tries = self._tries.get(_key(item))
        return sum(tries) / len(tries) if tries else None

    def __len__(self) -> int:
        """Items that are remembered."""
        return len(self._tries)

    def state(self) -> Any:
        """What `restore` needs after a restart."""
        return {key: list(tries) for key, tries in self._tries.items()}

    def restore(self, state: Any) -> None:
        """Remember what another remembered."""
        for key, tries in state.items():
            self._tries[str(key)] = deque(map(float, tries), maxlen=_NUM_TRIES)


class DifficultyFilter:
    """Lets items through, those that are too easy or too hard only now and then."""

    def __init__(
        self, rates: SolveRates, *, easy: float | None, hard: float | None, revisit_rate: float, seed: int
    ) -> None:
        """
        Args:
            easy: mean reward from which an item is too easy; None: none is.
            hard: mean reward up to which it is too hard; None: none is.
            revisit_rate: share of the turns of such an item in which it is asked all the same.
        """
        self._rates = rates
        self._easy = easy
        self._hard = hard
        self._revisit_rate = revisit_rate
        self._rng = random.Random(f"difficulty/{seed}")
        self.num_easy = 0
        """Turns of too easy items that were left out."""
        self.num_hard = 0
        """Turns of too hard items that were left out."""

    def lets_through(self, item: Item) -> bool:
        """Whether to ask the item now."""
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
    """Short, because tens of thousands are kept."""
    return blake2b(f"{item.level}/{plain(item.question)}".encode(), digest_size=8).hexdigest()
