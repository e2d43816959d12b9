"""The state of the rollout API: registrations, queue, leases, environments, evaluation. No clock, disk or network.

Every method takes the current time and returns what has to be stored, which `coordinator` does. Bodies of groups are
not here.

Registration rule: a registration continues the run before it when it names the same `checkpoint_dir`, and that run has
steps left or gets more from where it ended. Then the queue stays, batches that were not acknowledged are offered again,
and the step stays unless `starting_step` is above 0 (stock trainers always send 0). Any other registration begins a new
run: the step is `starting_step`, and groups of the earlier run are dropped. Groups that arrived before any registration
are kept. A new registration ends the evaluation of the earlier one.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random

from grpo_engine.errors import first_of
from grpo_engine.rollouts.state.batch_forming import (
    QueuedGroup,
    Supplier,
    least_sequences,
    oldest_combination,
    why_unreachable,
)
from grpo_engine.rollouts.state.buffering import Buffering
from grpo_engine.rollouts.state.environments import Environments, Live
from grpo_engine.rollouts.state.evaluations import state_of
from grpo_engine.rollouts.state.leases import Leases
from grpo_engine.rollouts.state.outcomes import Handout, Placed, Registered
from grpo_engine.rollouts.state.queue import Queue
from grpo_engine.rollouts.state.records import (
    BUFFER,
    QUEUE,
    EnvironmentRecord,
    EvaluationRecord,
    Lease,
    RunRecord,
    Stored,
)
from grpo_engine.rollouts.state.sampling_ahead import Delivered, SamplingAhead
from grpo_engine.rollouts.state.selection import Selection, short_of
from grpo_engine.rollouts.state.slots import Claim, Demand, Slots, Traffic
from grpo_engine.wire.rollouts import (
    BatchesAhead,
    EnvironmentStatus,
    EvaluationAnswer,
    EvaluationOrder,
    EvaluationState,
    RegisterEnvironmentRequest,
    RegisterRequest,
    SamplingLimit,
)
from grpo_engine.wire.supervisor import MAX_VERSIONS, VersionsInFlight

MIN_ENVIRONMENT_WEIGHT = 0.01
"""Least `env_weight` of an environment, as in the stock API."""

BUFFER_LIMIT = 4
"""Capacity of an environment's buffer in group sizes; beyond it the oldest small groups are queued as they are."""

_SAMPLING_LIMITS = (
    SamplingLimit.BATCHES_AHEAD,
    SamplingLimit.UNKNOWN,
    SamplingLimit.SERVERS,
    SamplingLimit.WORKERS,
)
"""The first of them that an environment reports is that of all."""


class ApiState:
    """The state of one rollout API."""

    def __init__(
        self,
        stored: Stored,
        *,
        lease_s: float,
        liveness_s: float,
        share_wait_s: float,
        now: float,
        max_staleness: int | None = None,
        buffering: Buffering | None = None,
        random: Random | None = None,
    ) -> None:
        """Restore from what is stored.

        Args:
            buffering: absent: each group once, oldest first.
            random: chooses what a window or a buffer delivers.
            max_staleness: bound on the staleness of delivered groups; a stricter bound of the trainer wins.
        """
        self._liveness_s = liveness_s
        self._buffering = buffering or Buffering()
        self.selection = Selection(
            buffering=self._buffering,
            random=random or Random(),
            max_staleness=max_staleness,
            share_wait_s=share_wait_s,
        )
        self.selection.newest_version = max((group.policy_version or 0 for group, _ in stored.groups), default=0)
        self.selection.has_spent = any(group.uses >= self._buffering.max_uses for group, _ in stored.groups)
        self.run = stored.run
        self.environments = Environments(stored.environments, liveness_s=liveness_s, now=now)
        self.trainer_seen: float | None = None
        self.evaluation = stored.evaluation and replace(
            stored.evaluation, ordered_at=min(now, stored.evaluation.ordered_at)
        )
        self.queue = Queue(group for group, place in stored.groups if place == QUEUE)
        self.buffers: dict[int, list[QueuedGroup]] = {}
        leased = []
        for group, place in stored.groups:
            if place == BUFFER and group.env_id is not None:
                self.buffers.setdefault(group.env_id, []).append(group)
            elif place != QUEUE:
                leased.append(group)
        # The clock of the machine may have been set back since they were stored.
        leases = (replace(each, delivered_at=min(now, each.delivered_at)) for each in stored.leases)
        self.leases = Leases(leases, leased, lease_s=lease_s)
        self._next_group = 1 + max((group.id for group, _ in stored.groups), default=-1)
        self.ahead = SamplingAhead()
        self._limits: dict[int, SamplingLimit] = {}
        """By environments that follow it: what limits them."""
        self._last_limit: tuple[Live, SamplingLimit | None] | None = None
        """What limits those that are live, counted again only where it may have changed."""
        self._asked_since: float | None = None
        """Since when the trainer has asked for a batch that there was not."""
        self._delivered_at: float | None = None
        self.slots = Slots(e.id for e in stored.environments if e.takes_slots and e.is_connected)

    # --- trainer ---------------------------------------------------------------------------------------------------

    def register(self, request: RegisterRequest, uuid: int) -> Registered:
        """Make this the current registration, identified by `uuid`."""
        before = self.run
        self.selection.mark_formable()
        self.evaluation = None  # the trainer that ordered it is gone
        self.selection.newest_version = 0  # the trainer may have returned to an older checkpoint
        self.ahead.interrupted()
        self._asked_since = None
        if before is None:
            self.run = self._new_run(request, uuid)
            return Registered(changes=f"first registration; {len(self.queue)} groups queued")
        # A trainer that was killed during its last batch asks for it again; one that ended has acknowledged it.
        has_open_batch = request.starting_step < request.num_steps and self.leases.has_explicit
        is_extended = 0 < before.step == request.starting_step < request.num_steps
        goes_on = not before.is_over or has_open_batch or is_extended
        if before.request.checkpoint_dir == request.checkpoint_dir and goes_on:
            step = request.starting_step or before.step
            has_started = before.has_started or request.is_served
            self.run = replace(before, request=request, uuid=uuid, step=step, is_left=False, has_started=has_started)
            changed = [
                f"{name} {old} → {new}"
                for name, old in before.request.model_dump(exclude={"is_served"}).items()
                if (new := getattr(request, name)) != old
            ]
            changes = f"continues at step {step}; {len(self.queue)} groups kept"
            changes = f"{changes}; changed: {', '.join(changed) or 'nothing'}"
            return Registered(changes=changes, opened=self.leases.offer_all_again())
        dropped = (*self.leases.clear(), *(group.id for group in self._waiting()))
        self.queue, self.buffers = Queue(), {}
        self.run = self._new_run(request, uuid)
        reason = "the earlier run is complete" if before.is_over else "another checkpoint_dir"
        return Registered(changes=f"new run ({reason}); {len(dropped)} groups dropped", dropped=dropped)

    def _new_run(self, request: RegisterRequest, uuid: int) -> RunRecord:
        return RunRecord(request=request, uuid=uuid, step=request.starting_step, has_started=request.is_served)

    def next_batch(
        self, *, client: str, ack: str | None, lease_id: str, now: float, policy_version: int | None = None
    ) -> Handout:
        """Hand out the next batch, oldest groups first; a trainer must be registered.

        Args:
            ack: the lease that an explicit client acknowledges ("" for none yet); None from a stock client, whose next
                request implies that the last batch arrived.
            lease_id: id of the lease if a new one is created.
            policy_version: the version that inference serves now, if the trainer sends it.
        """
        assert self.run is not None
        has_started_now = not self.run.has_started
        self.trainer_seen = now
        if policy_version is not None:  # also when it returned to an older checkpoint
            self.selection.newest_version = policy_version
        self.run = replace(self.run, has_started=True)
        acknowledged = self.leases.acknowledged_by(client, ack)
        kept = self._finish(acknowledged)
        if acknowledged:
            self.slots.freed(now)
        returned = self._release_buffers(now)
        for lease in self.leases.offered_to(client, ack, now):
            if lease.num_sequences == self.run.request.batch_size:
                return Handout(
                    lease=self.leases.deliver_again(lease, client=client, is_explicit=ack is not None, now=now),
                    acknowledged=tuple(acknowledged),
                    returned=tuple(returned),
                    kept=tuple(kept),
                    is_repeated=True,
                    has_started_now=has_started_now,
                )
            acknowledged.append(lease.id)
            returned += lease.group_ids
            self._enqueue(self.leases.remove(lease.id))
        stale = self.selection.stale(self.queue, self.run)
        self.queue.take(group.id for group in stale)
        batch, unmet = self.selection.choose(self.queue, self.run, self.environments.live(now).shares, now)
        self._note_wait(batch, now)
        new = self._lease(batch, client=client, is_explicit=ack is not None, lease_id=lease_id, now=now)
        return Handout(
            lease=new,
            acknowledged=tuple(acknowledged),
            returned=tuple(returned),
            kept=tuple(kept),
            dropped=tuple(group.id for group in stale),
            num_never_used=sum(not group.uses for group in stale),
            unmet=tuple(self.environments.records[id_].name for id_ in unmet),
            has_started_now=has_started_now,
            ahead=self.batches_ahead(now) if new is not None else None,
        )

    def _note_wait(self, batch: Sequence[QueuedGroup], now: float) -> None:
        """A batch is delivered, or there is none: how long the trainer has waited."""
        assert self.run is not None
        if not batch:
            self._asked_since = now if self._asked_since is None else self._asked_since
            return
        size = self.run.request.batch_size
        if self._delivered_at is not None:
            num_unused = self.queue.unused_by_environment.total() - sum(x.num_sequences for x in batch if not x.uses)
            self.ahead.delivered(
                Delivered(
                    interval_s=now - self._delivered_at,
                    waited_s=0.0 if self._asked_since is None else now - max(self._asked_since, self._delivered_at),
                    size=sum(group.num_bytes for group in batch) or size,
                    num_left=num_unused // size,
                    limit=self._sampling_limit(now),
                )
            )
        self._asked_since, self._delivered_at = None, now

    def acknowledge(self, lease_id: str) -> Handout:
        """Finish a batch that arrived; an unknown one was acknowledged before. After the last step it ends the run."""
        if self.run is not None and self.run.is_over:
            self.run = replace(self.run, is_left=True)
        known = [lease_id] if lease_id in self.leases else []
        return Handout(lease=None, acknowledged=tuple(known), kept=tuple(self._finish(known)))

    def note_served(self, lease_id: str, policy_version: int, now: float) -> Lease | None:
        """A leased batch was trained, and inference serves this version: its slots are free. None: it is unknown."""
        self.trainer_seen = now
        lease = self.leases.note_served(lease_id)
        if lease is not None:
            self.selection.newest_version = policy_version
            self.slots.freed(now)
        return lease

    def reclaim(self, delivered: Lease) -> Lease | None:
        """Offer a batch again that its client cannot have read; None where that was done before."""
        lease = self.leases.offer_again(delivered)
        if lease is not None:
            self.selection.mark_formable()
        return lease

    # --- environments ----------------------------------------------------------------------------------------------

    def register_environment(self, request: RegisterEnvironmentRequest, now: float) -> EnvironmentRecord | None:
        """Register an environment, or None while the trainer has not asked for a batch since this API started.

        After a start of the whole stack, inference serves untrained weights until the trainer has published its own,
        which its registration may say.
        """
        if self.run is None or not self.run.has_started or self.trainer_seen is None:
            return None
        record = self.environments.register(request, now)
        self.slots.joined(record.id, now)
        self.selection.mark_formable()
        return record

    def disconnect(self, env_id: int) -> EnvironmentRecord | None:
        """Record that an environment disconnected; None when there is none of that id."""
        record = self.environments.disconnect(env_id)
        if record is not None:
            self.selection.mark_formable()
        return record

    def place(
        self,
        env_id: int | None,
        num_sequences: int,
        num_bytes: int,
        now: float,
        *,
        policy_version: int | None = None,
        spread: float | None = None,
    ) -> Placed:
        """Queue a group, or buffer it while it is smaller than its environment's group size."""
        group = QueuedGroup(
            id=self._next_group,
            env_id=env_id,
            num_sequences=num_sequences,
            num_bytes=num_bytes,
            policy_version=policy_version,
            step=self.run.step if self.run else None,
            spread=None if self._buffering.kind == "once" else spread,
        )
        self._next_group += 1
        self.selection.newest_version = max(self.selection.newest_version, policy_version or 0)
        environment = self.environments.records.get(env_id) if env_id is not None else None
        if environment is not None:
            self.environments.hear(environment.id, now)
            self.slots.arrived(environment.id, environment.group_size, now)
        if environment is None or not environment.buffers(num_sequences):
            self._enqueue([group])
            return Placed(group=group, place=QUEUE, released=(), num_buffered=0)
        buffer = [*self.buffers.get(environment.id, ()), group]
        full = set(oldest_combination([other.num_sequences for other in buffer], environment.group_size) or ())
        leaving = [buffer[index] for index in sorted(full)]
        staying = [other for index, other in enumerate(buffer) if index not in full]
        num_buffered = sum(other.num_sequences for other in staying)
        num_oldest = 0
        while num_buffered > BUFFER_LIMIT * environment.group_size:
            num_buffered -= staying[num_oldest].num_sequences
            num_oldest += 1
        leaving += staying[:num_oldest]
        self.buffers[environment.id] = staying[num_oldest:]
        if leaving:
            self._enqueue(leaving)
        return Placed(
            group=group,
            place=QUEUE if group.id in {other.id for other in leaving} else BUFFER,
            released=tuple(other.id for other in leaving if other is not group),
            num_buffered=num_buffered,
        )

    def evict(self) -> list[int]:
        """Remove what no longer fits into a window or buffer, once all groups of a post are placed."""
        batch_size = self.run.request.batch_size if self.run else 0
        evicted = [group.id for group in self._buffering.evicted(self.queue, batch_size)]
        self.queue.take(evicted)
        return evicted

    def environment_status(self, env_id: int, now: float, *, is_heard: bool = True) -> EnvironmentStatus | None:
        """Step, queue and evaluation as an environment sees them; None when there is none of that id.

        Args:
            is_heard: whether this answers a request of the environment, which shows that it runs.
        """
        asker = self.environments.records.get(env_id)
        if asker is None:
            return None
        if is_heard:
            asker = self.environments.reconnect(env_id, now)
        live = self.environments.live(now)
        batch_size = self.run.request.batch_size if self.run else 0
        least = least_sequences(batch_size, live.shares)
        largest = self.queue.largest_group()
        own = self.queue.unused_by_environment[env_id]
        if not least and self.queue.has_one_size():  # nothing is rounded: a thousand senders are not added up
            others = self.queue.num_unused - own
        else:
            others = sum(
                max(0, math.ceil(count / largest) * largest - (least.get(other, 0) if other is not None else 0))
                for other, count in self.queue.unused_by_environment.items()
                if other != env_id
            )
        queued = own + others
        if self.queue.num_sequences < batch_size:
            queued = min(queued, batch_size - 1)  # rounded up to a batch, they would be awaited without end
        elif self.selection.fits_nothing:
            # However many those of others are, or its own of other sizes, no batch forms of them.
            whole = min(own, self.queue.sequences_in_groups_of(asker.group_size, env_id))
            queued = whole if whole < batch_size else queued
        return EnvironmentStatus(
            current_step=self.run.step if self.run else 0,
            queue_size=queued // asker.group_size,
            unallocated_fraction=1.0 - min(1.0, sum(live.shares.values())),
            self_queue_size=own // asker.group_size,
            max_group_size=largest,
            env_weight=max(MIN_ENVIRONMENT_WEIGHT, live.weight(asker)),
            evaluation=self._order_for(asker),
            is_evaluation_to_come=(asker.evaluates and self._is_evaluation_to_come(now)) or None,
            needs_no_more=(asker.takes_slots and self.run is not None and self.run.is_over) or None,
            ahead=self.batches_ahead(now) if env_id in self._limits else None,
        )

    # --- batches ahead ---------------------------------------------------------------------------------------------

    def report_limit(self, env_id: int, limit: SamplingLimit) -> None:
        """An environment that follows the number of batches ahead says what keeps it from sampling more."""
        if env_id in self.environments.records and self._limits.get(env_id) is not limit:
            self._limits[env_id] = limit
            self._last_limit = None

    def batches_ahead(self, now: float) -> BatchesAhead | None:
        """How far environments may sample ahead; None where staleness has a bound, or none of them follows it."""
        limit = self._sampling_limit(now)
        if limit is None or self.selection.staleness_bound(self.run) is not None:
            return None
        return self.ahead.current(limit)

    def _sampling_limit(self, now: float) -> SamplingLimit | None:
        """What limits the live environments: the number itself, as long as it limits one of them; None: none says."""
        live = self.environments.live(now)
        if self._last_limit is None or self._last_limit[0] is not live:
            limits = {limit for env_id, limit in self._limits.items() if env_id in live.ids}
            self._last_limit = live, next((limit for limit in _SAMPLING_LIMITS if limit in limits), None)
        return self._last_limit[1]

    # --- slots -----------------------------------------------------------------------------------------------------

    def report_sampling(self, env_id: int, num_groups: int) -> bool:
        """An environment says how many groups it samples or has yet to post; True where this frees slots."""
        bound, asker = self.selection.staleness_bound(self.run), self.environments.records.get(env_id)
        num_slots = None if bound is None or self.run is None else (bound + 1) * self.run.request.batch_size
        return asker is not None and self.slots.report(env_id, num_groups * asker.group_size, num_slots)

    def versions_in_flight(self, now: float) -> VersionsInFlight | None:
        """Which versions the queued groups have, and how many are sampled; None before a trainer has registered."""
        if self.run is None:
            return None
        counts = self.queue.num_by_version.copy()
        num_unversioned = counts.pop(None, 0)
        versions = sorted((version for version in counts if version is not None), reverse=True)
        sampled = self.slots.sampled_by()
        return VersionsInFlight(
            newest=self.selection.newest_version,
            queued={version: counts[version] for version in reversed(versions[:MAX_VERSIONS])},
            num_older=sum(counts[version] for version in versions[MAX_VERSIONS:]),
            num_unversioned=num_unversioned,
            num_sampled=sum(
                math.ceil(sampled.get(each.id, 0) / each.group_size) for each in self.environments.live(now).records
            ),
        )

    def num_startable(self, env_id: int, demand: Demand, now: float) -> int | None:
        """Groups that an environment may start now; None where staleness has no bound, and so no slots."""
        bound, asker = self.selection.staleness_bound(self.run), self.environments.records.get(env_id)
        if bound is None or self.run is None or asker is None:
            return None
        live = self.environments.live(now)
        return self.slots.num_startable(
            Claim(env_id=env_id, group_size=asker.group_size, weight=live.weight(asker)),
            demand,
            Traffic(
                batch_size=self.run.request.batch_size,
                num_batches=bound + 1,
                queue=self.queue,
                leased=self._untrained(is_by_environment=bool(live.shares)),
                is_stuck=self.selection.is_stuck,
            ),
            live=live.ids,
            shares=live.shares,
            waits_for_shares_since=now - self.selection.share_wait_s,
        )

    def _untrained(self, *, is_by_environment: bool) -> Counter[int | None]:
        """Sequences of leases that are not trained yet, and were in no batch before; else all under None.

        Environments ask many times a second, and a batch has thousands of groups: they are only looked at where needed.
        """
        if is_by_environment or self._buffering.kind == "replay":
            return self.leases.num_first_untrained()
        return Counter({None: self.leases.num_untrained()})

    def grant_slots(self, env_id: int, num_groups: int) -> None:
        """Grant what `num_startable` said."""
        self.slots.grant(env_id, num_groups * self.environments.records[env_id].group_size)

    # --- evaluations -----------------------------------------------------------------------------------------------

    def order_evaluation(self, order: EvaluationOrder, now: float) -> EvaluationRecord:
        """Replace any earlier order; repeating the current one changes nothing.

        Like a request for a batch it opens registration: the first evaluation comes before the first batch.
        """
        assert self.run is not None
        self.trainer_seen = now
        self.run = replace(self.run, has_started=True)
        if self.evaluation is None or self.evaluation.order.id != order.id:
            self.evaluation = EvaluationRecord(order=order, ordered_at=now)
            self.ahead.interrupted()
        return self.evaluation

    def answer_evaluation(self, answer: EvaluationAnswer, now: float) -> EvaluationRecord:
        """Store what an environment measured; a later answer replaces an earlier one."""
        assert self.evaluation is not None
        self.environments.hear(answer.env_id, now)
        others = (other for other in self.evaluation.answers if other.env_id != answer.env_id)
        self.evaluation = replace(self.evaluation, answers=(*others, answer))
        return self.evaluation

    def close_evaluation(self) -> EvaluationRecord:
        """Accept no more answers."""
        assert self.evaluation is not None
        self.evaluation = replace(self.evaluation, is_closed=True)
        return self.evaluation

    def evaluation_state(self, id_: str, now: float) -> EvaluationState | None:
        """The state of an evaluation; None when there is none of that id."""
        if self.evaluation is None or self.evaluation.order.id != id_:
            return None
        return state_of(
            self.evaluation,
            self.environments.records,
            self.environments.last_seen,
            self.environments.live(now).records,
            known_since=self.evaluation.ordered_at - self._liveness_s,
            registered_at=self.environments.registered_at,
            now=now,
        )

    def _order_for(self, asker: EnvironmentRecord) -> EvaluationOrder | None:
        evaluation = self.evaluation
        if evaluation is None or evaluation.is_closed or not asker.evaluates:
            return None
        has_answered = any(answer.env_id == asker.id for answer in evaluation.answers)
        return None if has_answered else evaluation.order

    def _is_evaluation_to_come(self, now: float) -> bool:
        if self.run is None or not self.run.is_over or self.run.is_left or not self.run.request.eval_every:
            return False
        if self.evaluation is None or self.evaluation.order.step < self.run.request.num_steps:
            return True
        state = self.evaluation_state(self.evaluation.order.id, now)
        return state is not None and not state.is_over

    # --- queue ------------------------------------------------------------------------------------------------------

    def num_waiting_sequences(self) -> int:
        """Sequences in the queue and in the buffers."""
        return self.queue.num_sequences + sum(group.num_sequences for group in self._buffered())

    def num_waiting_bytes(self) -> int:
        """Bytes of JSON in the queue and in the buffers."""
        return self.queue.num_bytes + sum(group.num_bytes for group in self._buffered())

    def is_run_active(self, now: float) -> bool:
        """Whether a trainer with steps left has asked for a batch within `liveness_s`."""
        has_steps_left = self.run is not None and self.run.has_started and not self.run.is_over
        return has_steps_left and self.trainer_seen is not None and now - self.trainer_seen <= self._liveness_s

    def why_no_batch(self, now: float) -> str | None:
        """Why no batch can form: sizes that never add up, an unmet guaranteed share, or no live environment."""
        if self.run is None:
            return None
        environments, live = self.environments, self.environments.live(now)
        is_short = self.selection.is_stuck or self.queue.num_sequences < self.run.request.batch_size
        if not live.records and environments.records and is_short and not self.run.is_over:
            last = max(environments.records.values(), key=lambda each: environments.last_seen[each.id])
            what = "sent its last request" if last.is_connected else "disconnected"
            # The time, not the seconds since then: a text that changes is logged again at every request.
            at = time.strftime("%H:%M:%S", time.localtime(environments.last_seen[last.id]))
            return f"no environment is live: {last.name} {what} at {at}; check its log, or start one"
        short = short_of(self.queue, self.run.request.batch_size, live.shares)
        if short and self.selection.waits_long_for_shares(now):
            names = first_of(environments.records[id_].name for id_ in short)
            return (
                f"enough groups are queued, but too few of {names}, which has a guaranteed share: check its log, or "
                f"lower min_batch_allocation; after {self.selection.share_wait_s:g} s batches form without it"
            )
        suppliers = [Supplier(env_id=e.id, name=e.name, group_size=e.group_size) for e in live.records]
        return why_unreachable(self.queue.num_groups, suppliers, self.run.request.batch_size, live.shares)

    def _lease(
        self, batch: Sequence[QueuedGroup], *, client: str, is_explicit: bool, lease_id: str, now: float
    ) -> Lease | None:
        assert self.run is not None
        if not batch:
            return None
        self.run = replace(self.run, step=self.run.step + 1)
        lease = Lease(
            id=lease_id,
            group_ids=tuple(group.id for group in batch),
            num_sequences=self.run.request.batch_size,
            client=client,
            is_explicit=is_explicit,
            delivered_at=now,
        )
        self.leases.add(lease, self.queue.take(lease.group_ids))
        return lease

    def _release_buffers(self, now: float) -> list[int]:
        """Queue the buffered groups of environments that are not live: no more groups will complete them."""
        absent = self.buffers.keys() - self.environments.live(now).ids if self.buffers else ()
        orphaned = [group for env_id in absent for group in self.buffers.pop(env_id)]
        if orphaned:
            self._enqueue(orphaned)
        return [group.id for group in orphaned]

    def _finish(self, lease_ids: Sequence[str]) -> list[QueuedGroup]:
        """Forget acknowledged batches; their groups that may be delivered again go into the queue, and are returned."""
        used = [replace(group, uses=group.uses + 1) for id_ in lease_ids for group in self.leases.remove(id_)]
        kept = [group for group in used if group.uses < self._buffering.max_uses]
        if kept:
            self._enqueue(kept)
        return kept

    def _enqueue(self, groups: Iterable[QueuedGroup]) -> None:
        """Add to the queue, which stays in order of arrival."""
        self.queue.add(groups)
        self.selection.mark_formable()

    def _buffered(self) -> Iterator[QueuedGroup]:
        return (group for buffer in self.buffers.values() for group in buffer)

    def _waiting(self) -> list[QueuedGroup]:
        return [*self.queue, *self._buffered()]
