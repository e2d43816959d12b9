"""How far an environment samples ahead of the trainer, and which inference server it asks. Pure.

Where staleness is bounded the rollout API grants slots, and an environment starts as many groups as it is granted. Else
it stays up to `max_batches_offpolicy` batches ahead, or where that is unset as many as the rollout API says, which
follows what the trainer needs; groups that are being generated are among them. Groups of other
environments count too, except against the guaranteed share: no batch forms without that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from grpo_engine.wire.rollouts import FIRST_BATCHES_AHEAD, EnvironmentStatus, SamplingLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """The settings that decide it."""

    group_size: int
    groups_per_item: int
    max_workers: int
    max_batches_offpolicy: int | None
    """None: as many as the rollout API says."""
    min_batch_allocation: float | None = None

    def idle_workers(self, env_weight: float, num_running: int) -> int:
        """Items that could be sampled besides those that are."""
        workers = max(1, round(self.max_workers * min(1.0, env_weight)))
        return max(0, max(1, workers // self.groups_per_item) - num_running)

    def startable(self, status: EnvironmentStatus, batch_size: int, *, num_unposted: int, idle_workers: int) -> int:
        """Items to start now.

        Args:
            num_unposted: groups that are being generated, or finished and not yet posted.
        """
        if status.may_start is not None:
            return min(status.may_start // self.groups_per_item, idle_workers)
        num_ahead = status.queue_size + num_unposted
        wanted = self.batches(status) * batch_size // self.group_size
        num_items = (wanted - num_ahead) // self.groups_per_item
        if num_items < 1 and num_ahead * self.group_size < batch_size:
            num_items = 1  # though its groups exceed the room: without it the trainer would wait forever
        share = math.ceil(wanted * (self.min_batch_allocation or 0))
        missing = share - status.self_queue_size - num_unposted
        num_items = max(num_items, math.ceil(missing / self.groups_per_item))
        return max(0, min(num_items, idle_workers))

    def batches(self, status: EnvironmentStatus | None) -> int:
        """Most batches to be ahead; a stock API does not say how many, nor ours before the first answer."""
        if self.max_batches_offpolicy is not None:
            return self.max_batches_offpolicy
        return status.ahead.batches if status is not None and status.ahead is not None else FIRST_BATCHES_AHEAD

    def limit(self, *, idle_workers: int, of_servers: SamplingLimit | None) -> SamplingLimit | None:
        """What keeps it from sampling more; None where the number of batches ahead is a setting.

        Args:
            of_servers: `SERVERS` or `UNKNOWN`; None where they have room.
        """
        if self.max_batches_offpolicy is not None:
            return None
        if of_servers is SamplingLimit.SERVERS:
            return of_servers
        return of_servers or SamplingLimit.BATCHES_AHEAD if idle_workers else SamplingLimit.WORKERS


class Loaded(Protocol):
    """What an environment has sent to a server."""

    num_open_tokens: int
    num_tokens: int


LoadedT = TypeVar("LoadedT", bound=Loaded)


def least_loaded(servers: Iterable[LoadedT]) -> LoadedT:
    """The server with the fewest open tokens, and of those the one that was sent the fewest."""
    return min(servers, key=lambda server: (server.num_open_tokens, server.num_tokens))
