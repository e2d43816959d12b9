"""Coordinates the in-memory state with the store: the operations of the rollout API, without HTTP.

The event loop changes the state and schedules the write without a pause in between, and the writer works in that order,
so the file always holds a state that the memory was in. Answers go out after the write. If the write fails, the file
wins: the state is restored from it, and every request that waited for a write is answered 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from grpo_engine.errors import first_of
from grpo_engine.rollouts.backpressure import Admission, Waiters
from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.idle_clock import IdleClock
from grpo_engine.rollouts.metrics import Counters
from grpo_engine.rollouts.state.api_state import ApiState
from grpo_engine.rollouts.state.outcomes import Handout, Placed, Registered
from grpo_engine.rollouts.state.records import EnvironmentRecord, Lease, Stored
from grpo_engine.rollouts.status_polling import StatusPolling
from grpo_engine.rollouts.stock.connections import Deliveries
from grpo_engine.rollouts.storage.store import IN_MEMORY, Store
from grpo_engine.rollouts.storage.writer import NotWritten, Writer
from grpo_engine.rollouts.validation import CheckedGroup, Refusal
from grpo_engine.serving.reporting import Reporter
from grpo_engine.wire.rollouts import (
    BatchesAhead,
    EvaluationAnswer,
    EvaluationOrder,
    EvaluationState,
    IdleTimes,
    RegisterEnvironmentRequest,
    RegisterRequest,
)
from grpo_engine.wire.supervisor import VersionsInFlight

log = logging.getLogger("grpo_engine.rollouts")

ResultT = TypeVar("ResultT")

VERSIONS_EVERY_S = 3.0
"""Between two looks at which policy versions the queued groups have."""
QUIET_S = 10.0
"""Without a batch, after which the queue is reported."""
_CHECK_EVERY_S = 0.25
"""Interval at which conditions that only depend on time are checked while a request waits for them."""
MAX_ENVIRONMENTS = 20_000
"""Registrations of environments, restarts among them, that are kept: each makes every later one slower, 10 ms at 6,000.
"""
MAX_SENDERS = 20_000
"""Whose last post is remembered: each start of an environment is one, and so is any name that a client makes up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A batch that is about to be sent."""

    lease: Lease
    bodies: list[bytes]
    environments: dict[int, str]
    """Names that are stable across restarts, by the ids in its groups."""
    is_repeated: bool
    idle: IdleTimes | None
    """Absent where it is repeated."""
    num_dropped: int
    """Groups that were dropped since the batch before, too old and in no batch."""
    tokens_per_second: float | None
    """Of completions that were posted since the batch before; None for the first, and where it is repeated."""
    ahead: BatchesAhead | None
    """How far environments may sample ahead, where that is decided here."""


class Coordinator:
    """State, store and waiting requests of one rollout API. Construct it inside a running event loop."""

    def __init__(self, config: ApiConfig, store: Store, stored: Stored, reporter: Reporter | None = None) -> None:
        self._config = config
        self._reporter = reporter or Reporter()
        self._reporter.ask_note = self._note_on_queue
        self._reporter.ask_versions = self._versions_in_flight
        self._versions: VersionsInFlight | None = None
        self._versions_at_s = -VERSIONS_EVERY_S
        self.now = _steady_clock()
        self._delivered_at = self.now()
        self._idle = IdleClock(time.monotonic)
        self._store = store
        self._writer = Writer(store, self._restore_from_store)
        self.state = self._state_from(stored)
        self.counters = Counters()
        self.latest_body = stored.latest_body
        self._posts = stored.posts
        """Number of the last post of each sender; those that posted last are the last."""
        self.deliveries = Deliveries()
        self._batch_waiters = Waiters()
        """Trainers that wait for a batch."""
        self._waiters = Waiters()
        """All other requests: new groups do not concern them, and need not wake them hundreds of times a second."""
        self.admission = Admission(config, self._waiters, lambda: self.state)
        self.polling = StatusPolling(self._waiters, self._idle, lambda: self.state, now=self.now)
        self._num_dropped = 0
        """Groups, since the last batch."""
        self._num_sampled = 0
        """Tokens of posted completions, since then."""
        self._counts_since: float | None = None
        """When that was."""
        self._reported_problem: str | None = None
        self._warned: set[tuple[str, str]] = set()

    @property
    def environment_names(self) -> Mapping[int, str]:
        """Names by id, for messages; looked up and not copied, since there is one call for each post."""
        return _Names(self.state.environments.records)

    # --- trainer ---------------------------------------------------------------------------------------------------

    async def register(self, request: RegisterRequest, uuid: int) -> Registered:
        """Begin or continue a run; `uuid` identifies this registration."""
        registered = self.state.register(request, uuid)
        if request.is_served:
            self.state.trainer_seen = self.now()
        run = self.state.run
        assert run is not None
        await self._write(
            lambda: self._store.save_run(run, dropped=registered.dropped, offered_again=registered.opened)
        )
        _event(
            logging.WARNING if registered.dropped else logging.INFO,
            "trainer registered",
            changes=registered.changes,
            batch_size=request.batch_size,
        )
        self._reported_problem = None
        self._notify()
        return registered

    async def next_batch(
        self, *, client: str, ack: str | None, wait_s: float = 0.0, policy_version: int | None = None
    ) -> Delivery | None:
        """The next batch, or None when there is none within `wait_s`; a trainer must be registered."""
        assert self.state.run is not None
        uuid, loop = self.state.run.uuid, asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            state, num_chances = self.state, self.state.selection.num_chances
            delivery = await self._hand_out(client=client, ack=ack, policy_version=policy_version)
            if delivery is not None or loop.time() >= deadline:
                return delivery
            await self._batch_waiters.until(partial(self._may_form_since, state, num_chances), deadline)
            # At the deadline it tries once more: a guaranteed share may have lapsed, which notifies no waiter.
            if self._waiters.is_closed or self.state is not state or state.run is None or state.run.uuid != uuid:
                return None

    async def _hand_out(self, *, client: str, ack: str | None, policy_version: int | None) -> Delivery | None:
        was_stuck = self.state.selection.is_stuck
        if ack is None:  # a stock client: its request acknowledges the last batch unless that connection was reset
            for lease in self.deliveries.reset_by(client):
                self._offer_again(lease)
        handout = self.state.next_batch(
            client=client, ack=ack, lease_id=secrets.token_hex(8), now=self.now(), policy_version=policy_version
        )
        senders = self.state.leases.senders(handout.lease) if handout.lease else []
        registered = self.state.environments.records
        records = {id_: registered[id_] for id_ in senders if id_ in registered}
        bodies = await self._write_handout(handout) if handout.changed_anything else []
        if handout.unmet:
            _event(logging.WARNING, "batch formed without a guaranteed share", environments=first_of(handout.unmet))
        if handout.dropped:
            self.counters.stale += handout.num_never_used
            self._num_dropped += handout.num_never_used
            if handout.num_never_used:
                _event(logging.WARNING, "stale groups dropped", groups=handout.num_never_used)
        if handout.lease or handout.acknowledged or handout.dropped or self.state.selection.is_stuck != was_stuck:
            self._notify()
        if handout.lease is None:
            return None
        self._delivered_at = self.now()
        run = self.state.run
        self.counters.batches_repeated += handout.is_repeated
        self.counters.batches += not handout.is_repeated
        _event(
            logging.WARNING if handout.is_repeated else logging.INFO,
            "batch offered again" if handout.is_repeated else "batch delivered",
            step=run.step if run else None,
            groups=len(bodies),
            sequences=handout.lease.num_sequences,
            environments=Counter(_sender_name(id_, self.environment_names) for id_ in senders),
            groups_waiting=len(self.state.queue),
            client=client,
        )
        num_dropped, self._num_dropped = self._num_dropped, 0
        tokens_per_second = None if handout.is_repeated else self._tokens_per_second()
        return Delivery(
            lease=handout.lease,
            bodies=bodies,
            environments={id_: record.desired_name for id_, record in records.items()},
            is_repeated=handout.is_repeated,
            idle=None if handout.is_repeated else self._idle.take(),
            num_dropped=num_dropped,
            tokens_per_second=tokens_per_second,
            ahead=handout.ahead,
        )

    def _tokens_per_second(self) -> float | None:
        """Of completions that were posted since it was last called; None at the first time."""
        since, self._counts_since = self._counts_since, self.now()
        num_sampled, self._num_sampled = self._num_sampled, 0
        return None if since is None else num_sampled / max(self._counts_since - since, 1e-3)

    async def acknowledge(self, lease_id: str) -> None:
        """Delete a batch that arrived, without asking for another."""
        handout = self.state.acknowledge(lease_id)
        if handout.acknowledged:
            await self._write_handout(handout)

    async def record_served(self, lease_id: str, policy_version: int) -> None:
        """A batch was trained, and inference serves this version: environments may start as many groups again."""
        lease = self.state.note_served(lease_id, policy_version, self.now())
        if lease is not None:
            await self._save_lease(lease)
            self._notify()

    def record_sent(self, lease: Lease, connection: object) -> None:
        """Record on which connection a batch is sent; call it without a pause before the send."""
        self.deliveries.add(connection, lease)
        self.state.leases.note_sent(lease)

    async def record_arrival(self, connection: object) -> None:
        """Record that the client's kernel has the whole batch: a restart of this service no longer affects it."""
        await self._save_lease(self.state.leases.note_arrival(self.deliveries.lease_on(connection)))

    def record_connection_end(self, connection: object, *, was_read: bool | None) -> Coroutine[None, None, None]:
        """Forget a connection on which a batch was sent. The state changes at once; awaiting writes it.

        Args:
            was_read: whether the batch was read to its end, and so is not offered again; None: unknown.
        """
        lease = self.deliveries.remove(connection)
        if was_read:
            return self._save_lease(self.state.leases.note_arrival(lease))
        if was_read is None or self.now() - lease.delivered_at > self._config.lease_s:
            return self._save_lease(None)
        return self.reclaim(lease)

    def reclaim(self, lease: Lease) -> Coroutine[None, None, None]:
        """Offer a batch again that its client cannot have read. The state changes at once; awaiting writes it."""
        return self._save_lease(self._offer_again(lease))

    def _offer_again(self, lease: Lease) -> Lease | None:
        reclaimed = self.state.reclaim(lease)
        if reclaimed is not None:
            _event(logging.WARNING, "connection broke before a batch was read", client=lease.client)
            self._notify()
        return reclaimed

    async def _save_lease(self, lease: Lease | None) -> None:
        if lease is not None:
            with contextlib.suppress(Refusal):  # not saved: the batch is offered again after a restart, at worst
                await self._write(lambda: self._store.save_lease(lease))

    # --- environments ----------------------------------------------------------------------------------------------

    async def register_environment(self, request: RegisterEnvironmentRequest) -> EnvironmentRecord | None:
        """Register an environment, or None while the trainer has not asked for a batch.

        Raises:
            Refusal: 503 when there are `MAX_ENVIRONMENTS`, or the write failed.
        """
        if len(self.state.environments.records) >= MAX_ENVIRONMENTS:
            detail = f"environments have registered {MAX_ENVIRONMENTS:,} times in this run: use a new store"
            raise Refusal(503, detail, "full")
        before = dict(self.state.environments.records)
        record = self.state.register_environment(request, self.now())
        if record is not None:
            # Including the environments that it replaces: else they would be connected again after a restart.
            changed = [each for each in self.state.environments.records.values() if before.get(each.id) != each]
            await self._write(lambda: self._store.save_environments(*changed))
            _event(
                logging.INFO,
                "environment registered",
                environment=record.name,
                env_id=record.id,
                group_size=record.group_size,
            )
            self._notify()
        return record

    async def disconnect(self, env_id: int) -> EnvironmentRecord | None:
        """Record that an environment disconnected; None when there is none of that id."""
        record = self.state.disconnect(env_id)
        if record is not None:
            _event(logging.INFO, "environment disconnected", environment=record.name)
            await self._write(lambda: self._store.save_environments(record))
            self._notify()
        return record

    async def add_groups(
        self,
        groups: Sequence[CheckedGroup],
        post: tuple[str, str] | None = None,
        is_sender_gone: Callable[[], Awaitable[bool]] | None = None,
    ) -> list[Placed]:
        """Queue or buffer groups as soon as there is room; an empty list where this very post was accepted before.

        Args:
            post: sender and number of the post, where it carries them.
            is_sender_gone: whether the sender has closed its connection, and so will not see the answer.

        Raises:
            Refusal: 503 when there was no room for `hold_s`, or the write failed; 400 when the sender is gone.
        """
        if not groups:
            return []
        if not self._is_duplicate(post):
            await self.admission.wait_for_room(groups, is_sender_gone)
        if self._is_duplicate(post):  # possibly since just now: its sender repeated the post while this one waited
            await self.written()  # the write of the first one may still be in progress
            return []
        now = self.now()
        placed = [
            self.state.place(
                g.env_id, g.num_sequences, len(g.body), now, policy_version=g.policy_version, spread=g.spread
            )
            for g in groups
        ]
        rows = [(p.group, p.place, g.body) for p, g in zip(placed, groups, strict=True)]
        released = [id_ for p in placed for id_ in p.released]
        forgotten = [] if post is None else self._remember(*post)
        evicted = self.state.evict()
        await self._write(lambda: self._store.add_groups(rows, released, post, forgotten, evicted))
        self.counters.evicted += len(evicted)
        self.latest_body = groups[-1].body
        self._batch_waiters.notify()
        names = self.environment_names
        for group in groups:
            name = _sender_name(group.env_id, names)
            self.counters.add_group(name, group.num_sequences, len(group.body))
            self._num_sampled += group.num_sampled
            self._warn_about(group, name)
        return placed

    async def written(self) -> None:
        """Wait until all that was changed before is written.

        Raises:
            Refusal: 503 when it could not be.
        """
        await self._write(lambda: None)

    def _remember(self, sender: str, number: str) -> list[str]:
        """Note the last post of a sender; returns the senders that posted longest ago, and are forgotten for it."""
        self._posts.pop(sender, None)
        self._posts[sender] = number
        forgotten = list(islice(self._posts, max(0, len(self._posts) - MAX_SENDERS)))
        for each in forgotten:
            del self._posts[each]
        return forgotten

    # --- evaluations -----------------------------------------------------------------------------------------------

    async def order_evaluation(self, order: EvaluationOrder) -> EvaluationState:
        """Have environments evaluate; a trainer must be registered."""
        is_new = self.state.evaluation is None or self.state.evaluation.order.id != order.id
        record = self.state.order_evaluation(order, self.now())
        if is_new:
            run = self.state.run
            await self._write(lambda: self._store.save_evaluation(record, run=run))
            _event(logging.INFO, "evaluation ordered", step=order.step, policy_version=order.policy_version)
            self._notify()
        return self._known_evaluation(order.id)

    async def evaluation_state(self, id_: str, *, wait_s: float = 0.0) -> EvaluationState:
        """The state of an evaluation, as soon as it is over or `wait_s` have passed.

        Raises:
            Refusal: 404 when there is none of that id (any more).
        """
        deadline = asyncio.get_running_loop().time() + wait_s

        def is_over() -> bool:
            state = self.state.evaluation_state(id_, self.now())
            return state is None or state.is_over

        self.state.trainer_seen = self.now()
        loop = asyncio.get_running_loop()
        while not is_over() and not self._waiters.is_closed and loop.time() < deadline:
            # Time alone can end it, too: an environment timed out, or none registered for a while.
            await self._waiters.until(is_over, min(deadline, loop.time() + _CHECK_EVERY_S))
        return self._known_evaluation(id_)

    async def answer_evaluation(self, id_: str, answer: EvaluationAnswer) -> None:
        """Store what an environment measured.

        Raises:
            Refusal: 404 when the evaluation is closed or unknown, 422 when the answer does not match the order, 503
                when the write failed.
        """
        record = self.state.evaluation
        if record is None or record.order.id != id_ or record.is_closed:
            raise Refusal(404, f"evaluation {id_} is closed or unknown", "evaluation")
        environment = self.state.environments.records.get(answer.env_id)
        if environment is None:
            raise Refusal(404, f"environment {answer.env_id} is not registered: POST /register-env", "unknown_id")
        fault = answer.fault(record.order)
        if fault is not None:
            raise Refusal(422, f"environment {answer.env_id} ({environment.name}): {fault}", "malformed")
        answered = self.state.answer_evaluation(answer, self.now())
        await self._write(lambda: self._store.save_evaluation(answered))
        _event(
            logging.INFO if answer.problem is None else logging.WARNING,
            "evaluation answered",
            step=record.order.step,
            environment=environment.name,
            prompts=len(answer.rewards),
            problem=answer.problem,
        )
        self._notify()

    async def close_evaluation(self, id_: str) -> None:
        """Accept no more answers, so that environments stop; an unknown evaluation counts as closed."""
        record = self.state.evaluation
        if record is None or record.order.id != id_ or record.is_closed:
            return
        closed = self.state.close_evaluation()
        await self._write(lambda: self._store.save_evaluation(closed))
        self._notify()

    def _known_evaluation(self, id_: str) -> EvaluationState:
        state = self.state.evaluation_state(id_, self.now())
        if state is None:
            raise Refusal(404, f"evaluation {id_} is unknown: POST /evaluations", "evaluation")
        return state

    # --- the whole API ---------------------------------------------------------------------------------------------

    async def reset(self) -> None:
        """Delete everything, as at the first start."""
        self.state = self._state_from(Stored(run=None, environments=[], leases=[], groups=[], latest_body=None))
        self.latest_body = None
        self._posts = {}
        await self._write(self._store.clear)
        _event(logging.WARNING, "reset: all data deleted")
        self._notify()

    def why_no_batch(self) -> str | None:
        """Why no batch can form as things are; logged when it changes."""
        problem = self.state.why_no_batch(self.now())
        if problem != self._reported_problem and problem is not None:
            _event(logging.WARNING, "no batch can form", why=problem)
        self._reported_problem = problem
        return problem

    def close(self) -> None:
        """Refuse all requests that wait, so that the server can shut down at once."""
        self._batch_waiters.close()
        self._waiters.close()

    @property
    def store_lost(self) -> str | None:
        """An error message when the store's file was removed or replaced."""
        return self._store.lost

    async def close_store(self) -> None:
        """Finish the writes and close the file."""
        await self._writer.close()

    # --- internals -------------------------------------------------------------------------------------------------

    async def _write_handout(self, handout: Handout) -> list[bytes]:
        run = self.state.run
        assert run is not None
        return await self._write(
            lambda: self._store.hand_out(
                run,
                acknowledged=handout.acknowledged,
                returned=handout.returned,
                kept=handout.kept,
                dropped=handout.dropped,
                lease=handout.lease,
            )
        )

    async def _write(self, action: Callable[[], ResultT]) -> ResultT:
        try:
            result = await self._writer.write(action)
        except NotWritten as error:
            detail = f"not stored: {error}: check whether the disk is full, and send it again later"
            raise Refusal(503, detail, "store") from None
        self._reporter.can_write(self._store_path)
        return result

    @property
    def _store_path(self) -> Path:
        return self._config.store or Path(IN_MEMORY)

    def _note_on_queue(self) -> str | None:
        """What is queued, while no batch was delivered for a while. Called in the reporter's thread."""
        run, now = self.state.run, self.now()
        if run is None or now - self._delivered_at < QUIET_S:
            return None
        problem = self.state.why_no_batch(now)
        num_queued, wanted = self.state.num_waiting_sequences(), run.request.batch_size
        return f"{num_queued} of {wanted} sequences of a batch are queued" + (f"; {problem}" if problem else "")

    def _versions_in_flight(self) -> VersionsInFlight | None:
        """As they were a moment ago, since each report of another figure is written to disk by the supervisor. Called
        in the reporter's thread."""
        if time.monotonic() - self._versions_at_s >= VERSIONS_EVERY_S:
            self._versions, self._versions_at_s = self.state.versions_in_flight(self.now()), time.monotonic()
        return self._versions

    def _state_from(self, stored: Stored) -> ApiState:
        config = self._config
        return ApiState(
            stored,
            lease_s=config.lease_s,
            liveness_s=config.liveness_s,
            share_wait_s=config.share_wait_s,
            max_staleness=config.max_staleness,
            buffering=config.buffering,
            now=self.now(),
        )

    def _restore_from_store(self, stored: Stored, error: Exception) -> None:
        """Return to what the file holds after a failed write."""
        _event(logging.ERROR, "not written", error=str(error), store=str(self._config.store))
        effect = "groups and batches are refused with 503, and asked for again"
        self._reporter.cannot_write(self._store_path, error, effect=effect)
        before, self.state = self.state, self._state_from(stored)
        last_seen = self.state.environments.last_seen
        last_seen |= {id_: at for id_, at in before.environments.last_seen.items() if id_ in last_seen}
        self.state.trainer_seen = before.trainer_seen
        self.state.slots, self.state.ahead = before.slots, before.ahead
        self.latest_body, self._posts = stored.latest_body, stored.posts
        self._notify()

    def _may_form_since(self, state: ApiState, num_chances: int) -> bool:
        return self.state is not state or self.state.selection.num_chances != num_chances

    def _is_duplicate(self, post: tuple[str, str] | None) -> bool:
        return post is not None and self._posts.get(post[0]) == post[1]

    def _notify(self) -> None:
        self._batch_waiters.notify()
        self._waiters.notify()

    def _warn_about(self, group: CheckedGroup, name: str) -> None:
        faults = {
            "its groups carry no inference_logprobs, which GRPO needs: use a server type that returns them": (
                not group.has_logprobs
            ),
            "its masks are not labels: a trained position must hold the token itself, any other -100": (
                not group.has_labels
            ),
        }
        for fault, is_there in faults.items():
            if is_there and (name, fault) not in self._warned:
                self._warned.add((name, fault))
                _event(logging.WARNING, "questionable group", environment=name, why=fault)


def _steady_clock() -> Callable[[], float]:
    """Unix time of now, continued by the monotonic clock.

    Where the clock of the machine is set back by an hour, no evaluation would be over for as long, and no environment
    that was killed would lapse.
    """
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()


class _Names(Mapping[int, str]):
    """Names of environments by their id."""

    def __init__(self, records: Mapping[int, EnvironmentRecord]) -> None:
        self._records = records

    def __getitem__(self, env_id: int) -> str:
        return self._records[env_id].name

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._records))

    def __len__(self) -> int:
        return len(self._records)


def _sender_name(env_id: int | None, names: Mapping[int, str]) -> str:
    return names.get(env_id, "unknown") if env_id is not None else "none"


def _event(level: int, event: str, **fields: object) -> None:
    """Log one event with its fields; `main` sets the format of a line."""
    if log.isEnabledFor(level):
        log.log(level, event, extra={"fields": fields})
