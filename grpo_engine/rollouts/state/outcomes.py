"""What the operations of the state changed, for its callers to store, log and answer."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_engine.rollouts.state.batch_forming import QueuedGroup
from grpo_engine.rollouts.state.records import Lease
from grpo_engine.wire.rollouts import BatchesAhead


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What a registration changed."""

    changes: str
    """Text for the answer and the log."""
    dropped: tuple[int, ...] = ()
    """Groups of the earlier run."""
    opened: tuple[Lease, ...] = ()
    """Leases that are offered again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Whether a group was queued or buffered."""

    group: QueuedGroup
    place: str
    released: tuple[int, ...]
    """Groups that moved from the buffer to the queue with it."""
    num_buffered: int
    """Sequences of this environment that stay in its buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handout:
    """What a request for a batch changed; `lease` is None when there is no batch."""

    lease: Lease | None
    acknowledged: tuple[str, ...]
    returned: tuple[int, ...] = ()
    """Groups that went into the queue: their batch no longer has the right size, or their environment disconnected."""
    kept: tuple[QueuedGroup, ...] = ()
    """Groups of acknowledged batches that went back into the queue, to be delivered again."""
    dropped: tuple[int, ...] = ()
    """Groups that exceed max_staleness."""
    num_never_used: int = 0
    """Those of them that were in no batch."""
    unmet: tuple[str, ...] = ()
    """Environments whose guaranteed share is not in it, because they sent too few groups for `share_wait_s`."""
    is_repeated: bool = False
    has_started_now: bool = False
    ahead: BatchesAhead | None = None
    """With a new lease, how far environments may sample ahead from now on, where that is decided here."""

    @property
    def changed_anything(self) -> bool:
        """Whether anything has to be stored."""
        return bool(self.lease or self.acknowledged or self.returned or self.dropped or self.has_started_now)
