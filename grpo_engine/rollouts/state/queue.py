"""The groups that wait for a batch, oldest first, with running totals.

Environments ask for the totals several times a second while ten thousand groups may be queued, so nothing is counted by
iterating over them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

from grpo_engine.rollouts.state.batch_forming import QueuedGroup

KeyT = TypeVar("KeyT", bound=Hashable)


class Queue:
    """Groups in order of arrival, with totals."""

    def __init__(self, groups: Iterable[QueuedGroup] = ()) -> None:
        self._groups: OrderedDict[int, QueuedGroup] = OrderedDict()
        """A `dict` looks at all that left it from the front for each look at its first."""
        self._is_in_order = True
        """Of arrival; else they are sorted once that matters: a post may insert hundreds of old ones among 60,000."""
        self.num_sequences = 0
        self.num_bytes = 0
        self.sequences_by_environment: Counter[int | None] = Counter()
        self.num_groups: Counter[tuple[int | None, int]] = Counter()
        """By environment and number of sequences."""
        self._sizes: Counter[int] = Counter()
        """Groups by number of sequences."""
        self.num_unused = 0
        """Sequences that were never delivered."""
        self.unused_by_environment: Counter[int | None] = Counter()
        """The same by environment."""
        self.num_by_version: Counter[int | None] = Counter()
        """Groups by the oldest policy version that sampled any of their tokens."""
        self.add(groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[QueuedGroup]:
        if not self._is_in_order:
            self._groups = OrderedDict(sorted(self._groups.items()))
            self._is_in_order = True
        return iter(self._groups.values())

    def add(self, groups: Iterable[QueuedGroup]) -> None:
        """Insert groups in order of arrival: usually at the end."""
        newest = next(reversed(self._groups), -1)
        for group in groups:
            self._groups[group.id] = group
            self._count(group, 1)
            self._is_in_order, newest = self._is_in_order and group.id > newest, group.id

    def take(self, ids: Iterable[int]) -> list[QueuedGroup]:
        """Remove groups, and return them."""
        taken = [self._groups.pop(id_) for id_ in ids]
        for group in taken:
            self._count(group, -1)
        return taken

    def largest_group(self) -> int:
        """Sequences of the largest group; 1 for an empty queue, since clients divide by it."""
        return max(self._sizes, default=1)

    def sequences_in_groups_of(self, size: int, env_id: int) -> int:
        """Sequences of an environment in groups of this size: those of other sizes may make no batch, however many."""
        return size * self.num_groups[env_id, size]

    def has_one_size(self) -> bool:
        """Whether all groups have as many sequences."""
        return len(self._sizes) <= 1

    def _count(self, group: QueuedGroup, sign: int) -> None:
        self.num_sequences += sign * group.num_sequences
        self.num_bytes += sign * group.num_bytes
        _add(self.sequences_by_environment, group.env_id, sign * group.num_sequences)
        _add(self.num_groups, (group.env_id, group.num_sequences), sign)
        _add(self._sizes, group.num_sequences, sign)
        _add(self.num_by_version, group.policy_version, sign)
        if not group.uses:
            self.num_unused += sign * group.num_sequences
            _add(self.unused_by_environment, group.env_id, sign * group.num_sequences)


def _add(counter: Counter[KeyT], key: KeyT, number: int) -> None:
    """Add, and delete keys that reach 0: senders choose their ids, so the keys are unbounded."""
    counter[key] += number
    if not counter[key]:
        del counter[key]
