"""What the queue guarantees: each group once, at most once from a window of the newest, or up to n times from a buffer.

- `once`: every group is delivered exactly once. A full queue holds posts.
- `window`: every group is delivered at most once. A full window gives up its oldest group for a new one, so that no
  environment ever waits.
- `replay`: as `window`, and a group stays until it was delivered `max_uses` times; never twice in one batch.

In a window and a buffer, batches are sampled: uniformly, the newest or the oldest first, or with a probability
proportional to the mean absolute advantage of the group (weighted sampling without replacement by exponential keys:
Efraimidis and Spirakis 2006). Groups in which all rewards are equal then come last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from grpo_engine.rollouts.state.batch_forming import QueuedGroup
from grpo_engine.rollouts.state.queue import Queue

Kind = Literal["once", "window", "replay"]
Sampling = Literal["oldest", "newest", "uniform", "advantage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffering:
    """Settings of the queue; the defaults are those of `once`."""

    kind: Kind = "once"
    max_sequences: int = 0
    """Of a window or buffer; two batches always fit."""
    max_bytes: int = 0
    max_uses: int = 1
    """Deliveries of a group that were acknowledged, after which it is deleted."""
    sampling: Sampling = "oldest"

    def in_order(self, groups: Iterable[QueuedGroup], random: Random) -> list[QueuedGroup]:
        """The groups, oldest first, in the order in which batches take them."""
        match self.sampling:
            case "oldest":
                return list(groups)
            case "newest":
                return list(groups)[::-1]
            case "uniform":
                return sorted(groups, key=lambda _: random.random())
            case "advantage":
                return sorted(groups, key=lambda group: _key(group.spread or 0.0, random), reverse=True)

    def evicted(self, queue: Queue, batch_size: int) -> Iterator[QueuedGroup]:
        """The oldest groups that no longer fit; none with `once`."""
        if self.kind == "once":
            return
        sequences, num_bytes = queue.num_sequences, queue.num_bytes
        for group in queue:
            sequences, num_bytes = sequences - group.num_sequences, num_bytes - group.num_bytes
            is_within = sequences + group.num_sequences <= max(self.max_sequences, 2 * batch_size)
            has_bytes = num_bytes + group.num_bytes <= self.max_bytes or sequences < 2 * batch_size
            if is_within and has_bytes:
                return
            yield group


def _key(weight: float, random: Random) -> tuple[float, float]:
    draw = random.random()
    return (math.log(1.0 - draw) / weight if weight > 0 else -math.inf, draw)
