"""Which queued groups make the next batch, and which are too old for any.

Batches are made of whole groups: the oldest first where each is delivered once, and with a staleness bound first what
is oldest in versions; or as a window or a replay buffer samples them. A guaranteed share that an environment does not
supply holds batches back for a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from grpo_engine.rollouts.state.batch_forming import QueuedGroup, form_batch, least_sequences
from grpo_engine.rollouts.state.buffering import Buffering
from grpo_engine.rollouts.state.queue import Queue
from grpo_engine.rollouts.state.records import RunRecord


class Selection:
    """The rules, and what is remembered between two requests for a batch."""

    def __init__(self, *, buffering: Buffering, random: Random, max_staleness: int | None, share_wait_s: float) -> None:
        """
        Args:
            random: chooses what a window or a buffer delivers.
            max_staleness: bound on the staleness of delivered groups; a stricter bound of the trainer wins.
            share_wait_s: how long a batch waits for the guaranteed share of an environment.
        """
        self.buffering = buffering
        self.share_wait_s = share_wait_s
        self._random = random
        self._max_staleness = max_staleness
        self.newest_version = 0
        """The version that inference serves, or the newest of any group where the trainer does not say it."""
        self.has_spent = False
        """Whether groups are queued that were delivered as often as they may be: buffer_uses was larger before."""
        self.is_stuck = False
        """Whether a batch was requested, and the queue has enough sequences but no combination that fits."""
        self.fits_nothing = False
        """Whether it is stuck on the sizes of groups alone, and not on a guaranteed share."""
        self.num_chances = 0
        """Incremented whenever a batch may have become possible."""
        self._is_formable = True
        self._short_since: float | None = None
        """Time since which only a guaranteed share has kept a batch from forming."""

    def mark_formable(self) -> None:
        """A batch may have become possible."""
        self._is_formable = True
        self.num_chances += 1

    def staleness_bound(self, run: RunRecord | None) -> int | None:
        """The stricter of the bounds of this API and of the trainer, in versions."""
        bounds = [self._max_staleness, run.request.max_staleness if run else None]
        return min((bound for bound in bounds if bound is not None), default=None)

    def stale(self, queue: Queue, run: RunRecord) -> list[QueuedGroup]:
        """Groups beyond the staleness bound, and those that no setting has delivered again."""
        bound = self.staleness_bound(run)
        if bound is None and not self.has_spent:
            return []
        self.has_spent = False
        return [
            group
            for group in queue
            if (bound is not None and self._age(group, run) > bound) or group.uses >= self.buffering.max_uses
        ]

    def choose(
        self, queue: Queue, run: RunRecord, shares: Mapping[int, float], now: float
    ) -> tuple[list[QueuedGroup], tuple[int, ...]]:
        """The next batch, if one can form, and the environments whose guaranteed share was given up."""
        batch_size = run.request.batch_size
        if queue.num_sequences < batch_size or not self._is_formable:
            return [], ()
        short = short_of(queue, batch_size, shares)
        self._short_since = (self._short_since or now) if short else None
        batch: list[QueuedGroup] | None = None
        unmet: tuple[int, ...] = ()
        if not short:
            batch = form_batch(self._in_order(queue, run), batch_size, shares)
        elif self._short_since is not None and now - self._short_since >= self.share_wait_s:
            met = {id_: share for id_, share in shares.items() if id_ not in short}
            batch, unmet = form_batch(self._in_order(queue, run), batch_size, met), tuple(short)
        # A queue that makes no batch makes none until it changes; with shares, time alone can make one possible.
        self._is_formable = batch is not None or bool(shares)
        self.is_stuck = batch is None
        self.fits_nothing = batch is None and (not short or bool(unmet))
        return (batch, unmet) if batch else ([], ())

    def waits_long_for_shares(self, now: float) -> bool:
        """Whether a guaranteed share alone has kept a batch from forming for half of the time that it may."""
        return self._short_since is not None and now - self._short_since > self.share_wait_s / 2

    def _in_order(self, queue: Queue, run: RunRecord) -> Sequence[QueuedGroup]:
        if self.buffering.kind != "once":
            return self.buffering.in_order(queue, self._random)
        if self.staleness_bound(run) is None:
            return list(queue)
        return sorted(queue, key=lambda group: self._age(group, run), reverse=True)

    def _age(self, group: QueuedGroup, run: RunRecord) -> int:
        """Versions that a group is old; without versions, batches that were handed out since it arrived."""
        if group.policy_version is not None:
            return self.newest_version - group.policy_version
        return 0 if group.step is None else run.step - group.step


def short_of(queue: Queue, batch_size: int, shares: Mapping[int, float]) -> list[int]:
    """Environments that have sent less than their guaranteed share of a batch."""
    least = least_sequences(batch_size, shares)
    return [id_ for id_, count in least.items() if queue.sequences_by_environment[id_] < count]
