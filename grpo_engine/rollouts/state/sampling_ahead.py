"""How many batches environments sample ahead, where neither they nor a staleness bound fix it. Pure.

One number for all environments of a trainer, changed when a batch is delivered:

- more, while the trainer waits for groups, unless sampling is held up elsewhere: requests queue at the inference
  servers, or environments have no worker left. Where no server says whether requests queue at it, not above the start
  value: at a full one throughput that varies would pass trials by chance, up to the most. From the start value on, each
  raise is a trial: it is taken back unless throughput rises by a fifth of what it would where sequences do not slow
  each other down, or the trainer waits no longer. Where servers are the limit, more in flight only makes groups older.
  After a failed trial the next one goes the other way.
- one less, while at least one whole batch is left in the queue after every delivery: it only becomes older there.

Groups that were on the way before a change say nothing about it, so as many deliveries as batches are ahead are left
out after each. Small steps and the wait for their effect keep it from swinging.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from grpo_engine.wire.rollouts import FIRST_BATCHES_AHEAD, MOST_BATCHES_AHEAD, BatchesAhead, SamplingLimit

WAITING = 0.05
"""Share of the time for which the trainer waits, from which it counts: less is the time of a request and its chance."""
MUCH_WAITING = 0.25
"""From here on the number is raised by two at once."""
WORTH = 0.2
"""Of the gain in throughput that is proportional to the batches ahead: a trial must bring as much."""
NUM_FOR_MORE, NUM_FOR_LESS = 6, 8
"""Deliveries on which a decision rests; giving up a batch is slow, since waiting costs more than age. For more, they
are rounded up to a multiple of the batches ahead: groups that were begun together arrive together."""
REST, MOST_REST = 16, 128
"""Deliveries without a trial after one that failed; doubled by each that follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What is known when a batch was delivered."""

    interval_s: float
    """Since the one before."""
    waited_s: float
    """Of it, with a request of the trainer that could not be answered."""
    size: float
    """Of the batch, in what sampling it takes: bytes, or sequences."""
    num_left: int
    """Whole batches that are left in the queue."""
    limit: SamplingLimit | None
    """What keeps environments from sampling more; None: they did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    before: int
    rate: float
    """Throughput before it."""


class SamplingAhead:
    """The number, and what it rests on."""

    def __init__(self) -> None:
        self.batches = FIRST_BATCHES_AHEAD
        self.why = "start"
        """Of the last change, for people."""
        self._num_settling = 1
        """Deliveries that are left out; the first one has waited for everything to start."""
        self._seen: deque[Delivered] = deque(maxlen=2 * NUM_FOR_LESS)
        self._trial: _Trial | None = None
        self._num_resting = 0
        self._num_failed = 0
        self._goes_up = True

    def current(self, limit: SamplingLimit | None) -> BatchesAhead:
        """As it is sent to environments and the trainer."""
        return BatchesAhead(batches=self.batches, why=self.why, limit=limit)

    def interrupted(self) -> None:
        """Something else took time, as an evaluation or the restart of a trainer: what was on the way says nothing."""
        self._num_settling = max(self._num_settling, self.batches)
        self._seen.clear()

    def delivered(self, seen: Delivered) -> None:
        """A batch was delivered: change the number where that helps."""
        self._num_resting = max(0, self._num_resting - 1)
        if self._num_settling:
            self._num_settling -= 1
            return
        self._seen.append(seen)
        if self._trial is not None:
            self._judge(self._trial)
        elif self._waited_share() >= WAITING:
            if len(self._seen) >= self._num_for_more():
                self._trainer_waits(seen.limit)
        elif len(self._seen) >= NUM_FOR_LESS and self.batches > 1:
            latest = list(self._seen)[-NUM_FOR_LESS:]
            if all(each.num_left for each in latest):
                self._change(self.batches - 1, f"a whole batch was left in the queue {NUM_FOR_LESS} times in a row")

    def _trainer_waits(self, limit: SamplingLimit | None) -> None:
        share = f"the trainer waited for groups {100 * self._waited_share():.0f} % of the time"
        most = FIRST_BATCHES_AHEAD if limit is SamplingLimit.UNKNOWN else MOST_BATCHES_AHEAD
        can_rise = limit in (None, SamplingLimit.BATCHES_AHEAD, SamplingLimit.UNKNOWN) and self.batches < most
        if self.batches < FIRST_BATCHES_AHEAD:
            if can_rise:
                self._change(self.batches + 1, share)
            return
        if self._num_resting:
            return
        can_fall = self.batches > FIRST_BATCHES_AHEAD
        if can_rise and (self._goes_up or not can_fall):
            step = 2 if self._waited_share() >= MUCH_WAITING else 1
            self._try(min(MOST_BATCHES_AHEAD, self.batches + step), share)
        elif can_fall:
            self._try(self.batches - 1, f"{share}, whether or not so much is on the way: trying with less")

    def _try(self, batches: int, why: str) -> None:
        self._trial = _Trial(before=self.batches, rate=self._rate())
        self._change(batches, why)

    def _judge(self, trial: _Trial) -> None:
        if len(self._seen) < self._num_for_more():
            return
        self._trial = None
        gain = self._rate() / trial.rate - 1
        if gain >= WORTH * (self.batches / trial.before - 1) or self._waited_share() < WAITING:
            self._num_failed = 0
            return
        self._num_resting = min(REST * 2**self._num_failed, MOST_REST)
        self._num_failed += 1
        self._goes_up = self.batches < trial.before
        self._change(trial.before, f"{self.batches} batches ahead changed throughput by {100 * gain:+.0f} %")

    def _change(self, batches: int, why: str) -> None:
        self.batches, self.why = batches, why
        self._num_settling = batches
        self._seen.clear()

    def _num_for_more(self) -> int:
        return self.batches * math.ceil(NUM_FOR_MORE / self.batches)

    def _waited_share(self) -> float:
        """Of the time of the deliveries that count."""
        latest = list(self._seen)[-self._num_for_more() :]
        total_s = sum(each.interval_s for each in latest)
        return sum(each.waited_s for each in latest) / total_s if total_s > 0 else 0.0

    def _rate(self) -> float:
        """Throughput over the deliveries that count."""
        latest = list(self._seen)[-self._num_for_more() :]
        total_s = sum(each.interval_s for each in latest)
        return max(sum(each.size for each in latest) / max(total_s, 1e-9), 1e-9)
