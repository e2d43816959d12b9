"""Batches that were delivered and are not yet acknowledged, with the groups in them.

A batch is offered again when its client cannot have read it, when a client that acknowledges asks without doing so, and
when another client asks after `lease_s`. What a delivery knows of a lease is out of date once it was acknowledged or
delivered to another client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from grpo_engine.rollouts.state.batch_forming import QueuedGroup
from grpo_engine.rollouts.state.records import Lease


class Leases:
    """The leases, oldest first."""

    def __init__(self, leases: Iterable[Lease], groups: Iterable[QueuedGroup], *, lease_s: float) -> None:
        """Restore from what is stored.

        Args:
            groups: those in the leases.
        """
        self._lease_s = lease_s
        # A stock client whose answer was cut off by our restart sends the same request as one that received it.
        self._leases = {
            x.id: replace(x, is_sent=x.has_arrived, is_open=x.is_open or not (x.is_explicit or x.has_arrived))
            for x in leases
        }
        self._groups = {group.id: group for group in groups}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, id_: str) -> bool:
        return id_ in self._leases

    @property
    def has_explicit(self) -> bool:
        """Whether a client that acknowledges has one."""
        return any(x.is_explicit for x in self._leases.values())

    def acknowledged_by(self, client: str, ack: str | None) -> list[str]:
        """Ids of the leases that a request acknowledges; without `ack`, of those that its client was sent."""
        if ack is not None:
            return [ack] if ack in self._leases else []
        return [x.id for x in self._leases.values() if x.is_sent and _is_at_stock_client(x) and x.client == client]

    def offered_to(self, client: str, ack: str | None, now: float) -> Iterator[Lease]:
        """The leases that a request may be answered with; they may change meanwhile."""
        for lease in list(self._leases.values()):
            is_lost = lease.is_explicit and ack is not None
            is_of_another = lease.client != client or not lease.is_sent
            has_expired = is_of_another and now - lease.delivered_at > self._lease_s
            if lease.is_open or is_lost or has_expired:
                yield lease

    def add(self, lease: Lease, groups: Iterable[QueuedGroup]) -> None:
        """A batch is delivered."""
        self._leases[lease.id] = lease
        self._groups |= {group.id: group for group in groups}

    def deliver_again(self, lease: Lease, *, client: str, is_explicit: bool, now: float) -> Lease:
        """It is delivered once more, as if for the first time."""
        again = self._leases[lease.id] = Lease(
            id=lease.id,
            group_ids=lease.group_ids,
            num_sequences=lease.num_sequences,
            client=client,
            is_explicit=is_explicit,
            delivered_at=now,
        )
        return again

    def remove(self, id_: str) -> list[QueuedGroup]:
        """Forget a lease; returns its groups."""
        groups = (self._groups.pop(group_id, None) for group_id in self._leases.pop(id_).group_ids)
        return [group for group in groups if group is not None]

    def clear(self) -> list[int]:
        """Forget all; returns the ids of their groups."""
        ids = list(self._groups)
        self._leases, self._groups = {}, {}
        return ids

    def offer_all_again(self) -> tuple[Lease, ...]:
        """Whoever has them, they are offered again."""
        self._leases = {id_: _opened(lease) for id_, lease in self._leases.items()}
        return tuple(self._leases.values())

    def offer_again(self, delivered: Lease) -> Lease | None:
        """Offer a batch again that its client cannot have read; None where that was done before."""
        lease = self._current(delivered)
        return None if lease is None or lease.is_open else self._put(_opened(lease))

    def note_sent(self, delivered: Lease) -> None:
        """Record that a batch is being sent."""
        if (lease := self._current(delivered)) is not None:
            self._put(replace(lease, is_sent=True))

    def note_arrival(self, delivered: Lease) -> Lease | None:
        """Record that a batch arrived at its client; None where that changes nothing."""
        lease = self._current(delivered)
        if lease is None or not _is_at_stock_client(lease) or lease.has_arrived:
            return None
        return self._put(replace(lease, has_arrived=True))

    def note_served(self, id_: str) -> Lease | None:
        """Record that a batch was trained, and inference serves the new version; None: it is unknown."""
        lease = self._leases.get(id_)
        return None if lease is None or lease.is_open else self._put(replace(lease, is_served=True))

    def senders(self, lease: Lease) -> list[int | None]:
        """Environment ids of the groups of a lease; None where a group has none."""
        return [self._groups[id_].env_id for id_ in lease.group_ids]

    def num_untrained(self) -> int:
        """Sequences of batches that are not trained yet."""
        return sum(lease.num_sequences for lease in self._leases.values() if not lease.is_served)

    def num_first_untrained(self) -> Counter[int | None]:
        """Those of them that were in no batch before, by environment; looks at each group."""
        untrained: Counter[int | None] = Counter()
        leases = [lease for lease in self._leases.values() if not lease.is_served]
        for group in (self._groups[id_] for lease in leases for id_ in lease.group_ids):
            untrained[group.env_id] += 0 if group.uses else group.num_sequences
        return untrained

    def _current(self, delivered: Lease) -> Lease | None:
        """The current lease; None where it was acknowledged or offered to another client since this delivery."""
        lease = self._leases.get(delivered.id)
        return lease if lease is not None and lease.delivered_at == delivered.delivered_at else None

    def _put(self, lease: Lease) -> Lease:
        self._leases[lease.id] = lease
        return lease


def _is_at_stock_client(lease: Lease) -> bool:
    """Whether its client has it, and acknowledges it by asking for the next one."""
    return not lease.is_explicit and not lease.is_open


def _opened(lease: Lease) -> Lease:
    """The lease, to be offered again."""
    return replace(lease, is_open=True, is_sent=False, has_arrived=False)
