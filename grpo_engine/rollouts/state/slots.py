"""Slots: how many sequences may be on the way from the start of their sampling to the update that trains on them.

With a staleness bound S there are slots for S + 1 batches. A group takes its slots when its environment starts it, and
frees them when its batch was trained and the new version is served; groups that are dropped free theirs at once. What
is started is then trained on at most S versions later, unless faster groups overtake it: those that become too old are
dropped at delivery. AReaL bounds staleness in the same way (arXiv 2505.24298).

Only the sequences that environments sample are counted here; the rest is in the queue and in the leases. Each status
request of an environment says how many it samples, so a lost answer, a killed environment and a group that was never
posted correct themselves, and nothing has to be stored: after a restart no slot is granted until every environment that
was connected has said it, or has timed out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from grpo_engine.rollouts.state.batch_forming import least_sequences
from grpo_engine.rollouts.state.queue import Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What an environment says of itself, to be granted slots."""

    num_sampled: int
    """Groups that it samples or has yet to post."""
    num_items: int
    """Items that it would start now."""
    groups_per_item: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An environment's part of the slots."""

    env_id: int
    group_size: int
    weight: float
    """Its share of the slots that are sampled at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is on the way, besides what is sampled."""

    batch_size: int
    num_batches: int
    """S + 1."""
    queue: Queue
    leased: Mapping[int | None, int]
    """Sequences, by environment, of batches that are not trained yet, and were never before."""
    is_stuck: bool
    """Whether the queue has enough sequences for a batch, and no combination of them makes one."""


class Slots:
    """Sequences that environments sample now, as they say, and as they were granted since."""

    def __init__(self, unheard: Iterable[int] = ()) -> None:
        """
        Args:
            unheard: environments that may be sampling, after a restart.
        """
        self._sampled: dict[int, int] = {}
        self._num_sampled = 0
        """By all of them."""
        self._live: frozenset[int] | None = None
        self._absent: set[int] = set()
        """Those that sample and are not among `_live`: sought once for a thousand requests, not at each."""
        self._unheard = set(unheard)
        self._supplied_at: dict[int, float] = {}
        """When each environment registered, or posted last."""
        self._freed_at = 0.0
        """When a batch was trained last."""

    def report(self, env_id: int, num_sequences: int, num_slots: int | None) -> bool:
        """An environment says how many it samples; True where this frees slots.

        Args:
            num_slots: no more than these count, so that a wrong figure is used up by what the environment posts; None
                where staleness has no bound.
        """
        if num_slots is not None:
            num_sequences = min(num_sequences, num_slots)
        before = self._sampled.get(env_id, 0)
        was_unheard = env_id in self._unheard
        self._unheard.discard(env_id)
        self._set(env_id, num_sequences)
        return num_sequences < before or was_unheard

    def grant(self, env_id: int, num_sequences: int) -> None:
        """It may start so many more."""
        self._set(env_id, self._sampled.get(env_id, 0) + num_sequences)

    def joined(self, env_id: int, now: float) -> None:
        """An environment registered."""
        self._supplied_at[env_id] = now

    def arrived(self, env_id: int, num_sequences: int, now: float) -> None:
        """So many were posted, and count in the queue from now on."""
        self._supplied_at[env_id] = now
        if env_id in self._sampled:
            self._set(env_id, max(0, self._sampled[env_id] - num_sequences))

    def _set(self, env_id: int, num_sequences: int) -> None:
        if env_id not in self._sampled:
            self._live = None
        self._num_sampled += num_sequences - self._sampled.get(env_id, 0)
        self._sampled[env_id] = num_sequences

    def freed(self, now: float) -> None:
        """A batch was trained."""
        self._freed_at = now

    def sampled_by(self) -> dict[int, int]:
        """Sequences that each environment samples."""
        return dict(self._sampled)

    def num_sampled(self, live: frozenset[int]) -> int:
        """Sequences that these environments sample; those of all others never arrive."""
        if self._live is not live:
            self._live, self._absent = live, self._sampled.keys() - live
        return self._num_sampled - sum(self._sampled[env_id] for env_id in self._absent)

    def num_startable(
        self,
        claim: Claim,
        demand: Demand,
        traffic: Traffic,
        *,
        live: frozenset[int],
        shares: Mapping[int, float],
        waits_for_shares_since: float,
    ) -> int:
        """Groups that an environment may start: whole items, as long as a slot is free, whatever the size of an item.

        Args:
            live: environments that may be sampling.
            shares: least share of each batch, by environment: their slots are not granted to others,
            waits_for_shares_since: unless they have sent nothing since then, nor could have.
        """
        if demand.num_items <= 0 or not self._unheard.isdisjoint(live):
            return 0
        num_slots = traffic.num_batches * traffic.batch_size
        own = self._sampled.get(claim.env_id, 0)
        num_unused = traffic.queue.num_unused
        free = num_slots - num_unused - self.num_sampled(live) - sum(traffic.leased.values())
        if free <= 0:
            # Sizes that do not add up: one item more, while there is room for less than two batches of them, or its
            # own of its size are less than one: all others may be any number that no batch is made of.
            is_less = traffic.queue.sequences_in_groups_of(claim.group_size, claim.env_id) < traffic.batch_size
            has_room = is_less or num_unused < num_slots + 2 * traffic.batch_size
            is_needed = traffic.is_stuck and num_unused >= traffic.batch_size
            return demand.groups_per_item if is_needed and own == 0 and has_room else 0
        for env_id, count in least_sequences(traffic.batch_size, shares).items():
            last = max(self._freed_at, self._supplied_at.get(env_id, 0.0))
            if env_id != claim.env_id and last >= waits_for_shares_since:
                held = traffic.queue.unused_by_environment[env_id] + traffic.leased.get(env_id, 0)
                free -= max(0, count * traffic.num_batches - held - self._sampled.get(env_id, 0))
        per_item = demand.groups_per_item * claim.group_size
        own_limit = max(per_item, math.ceil(claim.weight * num_slots)) - own
        return demand.groups_per_item * max(0, min(demand.num_items, -(-min(free, own_limit) // per_item)))
