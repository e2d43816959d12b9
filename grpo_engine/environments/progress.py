"""A line now and then on how an environment is doing, for a log's reader; the trainer's metrics are the record."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

from grpo_engine.wire.rollouts import MASKED_LABEL, EnvironmentStatus, ScoredGroup

log = logging.getLogger(__name__)

_EVERY_S = 10.0
_NUM_GROUPS = 64
"""Groups that the averages go over."""


class Progress:
    """Counts since the start, and averages over the last groups."""

    def __init__(self) -> None:
        self.num_groups = 0
        self.num_dropped = 0
        """Groups whose scores were all equal, where those are not wanted, or whose seat never had its turn."""
        self.num_too_long = 0
        """Items whose prompt left no room for a completion."""
        self._rewards: deque[float] = deque(maxlen=_NUM_GROUPS)
        self._lengths: deque[float] = deque(maxlen=_NUM_GROUPS)
        self._said_at = time.monotonic()
        self._said = 0

    def posted(self, groups: Sequence[ScoredGroup]) -> None:
        """Count groups that were handed over."""
        self.num_groups += len(groups)
        for group in groups:
            num_read = sum(labels.count(MASKED_LABEL) for labels in group.masks)
            self._rewards.append(sum(group.scores) / len(group.scores))
            self._lengths.append((sum(map(len, group.tokens)) - num_read) / len(group.tokens))

    def say_now_and_then(self, status: EnvironmentStatus, more: str = "") -> None:
        """Log a line, `more` at its end, if there is news and the last line is some seconds old."""
        now = time.monotonic()
        if now - self._said_at < _EVERY_S or self.num_groups == self._said:
            return
        self._said_at, self._said = now, self.num_groups
        log.info(
            "step %d: %d groups sent, %d queued; last %d: reward %.3f, %.1f tokens%s%s%s",
            status.current_step,
            self.num_groups,
            status.self_queue_size,
            len(self._rewards),
            sum(self._rewards) / len(self._rewards),
            sum(self._lengths) / len(self._lengths),
            f"; {self.num_dropped} dropped, nothing to compare" if self.num_dropped else "",
            f"; {self.num_too_long} items too long" if self.num_too_long else "",
            f"; {more}" if more else "",
        )
