"""The rollout API against a model of it: whatever clients do in whatever order, no group is lost, repeated or stuck.

Hypothesis chooses groups of every size, environments with and without shares, batch sizes, trainers of both kinds,
registrations, resets and kills; the real application answers, over its real store in a file. The model knows which
groups are waiting and which are lent, and after each step:

- accepted = handed over + lent + waiting + dropped by a new run or a reset, in sequences as well as in groups;
- a batch has exactly `batch_size` sequences, of the oldest groups that make one, none of which was handed over;
- a lease that comes again is the one it was; there is no "nothing yet" while groups that surely wait make a batch;
- no answer is 5xx, but for 503 where the queue is full.

A kill is a copy of the files as they are: what a process that ends at that moment leaves behind.

`ROLLOUT_EXAMPLES=2000` makes the long version.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_fakes import ENVIRONMENT, REGISTRATION, group, rollout_app, tags

from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.state.batch_forming import QueuedGroup, form_batch

MAX_QUEUED = 120
NUM_EXAMPLES = int(os.environ.get("ROLLOUT_EXAMPLES", "25"))
STOCK_TRAINER = {"User-Agent": "stock trainer"}
SIZES = st.sampled_from([1, 1, 2, 2, 3, 4, 5, 7, 9])
SHARES = st.sampled_from([None, None, 0.0, 0.25, 0.5])


@dataclass
class Sent:
    """A group that was accepted; its tag says when."""

    size: int
    env_id: int | None
    is_surely_queued: bool
    """Not held in a buffer until others fill up a group size."""


@dataclass
class Environment:
    group_size: int
    share: float | None


class AnyClients(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(dir=_fast_folder()))
        self.num_lives = 0
        self.next_tag = 10
        self.sent: dict[int, Sent] = {}
        self.waiting: set[int] = set()
        self.lent: dict[str, list[int]] = {}
        """Tags of each batch that was not acknowledged, by lease."""
        self.perhaps_dissolved: set[str] = set()
        """Which of them have another size than batches now, so that their groups may be back in the queue."""
        self.perhaps_had: set[str] = set()
        """Which of them a stock trainer got before a kill."""
        self.last_lease: str | None = None
        self.stock_lease: str | None = None
        """Which of them a stock trainer would acknowledge by asking again."""
        self.handed_over: set[int] = set()
        self.dropped: set[int] = set()
        self.environments: dict[int, Environment] = {}
        self.batch_size: int | None = None
        self.run = 0
        self.step = 0
        """Batches of this run, each once."""
        self.start(self.folder / "0.sqlite")

    # --- the service -----------------------------------------------------------------------------------------------

    def start(self, store: Path) -> None:
        self.store = store
        no_limit = {"liveness_s": 3600, "lease_s": 3600, "share_wait_s": 3600}
        config = ApiConfig(store=store, max_queued_sequences=MAX_QUEUED, hold_s=0, **no_limit)
        self.application = contextlib.ExitStack()
        app = self.application.enter_context(rollout_app(config))
        self.life = app.router.lifespan_context(app)
        self.loop.run_until_complete(self.life.__aenter__())
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")

    def stop(self) -> None:
        self.loop.run_until_complete(self.http.aclose())
        self.loop.run_until_complete(self.life.__aexit__(None, None, None))
        self.application.close()

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        answer = self.loop.run_until_complete(self.http.request(method, path, **more))
        assert answer.status_code < 500 or answer.status_code == 503, answer.text
        return answer

    def teardown(self) -> None:
        try:
            self.empty_the_queue()
        finally:
            self.stop()
            self.loop.close()
            shutil.rmtree(self.folder)

    def empty_the_queue(self) -> None:
        """At the end every accepted group is delivered, the last ones as one batch."""
        for env_id in self.environments:
            self.ask("POST", "/disconnect-env", json={"env_id": env_id})
            self.environments[env_id].share = None
        for tag in self.waiting:
            self.sent[tag].is_surely_queued = True  # a buffer is emptied once its environment is gone
        self.register(self.batch_size or 4)
        self.fetch_all()
        queued = {tag for tag in self.waiting if self.sent[tag].is_surely_queued}
        if queued:
            self.register(sum(self.sent[tag].size for tag in queued))
            self.fetch_all()
        assert not queued & self.waiting
        assert self.lent.keys() <= self.perhaps_had

    def fetch_all(self) -> None:
        while self.fetch_by_lease() is not None:
            pass

    # --- trainers --------------------------------------------------------------------------------------------------

    @initialize(
        size=st.integers(1, 12),
        environments=st.lists(st.tuples(st.integers(1, 5), SHARES), max_size=2),
        is_early=st.integers(0, 4),
    )
    def begin(self, size: int, environments: list[tuple[int, float | None]], is_early: int) -> None:
        """A run with its environments, or now and then nothing yet."""
        if is_early:
            self.register(size)
            self.fetch(is_acknowledged=False)
            for group_size, share in environments:
                self.join(group_size, share)

    @rule(size=st.integers(1, 12))
    def register(self, size: int) -> None:
        """The same run goes on, perhaps with another batch size; what was lent is offered again."""
        body = {**REGISTRATION, "checkpoint_dir": f"run {self.run}", "batch_size": size, "num_steps": 0}
        assert self.ask("POST", "/register", json=body).status_code == 200
        self.batch_size = size
        self.stock_lease = None

    @precondition(lambda self: self.batch_size is not None and self.next_tag % 7 == 0)
    @rule(size=st.integers(1, 12))
    def register_another_run(self, size: int) -> None:
        """Drops what the previous run left."""
        self.run += 1
        self.register(size)
        self.drop_all()

    @precondition(lambda self: self.next_tag % 7 == 1)
    @rule()
    def reset(self) -> None:
        assert self.ask("GET", "/reset_data", params={"force": "true"}).text == "Reset successful"
        self.drop_all()
        self.environments = {}
        self.batch_size = None

    def drop_all(self) -> None:
        self.step = 0
        self.dropped |= self.waiting | {tag for batch in self.lent.values() for tag in batch}
        self.waiting, self.lent, self.stock_lease = set(), {}, None
        self.perhaps_dissolved, self.perhaps_had = set(), set()

    @precondition(lambda self: self.batch_size is not None)
    @rule(is_acknowledged=st.booleans())
    def fetch(self, is_acknowledged: bool) -> None:
        self.fetch_by_lease(acknowledge=is_acknowledged)

    def fetch_by_lease(self, acknowledge: bool = True) -> list[int] | None:
        """As our trainer: the next request acknowledges the last batch, unless that was lost."""
        ack = self.last_lease if acknowledge and self.last_lease in self.surely_lent() else None
        answer = self.ask("GET", "/batch", params={"ack": ack or ""})
        if ack:
            self.acknowledge(ack)
        return self.take(answer)

    @precondition(lambda self: self.batch_size is not None)
    @rule()
    def fetch_as_stock_trainers_do(self) -> None:
        answer = self.ask("GET", "/batch", headers=STOCK_TRAINER)
        if self.stock_lease in self.lent:
            self.acknowledge(self.stock_lease)
        self.take(answer)
        self.stock_lease = self.last_lease

    @precondition(lambda self: self.surely_lent())
    @rule(data=st.data())
    def acknowledge_a_batch(self, data: st.DataObject) -> None:
        """In any order, and twice."""
        lease = data.draw(st.sampled_from(self.surely_lent()))
        for _ in range(2):
            assert self.ask("POST", "/acknowledge", params={"lease": lease}).status_code == 200
        self.acknowledge(lease)

    @rule()
    def acknowledge_an_unknown_batch(self) -> None:
        assert self.ask("POST", "/acknowledge", params={"lease": "none"}).status_code == 200

    def surely_lent(self) -> list[str]:
        """In order of delivery: their names are random, and Hypothesis has to draw the same one again."""
        return [lease for lease in self.lent if lease not in self.perhaps_dissolved]

    def acknowledge(self, lease: str | None) -> None:
        assert lease is not None
        self.handed_over |= set(self.lent.pop(lease))
        self.perhaps_dissolved.discard(lease)

    def take(self, answer: httpx.Response) -> list[int] | None:
        """Note a batch, and check that it is one."""
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body.get("status") != "error"
        self.perhaps_dissolved |= {lease for lease in self.lent if self.size(self.lent[lease]) != self.batch_size}
        self.last_lease = None
        if body.get("lease") not in self.lent:  # whatever had to be offered again would have come first
            for other in self.perhaps_dissolved:
                self.waiting |= set(self.lent.pop(other))
            self.perhaps_dissolved = set()
        if body["batch"] is None:
            assert not self.surely_makes_a_batch()
            return None
        batch, lease = tags(body["batch"]), body["lease"]
        assert self.size(batch) == self.batch_size
        assert batch == sorted(set(batch)), "in order of arrival, each once"
        assert not set(batch) & (self.handed_over | self.dropped)
        if lease in self.lent:
            assert batch == self.lent[lease], "a lease that comes again is what it was"
        else:
            assert set(batch) <= self.waiting
            self.assert_shares_are_kept(batch)
            assert self.oldest_batch() in (None, batch)
            self.waiting -= set(batch)
            self.lent[lease] = batch
            self.step += 1
        self.perhaps_dissolved.discard(lease)
        self.last_lease = lease
        return batch

    def size(self, several: Iterable[int]) -> int:
        return sum(self.sent[tag].size for tag in several)

    def oldest_batch(self) -> list[int] | None:
        """What must come next, as `test_rollouts_forming.py` knows it; None where that is not sure."""
        if self.perhaps_dissolved or any(environment.share for environment in self.environments.values()):
            return None
        if not all(self.sent[tag].is_surely_queued for tag in self.waiting):
            return None
        queue = [QueuedGroup(id=tag, env_id=None, num_sequences=self.sent[tag].size) for tag in sorted(self.waiting)]
        batch = form_batch(queue, self.batch_size or 0)
        return [each.id for each in batch] if batch else []

    def surely_makes_a_batch(self) -> bool:
        """Whether groups that are in no buffer add up, by trying all sums; not known where there are shares."""
        if any(environment.share for environment in self.environments.values()):
            return False
        sums = {0}
        for tag in self.waiting:
            if self.sent[tag].is_surely_queued:
                sums |= {total + self.sent[tag].size for total in sums}
        return self.batch_size in sums

    def assert_shares_are_kept(self, batch: list[int]) -> None:
        assert self.batch_size is not None
        total = max(1.0, sum(environment.share or 0 for environment in self.environments.values()))
        for env_id, environment in self.environments.items():
            given = sum(self.sent[tag].size for tag in batch if self.sent[tag].env_id == env_id)
            assert given >= int(self.batch_size * (environment.share or 0) / total)

    # --- environments ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.batch_size is not None and len(self.environments) < 3)
    @rule(group_size=st.integers(1, 5), share=SHARES)
    def join(self, group_size: int, share: float | None) -> None:
        """Under a name of its own: after 3 s of silence an environment is replaced by another of its name."""
        name = f"environment {len(self.environments)}"
        body = {**ENVIRONMENT, "desired_name": name, "group_size": group_size, "min_batch_allocation": share}
        answer = self.ask("POST", "/register-env", json=body).json()
        if answer["status"] == "success":
            assert answer["env_id"] == len(self.environments)
            self.environments[answer["env_id"]] = Environment(group_size, share)

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=4), data=st.data())
    def post(self, sizes: list[int], data: st.DataObject) -> None:
        env_id = data.draw(st.sampled_from([None, 77, *self.environments, *self.environments]))
        if len(sizes) == 1:
            self.post_one(sizes[0], env_id)
        else:
            self.post_list(sizes, env_id)

    def post_one(self, size: int, env_id: int | None) -> None:
        (made,) = self.made([size], env_id)
        answer = self.ask("POST", "/scored_data", json=made)
        if self.is_refused_as_full(answer):
            return
        assert answer.status_code == 200
        self.accept([size], env_id, num_held=answer.json().get("buffer_size"))

    def post_list(self, sizes: list[int], env_id: int | None) -> None:
        answer = self.ask("POST", "/scored_data_list", json=self.made(sizes, env_id))
        if self.is_refused_as_full(answer):
            return
        assert answer.json()["groups_processed"] == len(sizes)
        self.accept(sizes, env_id, num_held=answer.json().get("last_buffer_size"))

    @rule(size=st.integers(1, 9), is_killed_between=st.booleans())
    def post_twice_under_one_name(self, size: int, is_killed_between: bool) -> None:
        """As our environments do where an answer was lost."""
        (made,) = self.made([size], None)
        named = {"Idempotency-Key": f"machine:{self.next_tag}"}
        if self.is_refused_as_full(self.ask("POST", "/scored_data", json=made, headers=named)):
            return
        self.accept([size], None, num_held=None)
        if is_killed_between:
            self.kill()
        assert self.ask("POST", "/scored_data", json=made, headers=named).status_code == 200

    def made(self, sizes: list[int], env_id: int | None) -> list[dict[str, Any]]:
        return [group(size, tag=self.next_tag + index, env_id=env_id) for index, size in enumerate(sizes)]

    def accept(self, sizes: list[int], env_id: int | None, num_held: int | None) -> None:
        environment = self.environments.get(env_id) if env_id is not None else None
        for size in sizes:
            is_whole = environment is None or size >= environment.group_size
            self.sent[self.next_tag] = Sent(size, env_id, is_whole)
            self.waiting.add(self.next_tag)
            self.next_tag += 1
        if num_held == 0:  # the buffer of this environment was emptied
            for tag in self.waiting:
                if self.sent[tag].env_id == env_id:
                    self.sent[tag].is_surely_queued = True

    def is_refused_as_full(self, answer: httpx.Response) -> bool:
        if answer.status_code != 503:
            return False
        assert self.size(self.waiting) + self.size_perhaps_waiting() >= MAX_QUEUED, "there is room"
        return True

    @precondition(lambda self: self.environments)
    @rule(data=st.data())
    def ask_for_the_status(self, data: st.DataObject) -> None:
        env_id = data.draw(st.sampled_from(sorted(self.environments)))
        status = self.ask("GET", "/status-env", json={"env_id": env_id}).json()
        assert status["max_group_size"] >= 1
        assert 0 <= status["unallocated_fraction"] <= 1
        assert 0.01 <= status["env_weight"] <= 1

    # --- kills -------------------------------------------------------------------------------------------------

    @rule()
    def kill(self) -> None:
        """Between two requests: the next API starts with the files as they are."""
        self.num_lives += 1
        left = self.folder / f"{self.num_lives}.sqlite"
        for suffix in ("", "-wal"):
            if Path(f"{self.store}{suffix}").exists():
                shutil.copy(f"{self.store}{suffix}", f"{left}{suffix}")
        self.stop()
        self.start(left)
        if self.stock_lease in self.lent:
            self.perhaps_had.add(self.stock_lease)
        self.stock_lease = None

    @invariant()
    def every_accepted_group_is_accounted_for(self) -> None:
        lent = {tag for batch in self.lent.values() for tag in batch}
        assert self.waiting | self.handed_over | self.dropped | lent == self.sent.keys()
        lines = [line for line in self.ask("GET", "/metrics").text.splitlines() if line[0] != "#"]
        figures = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
        assert figures["grpo_api_step"] == self.step
        beyond = figures["grpo_api_queued_sequences"] - self.size(self.waiting)
        assert 0 <= beyond <= self.size_perhaps_waiting()

    def size_perhaps_waiting(self) -> int:
        return sum(self.size(self.lent[lease]) for lease in self.perhaps_dissolved)


def _fast_folder() -> str | None:
    """In memory where there is such a folder: syncs cost nothing there."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


TestAnyClients = pytest.mark.slow(AnyClients.TestCase)
TestAnyClients.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
