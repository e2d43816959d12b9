"""The registered environments, which of them are live, and each one's share of the generation."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

from grpo_engine.rollouts.state.records import EnvironmentRecord
from grpo_engine.wire.rollouts import RegisterEnvironmentRequest

REPLACED_AFTER_S = 3.0
"""Time without a request after which an environment is replaced by a new registration of its name: its restart. Running
environments send requests several times a second, or every five seconds while idle; any request reconnects one. A
service that was restarted says which one it is, and replaces its killed process however short that took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The live environments at a time, and what follows from who they are."""

    records: list[EnvironmentRecord]
    ids: frozenset[int]
    absent: Set[int]
    """All others."""
    shares: dict[int, float]
    """Least share of each batch, by environment, where it has one."""
    total_claim: float
    since: float
    until: float
    """None of them can have lapsed before."""

    def weight(self, record: EnvironmentRecord) -> float:
        """Share of the generation that an environment has, as in the stock API."""
        if self.total_claim <= 0:
            return 1 / max(1, len(self.records))
        return _claim(record) / self.total_claim if record.id in self.ids else 0.0


class Environments:
    """All registrations, by id; an environment is live while it is connected and sends requests."""

    def __init__(self, records: Iterable[EnvironmentRecord], *, liveness_s: float, now: float) -> None:
        """Restore from what is stored.

        Args:
            liveness_s: time since its last request within which an environment is live.
        """
        self._liveness_s = liveness_s
        self.records = {record.id: record for record in records}
        self.last_seen = dict.fromkeys(self.records, now)
        """Time of the last request of each."""
        self.registered_at = now
        """Time of the latest registration; after a restart, now."""
        self._last_live: Live | None = None

    def register(self, request: RegisterEnvironmentRequest, now: float) -> EnvironmentRecord:
        """Register an environment; those of its name are disconnected that are of its service, or have sent nothing for
        `REPLACED_AFTER_S`.
        """
        same_name = [other for other in self.records.values() if other.desired_name == request.desired_name]
        record = EnvironmentRecord(
            id=len(self.records),
            desired_name=request.desired_name,
            name=f"{request.desired_name}_{len(same_name)}",
            weight=request.weight,
            group_size=request.group_size,
            max_token_length=request.max_token_length,
            min_batch_allocation=request.min_batch_allocation,
            evaluates=request.evaluates,
            takes_slots=request.takes_slots,
            service=request.service,
        )
        for other in same_name:
            is_killed = request.service is not None and other.service == request.service
            if is_killed or now - self.last_seen[other.id] > REPLACED_AFTER_S:
                self.records[other.id] = replace(other, is_connected=False)
        self.records[record.id] = record
        self._last_live = None
        self.last_seen[record.id] = self.registered_at = now
        return record

    def disconnect(self, env_id: int) -> EnvironmentRecord | None:
        """Record that an environment disconnected; None when there is none of that id."""
        record = self.records.get(env_id)
        if record is None:
            return None
        self.records[env_id] = replace(record, is_connected=False)
        self._last_live = None
        return self.records[env_id]

    def hear(self, env_id: int, now: float) -> None:
        """Note a request of an environment, which shows that it runs."""
        self.last_seen[env_id] = now
        if self._last_live is not None and env_id in self._last_live.absent:
            self._last_live = None

    def reconnect(self, env_id: int, now: float) -> EnvironmentRecord:
        """Note a request that only a connected environment sends."""
        self.hear(env_id, now)
        if not self.records[env_id].is_connected:
            self.records[env_id] = replace(self.records[env_id], is_connected=True)
        return self.records[env_id]

    def live(self, now: float) -> Live:
        """Those that are connected and sent a request within `liveness_s`; shares of all others have lapsed.

        They are counted again only where that may have changed: a thousand ask ten times a second.
        """
        live = self._last_live
        if live is None or not live.since <= now <= live.until:
            records = [record for record in self.records.values() if self._is_live(record, now)]
            live = self._last_live = Live(
                records=records,
                ids=frozenset(record.id for record in records),
                absent=self.records.keys() - {record.id for record in records},
                shares={e.id: e.min_batch_allocation for e in records if e.min_batch_allocation is not None},
                total_claim=sum(map(_claim, records)),
                since=now,
                until=min((self.last_seen[record.id] for record in records), default=now) + self._liveness_s,
            )
        return live

    def _is_live(self, record: EnvironmentRecord, now: float) -> bool:
        return record.is_connected and now - self.last_seen[record.id] <= self._liveness_s


def _claim(record: EnvironmentRecord) -> float:
    return record.max_token_length * max(0.0, record.weight)
