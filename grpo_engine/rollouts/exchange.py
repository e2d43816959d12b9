"""The rollout API without HTTP: the ledger's rules, written down before anybody hears of them, with waiting for room.

The event loop changes the ledger and asks for the write in the same breath, and the writer works in that order, so the
file always tells a state that the ledger was in. Answers go out after the write. Where that fails, the file is right:
the ledger goes back to what it says, and all who waited for a write are told to come again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.counters import Counters
from grpo_engine.rollouts.entry import CheckedGroup, Refusal
from grpo_engine.rollouts.evaluations import fault_of
from grpo_engine.rollouts.ledger import Handout, Ledger, Placed, Registered
from grpo_engine.rollouts.records import EnvironmentRecord, Lease
from grpo_engine.rollouts.store import Store, Stored
from grpo_engine.rollouts.waiting import Waiting
from grpo_engine.rollouts.writer import NotWritten, Writer
from grpo_engine.wire.rollouts import (
    EnvironmentStatus,
    EvaluationAnswer,
    EvaluationOrder,
    EvaluationState,
    RegisterEnvironmentRequest,
    RegisterRequest,
)

log = logging.getLogger("grpo_engine.rollouts")

ResultT = TypeVar("ResultT")

MAX_HELD_POSTS = 256
MAX_HELD_BYTES = 1024**3
"""Posts that may wait for room at the same time, and what they hold in memory together."""

_LOOK_EVERY_S = 0.25
"""Between two looks at what time alone may have changed, while somebody waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A batch on its way out."""

    lease: Lease
    bodies: list[bytes]
    environments: dict[int, str]
    """Names that stay the same after a restart, by the ids that its groups have."""
    is_repeated: bool


class Exchange:
    """One rollout API's state and what can be done with it. Made inside a running event loop."""

    def __init__(self, config: ApiConfig, store: Store, stored: Stored) -> None:
        self._config = config
        self._store = store
        self._writer = Writer(store, self._go_back)
        self.ledger = self._ledger_of(stored)
        self.counters = Counters()
        self.latest_body = stored.latest_body
        self._posts = stored.posts
        """Number of the last post of each sender."""
        self._sent: dict[object, Lease] = {}
        """The last batch that went out on each open connection."""
        self._is_reset: dict[object, Callable[[], bool]] = {}
        """Whether such a connection has been broken off, which may not have been told yet."""
        self._for_groups = Waiting()
        """Trainers that wait for a batch."""
        self._for_changes = Waiting()
        """All others: more groups are nothing to them, and need not wake them hundreds of times a second."""
        self._num_held = 0
        self._held_bytes = 0
        self._is_closing = False
        self._reported_problem: str | None = None
        self._warned: set[tuple[str, str]] = set()

    @property
    def environment_names(self) -> dict[int, str]:
        """Names by id, for messages."""
        return {record.id: record.name for record in self.ledger.environments.values()}

    # --- trainer ---------------------------------------------------------------------------------------------------

    async def register(self, request: RegisterRequest, uuid: int) -> Registered:
        """Begin or continue a run, under this number."""
        registered = self.ledger.register(request, uuid)
        run = self.ledger.run
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
        self._tell()
        return registered

    async def next_batch(
        self, *, client: str, ack: str | None, wait_s: float = 0.0, policy_version: int | None = None
    ) -> Delivery | None:
        """The next batch, or None when there is none within `wait_s`; a trainer must be registered."""
        assert self.ledger.run is not None
        uuid, loop = self.ledger.run.uuid, asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            ledger, num_chances = self.ledger, self.ledger.num_chances
            delivery = await self._hand_out(client=client, ack=ack, policy_version=policy_version)
            if delivery is not None or loop.time() >= deadline:
                return delivery
            await self._comes_true(partial(self._has_chance_since, ledger, num_chances), deadline, self._for_groups)
            # At the deadline it looks once more: a share may have lapsed, which is no event.
            if self._is_closing or self.ledger is not ledger or ledger.run is None or ledger.run.uuid != uuid:
                return None

    async def _hand_out(self, *, client: str, ack: str | None, policy_version: int | None) -> Delivery | None:
        was_stuck = self.ledger.is_stuck
        if ack is None:
            self._look_for_broken(client)
        handout = self.ledger.next_batch(
            client=client, ack=ack, lease_id=secrets.token_hex(8), now=time.time(), policy_version=policy_version
        )
        senders = self.ledger.senders(handout.lease) if handout.lease else []
        records = {id_: self.ledger.environments[id_] for id_ in senders if id_ in self.ledger.environments}
        bodies = await self._write_handout(handout) if handout.changed_anything else []
        if handout.unmet:
            _event(logging.WARNING, "batch formed without a guaranteed share", environments=", ".join(handout.unmet))
        if handout.dropped:
            self.counters.stale += len(handout.dropped)
            _event(logging.WARNING, "stale groups dropped", groups=len(handout.dropped))
        if handout.lease or handout.dropped or self.ledger.is_stuck != was_stuck:
            self._tell()
        if handout.lease is None:
            return None
        run = self.ledger.run
        self.counters.batches_repeated += handout.is_repeated
        self.counters.batches += not handout.is_repeated
        _event(
            logging.WARNING if handout.is_repeated else logging.INFO,
            "batch offered again" if handout.is_repeated else "batch delivered",
            step=run.step if run else None,
            groups=len(bodies),
            sequences=handout.lease.num_sequences,
            environments=Counter(_sender_name(id_, self.environment_names) for id_ in senders),
            groups_waiting=len(self.ledger.queue),
            client=client,
        )
        return Delivery(
            lease=handout.lease,
            bodies=bodies,
            environments={id_: record.desired_name for id_, record in records.items()},
            is_repeated=handout.is_repeated,
        )

    async def acknowledge(self, lease_id: str) -> None:
        """Forget a batch that arrived, without asking for another."""
        acknowledged = self.ledger.acknowledge(lease_id)
        if acknowledged:
            await self._write_handout(Handout(lease=None, acknowledged=acknowledged))

    def sends(self, lease: Lease, connection: object) -> None:
        """Note on which connection a batch goes out, in the same breath as it does."""
        self._sent[connection] = lease
        self.ledger.note_sent(lease)

    def has_sent_batch(self, connection: object) -> bool:
        """Whether a batch went out on an open connection."""
        return connection in self._sent

    def can_look_at(self, connection: object, *, is_reset: Callable[[], bool]) -> None:
        """Be able to ask whether a connection on which a batch went out is broken before its end is told."""
        self._is_reset[connection] = is_reset

    def _look_for_broken(self, client: str) -> None:
        """Offer again what a client has not read, before its question is taken for a word that it has."""
        for connection, lease in list(self._sent.items()):
            if lease.client == client and connection in self._is_reset and self._is_reset[connection]():
                self._offer_again(lease)

    async def batch_arrived(self, connection: object) -> None:
        """Note that a batch is with its client's kernel: our own end would not keep the client from it any more."""
        await self._save(self.ledger.note_arrival(self._sent[connection]))

    def connection_ended(self, connection: object, *, was_read: bool | None) -> Coroutine[None, None, None]:
        """Forget a connection on which a batch went out. What follows is true at once, and written down when awaited.

        Args:
            was_read: whether the batch was read to its end, and so need not be offered again; None: nobody knows.
        """
        lease = self._sent.pop(connection)
        self._is_reset.pop(connection, None)
        if was_read:
            return self._save(self.ledger.note_arrival(lease))
        if was_read is None or time.time() - lease.delivered_at > self._config.lease_s:
            return self._save(None)
        return self.take_back(lease)

    def take_back(self, lease: Lease) -> Coroutine[None, None, None]:
        """Offer a batch again that its client cannot have read. True at once, and written down when awaited."""
        return self._save(self._offer_again(lease))

    def _offer_again(self, lease: Lease) -> Lease | None:
        taken_back = self.ledger.take_back(lease)
        if taken_back is not None:
            _event(logging.WARNING, "connection broke before a batch was read", client=lease.client)
            self._tell()
        return taken_back

    async def _save(self, lease: Lease | None) -> None:
        if lease is not None:
            with contextlib.suppress(Refusal):  # then it is offered again after a restart, at worst
                await self._write(lambda: self._store.save_lease(lease))

    # --- environments ----------------------------------------------------------------------------------------------

    async def register_environment(self, request: RegisterEnvironmentRequest) -> EnvironmentRecord | None:
        """Let an environment in, or None while the trainer has not asked for a batch."""
        before = dict(self.ledger.environments)
        record = self.ledger.register_environment(request, time.time())
        if record is not None:
            # With those whose place it takes: else they would be back, with their shares, after a restart.
            changed = [each for each in self.ledger.environments.values() if before.get(each.id) != each]
            await self._write(lambda: self._store.save_environments(*changed))
            _event(
                logging.INFO,
                "environment registered",
                environment=record.name,
                env_id=record.id,
                group_size=record.group_size,
            )
            self._tell()
        return record

    async def disconnect(self, env_id: int) -> EnvironmentRecord | None:
        """Note that an environment left."""
        record = self.ledger.disconnect(env_id)
        if record is not None:
            _event(logging.INFO, "environment left", environment=record.name)
            await self._write(lambda: self._store.save_environments(record))
            self._tell()
        return record

    async def environment_status(
        self, env_id: int, *, wait_s: float = 0.0, known: tuple[int, int, str | None] | None = None
    ) -> EnvironmentStatus | None:
        """What an environment steers by; None when there is none of that id.

        Args:
            wait_s: hold the answer for so long while there is no more to do than at what is `known`: current_step,
                queue_size (more groups are no news), and the id of the evaluation that it has yet to answer.
        """
        deadline = asyncio.get_running_loop().time() + wait_s

        def is_news() -> bool:
            status = self.ledger.environment_status(env_id, time.time(), is_heard=False)
            if status is None:
                return True
            evaluation = status.evaluation.id if status.evaluation else None
            if known is None or (status.current_step, evaluation) != (known[0], known[2]):
                return True
            return status.queue_size < known[1]

        status = self.ledger.environment_status(env_id, time.time())
        if wait_s <= 0 or is_news():
            return status
        await self._comes_true(is_news, deadline, self._for_changes)
        # Its environment may have left meanwhile, and must not come back to life by a question from before that.
        asker = self.ledger.environments.get(env_id)
        return self.ledger.environment_status(env_id, time.time(), is_heard=asker is not None and asker.is_connected)

    async def add(
        self,
        groups: Sequence[CheckedGroup],
        post: tuple[str, str] | None = None,
        is_sender_gone: Callable[[], Awaitable[bool]] | None = None,
    ) -> list[Placed]:
        """Queue or buffer groups, as soon as there is room; nothing where this very post was taken in before.

        Args:
            post: sender and number, where the post says so.
            is_sender_gone: whether nobody would hear any more that they were taken.

        Raises:
            Refusal: 503 when there was none for `hold_s`, or the disk refuses; 400 when the sender did not wait for it.
        """
        if not groups:
            return []
        if not self._is_known(post):
            await self._wait_for_room(groups, is_sender_gone)
        if self._is_known(post):  # perhaps only now: its sender gave the first up while that waited
            await self._write(lambda: None)  # what it said the first time may still be on its way to the disk
            return []
        now = time.time()
        placed = [
            self.ledger.place(g.env_id, g.num_sequences, len(g.body), now, policy_version=g.policy_version)
            for g in groups
        ]
        rows = [(p.group, p.place, g.body) for p, g in zip(placed, groups, strict=True)]
        released = [id_ for p in placed for id_ in p.released]
        if post is not None:
            self._posts[post[0]] = post[1]
        await self._write(lambda: self._store.add_groups(rows, released, post))
        self.latest_body = groups[-1].body
        self._for_groups.tell()
        names = self.environment_names
        for group in groups:
            name = _sender_name(group.env_id, names)
            self.counters.took_in(name, group.num_sequences, len(group.body))
            self._warn_about(group, name)
        return placed

    # --- evaluations -----------------------------------------------------------------------------------------------

    async def order_evaluation(self, order: EvaluationOrder) -> EvaluationState:
        """Have environments evaluate; a trainer must be registered."""
        is_new = self.ledger.evaluation is None or self.ledger.evaluation.order.id != order.id
        record = self.ledger.order_evaluation(order, time.time())
        if is_new:
            run = self.ledger.run
            await self._write(lambda: self._store.save_evaluation(record, run=run))
            _event(logging.INFO, "evaluation ordered", step=order.step, policy_version=order.policy_version)
            self._tell()
        return self._known_evaluation(order.id)

    async def evaluation_state(self, id_: str, *, wait_s: float = 0.0) -> EvaluationState:
        """Where an evaluation stands, as soon as it is over or `wait_s` are.

        Raises:
            Refusal: 404 when there is none of that id (any more).
        """
        deadline = asyncio.get_running_loop().time() + wait_s

        def is_over() -> bool:
            state = self.ledger.evaluation_state(id_, time.time())
            return state is None or state.is_over

        self.ledger.trainer_seen = time.time()
        loop = asyncio.get_running_loop()
        while not is_over() and not self._is_closing and loop.time() < deadline:
            # It can be over because time went by: a dead environment is waited for no more, no newcomer came.
            await self._comes_true(is_over, min(deadline, loop.time() + _LOOK_EVERY_S), self._for_changes)
        return self._known_evaluation(id_)

    async def answer_evaluation(self, id_: str, answer: EvaluationAnswer) -> None:
        """Take in what an environment measured.

        Raises:
            Refusal: 404 when nobody wants it (any more), 422 when it does not fit, 503 when the disk refuses.
        """
        record = self.ledger.evaluation
        if record is None or record.order.id != id_ or record.is_closed:
            raise Refusal(404, f"evaluation {id_} is not wanted here (any more)", "evaluation")
        environment = self.ledger.environments.get(answer.env_id)
        if environment is None:
            raise Refusal(404, f"environment {answer.env_id} is not registered here: POST /register-env", "unknown_id")
        fault = fault_of(answer, record.order)
        if fault is not None:
            raise Refusal(422, f"environment {answer.env_id} ({environment.name}): {fault}", "malformed")
        answered = self.ledger.answer_evaluation(answer, time.time())
        await self._write(lambda: self._store.save_evaluation(answered))
        _event(
            logging.INFO if answer.problem is None else logging.WARNING,
            "evaluation answered",
            step=record.order.step,
            environment=environment.name,
            prompts=len(answer.rewards),
            problem=answer.problem,
        )
        self._tell()

    async def close_evaluation(self, id_: str) -> None:
        """Let environments stop what they do for it; one that is not known is over anyway."""
        record = self.ledger.evaluation
        if record is None or record.order.id != id_ or record.is_closed:
            return
        closed = self.ledger.close_evaluation()
        await self._write(lambda: self._store.save_evaluation(closed))
        self._tell()

    def _known_evaluation(self, id_: str) -> EvaluationState:
        state = self.ledger.evaluation_state(id_, time.time())
        if state is None:
            raise Refusal(404, f"evaluation {id_} is not known here: POST /evaluations", "evaluation")
        return state

    # --- all of it -------------------------------------------------------------------------------------------------

    async def reset(self) -> None:
        """Forget everything, as at the first start."""
        self.ledger = self._ledger_of(Stored(run=None, environments=[], leases=[], groups=[], latest_body=None))
        self.latest_body = None
        self._posts = {}
        await self._write(self._store.clear)
        _event(logging.WARNING, "reset: everything is forgotten")
        self._tell()

    def problem(self) -> str | None:
        """Why no batch can ever form as things are; said in the log when it changes."""
        problem = self.ledger.why_no_batch(time.time())
        if problem != self._reported_problem and problem is not None:
            _event(logging.WARNING, "no batch can form", why=problem)
        self._reported_problem = problem
        return problem

    @property
    def num_held(self) -> int:
        """Posts that wait for room."""
        return self._num_held

    def close(self) -> None:
        """Turn away whoever waits, so that the server can end at once."""
        self._is_closing = True
        self._tell()

    @property
    def store_lost(self) -> str | None:
        """That somebody took the store away, in words."""
        return self._store.lost

    async def close_store(self) -> None:
        """Finish the writes and let go of the file."""
        await self._writer.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _write_handout(self, handout: Handout) -> list[bytes]:
        run = self.ledger.run
        assert run is not None
        return await self._write(
            lambda: self._store.hand_out(
                run,
                acknowledged=handout.acknowledged,
                returned=handout.returned,
                dropped=handout.dropped,
                lease=handout.lease,
            )
        )

    async def _write(self, action: Callable[[], ResultT]) -> ResultT:
        try:
            return await self._writer.write(action)
        except NotWritten as error:
            detail = f"it cannot be written down, and so is not taken: {error}: is the disk full? Send it again later"
            raise Refusal(503, detail, "store") from None

    def _ledger_of(self, stored: Stored) -> Ledger:
        config = self._config
        return Ledger(
            stored,
            lease_s=config.lease_s,
            liveness_s=config.liveness_s,
            share_wait_s=config.share_wait_s,
            max_staleness=config.max_staleness,
            now=time.time(),
        )

    def _go_back(self, stored: Stored, error: Exception) -> None:
        """Be where the file is, since what came after is not in it."""
        _event(logging.ERROR, "not written", error=str(error), store=str(self._config.store))
        before, self.ledger = self.ledger, self._ledger_of(stored)
        self.ledger.last_seen |= {id_: at for id_, at in before.last_seen.items() if id_ in self.ledger.environments}
        self.ledger.trainer_seen = before.trainer_seen
        self.latest_body, self._posts = stored.latest_body, stored.posts
        self._tell()

    async def _comes_true(self, condition: Callable[[], bool], deadline: float, waiting: Waiting) -> bool:
        """Wait until `condition` holds or this service ends; False when neither was so by `deadline`."""
        return await waiting.until(lambda: self._is_closing or condition(), deadline)

    def _has_chance_since(self, ledger: Ledger, num_chances: int) -> bool:
        return self.ledger is not ledger or self.ledger.num_chances != num_chances

    def _has_room(self, senders: set[int | None]) -> bool:
        config, ledger = self._config, self.ledger
        batch_size = ledger.run.request.batch_size if ledger.run else 0
        sequences = ledger.num_waiting_sequences()
        # However low the limits: less than two batches would let none ever form beside another's leftovers.
        if sequences < max(1, 2 * batch_size):
            return True
        if sequences < config.max_queued_sequences and ledger.num_waiting_bytes() < config.max_queued_bytes:
            return True
        # Nor would one form if those who could complete it were kept out by all the others.
        own = ledger.queue.sequences_by_environment
        are_known = senders <= {None, *ledger.environments}
        return ledger.is_stuck and are_known and all(own[id_] < batch_size for id_ in senders)

    async def _wait_for_room(
        self, groups: Sequence[CheckedGroup], is_sender_gone: Callable[[], Awaitable[bool]] | None
    ) -> None:
        has_room = partial(self._has_room, {group.env_id for group in groups})
        if has_room():
            return
        num_bytes = sum(len(group.body) for group in groups)
        is_too_much = self._num_held >= MAX_HELD_POSTS or self._held_bytes + num_bytes > MAX_HELD_BYTES
        if self._is_closing or (self._num_held and is_too_much):
            raise self._full()
        self._num_held += 1
        self._held_bytes += num_bytes
        self.counters.held += 1
        deadline = asyncio.get_running_loop().time() + self._config.hold_s
        try:
            while not has_room() or self._is_closing:
                if not await self._comes_true(has_room, deadline, self._for_changes) or self._is_closing:
                    raise self._full()
                if is_sender_gone is not None and await is_sender_gone():
                    raise Refusal(400, "the connection ended while this waited for room: send it again", "hung_up")
        finally:
            self._num_held -= 1
            self._held_bytes -= num_bytes

    def _is_known(self, post: tuple[str, str] | None) -> bool:
        return post is not None and self._posts.get(post[0]) == post[1]

    def _full(self) -> Refusal:
        waiting = self.ledger.num_waiting_sequences()
        return Refusal(503, f"{waiting} sequences wait for the trainer, and more have no room: send it later", "full")

    def _tell(self) -> None:
        self._for_groups.tell()
        self._for_changes.tell()

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


def _sender_name(env_id: int | None, names: Mapping[int, str]) -> str:
    return names.get(env_id, "unknown") if env_id is not None else "none"


def _event(level: int, event: str, **fields: object) -> None:
    """Log one event with its fields; `main` decides what a line looks like."""
    if log.isEnabledFor(level):
        log.log(level, event, extra={"fields": fields})
