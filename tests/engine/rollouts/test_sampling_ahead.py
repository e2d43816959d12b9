"""How many batches environments sample ahead: tables of deliveries, and a trainer beside servers on paper."""

from __future__ import annotations

import heapq
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.rollouts.state.api_state import ApiState
from grpo_engine.rollouts.state.records import Stored
from grpo_engine.rollouts.state.sampling_ahead import REST, Delivered, SamplingAhead
from grpo_engine.wire.rollouts import RegisterEnvironmentRequest, RegisterRequest, SamplingLimit


def delivered(
    waited_s: float = 0.0, *, interval_s: float = 1.0, num_left: int = 0, limit: SamplingLimit | None = None
) -> Delivered:
    return Delivered(interval_s=interval_s, waited_s=waited_s, size=1.0, num_left=num_left, limit=limit)


def after(*runs: tuple[int, Delivered]) -> SamplingAhead:
    """The controller after so many equal deliveries each."""
    ahead = SamplingAhead()
    for count, each in runs:
        for _ in range(count):
            ahead.delivered(each)
    return ahead


@pytest.mark.parametrize(
    ("runs", "batches", "why"),
    [
        ([(100, delivered())], 3, "start"),
        ([(100, delivered(0.04))], 3, "start"),
        ([(6, delivered(0.1))], 3, "start"),
        ([(7, delivered(0.1))], 4, "the trainer waited for groups 10 % of the time"),
        ([(7, delivered(0.5))], 5, "the trainer waited for groups 50 % of the time"),
        ([(50, delivered(0.5, limit=SamplingLimit.SERVERS))], 3, "start"),
        ([(50, delivered(0.5, limit=SamplingLimit.WORKERS))], 3, "start"),
        ([(50, delivered(0.5, limit=SamplingLimit.UNKNOWN))], 3, "start"),
        ([(100, delivered(num_left=1)), (100, delivered(0.1, limit=SamplingLimit.UNKNOWN))], 3, "waited for groups"),
        # What was raised stays where it helps, also in part, and goes back where it does not.
        ([(7, delivered(0.1)), (100, delivered())], 4, "the trainer waited for groups 10 % of the time"),
        ([(7, delivered(0.2)), (12, delivered(0.1, interval_s=0.9))], 4, "20 % of the time"),
        ([(7, delivered(0.2)), (12, delivered(0.2))], 3, "4 batches ahead changed throughput by +0 %"),
        ([(7, delivered(0.2)), (12 + REST - 1, delivered(0.2))], 3, "changed throughput by +0 %"),
        # A batch that is always left over is given up, one at a time.
        ([(8, delivered(num_left=1))], 3, "start"),
        ([(9, delivered(num_left=1))], 2, "a whole batch was left in the queue 8 times in a row"),
        ([(9, delivered(num_left=1)), (1 + 10, delivered(num_left=1))], 1, "left in the queue"),
        ([(200, delivered(num_left=1))], 1, "left in the queue"),
        ([(8, delivered(num_left=1)), (20, delivered())], 3, "start"),
        # Below the start value it rises without a trial.
        ([(50, delivered(num_left=1)), (8, delivered(0.1))], 2, "waited for groups 5 %"),
        # The first delivery, and as many as were on the way before a change, do not count.
        ([(1, delivered(100.0, interval_s=100.0)), (50, delivered())], 3, "start"),
    ],
)
def test_deliveries_decide_how_many_batches_are_sampled_ahead(
    runs: list[tuple[int, Delivered]], batches: int, why: str
) -> None:
    ahead = after(*runs)
    assert (ahead.batches, why in ahead.why) == (batches, True), ahead.why


def test_trials_without_a_gain_become_rare_and_end_where_they_began() -> None:
    ahead, numbers = SamplingAhead(), []
    for _ in range(600):
        ahead.delivered(delivered(0.2))
        numbers.append(ahead.batches)
    raises = [index for index, (one, other) in enumerate(pairwise(numbers)) if other > one]
    assert set(numbers) == {3, 4}
    assert [second - first for first, second in pairwise(raises)] == [28, 44, 76, 140, 140, 140]


def test_an_evaluation_does_not_count_as_waiting() -> None:
    ahead = after((6, delivered(0.1)))
    ahead.interrupted()
    for _ in range(8):
        ahead.delivered(delivered(0.1))
    assert ahead.batches == 3
    ahead.delivered(delivered(0.1))
    assert ahead.batches == 4


class Plant:
    """A trainer that takes batches of one group, and servers at which a group takes time and slows the others down."""

    def __init__(self, *, train_s: float, sample_s: float, capacity: int, noise: float, seed: int) -> None:
        self.train_s, self.sample_s, self.capacity = train_s, sample_s, capacity
        self._random, self._noise = Random(seed), noise

    def run(
        self, ahead: SamplingAhead, num_steps: int, limit: SamplingLimit | None = None
    ) -> list[tuple[int, float, float]]:
        """The number ahead, the wait and the duration of each step.

        At most `capacity` groups are sampled at a time; the others wait for a place.
        """
        at, places, ready = 0.0, [0.0] * self.capacity, list[float]()
        steps = []
        for _ in range(num_steps):
            while len(ready) < ahead.batches:
                ends = max(at, heapq.heappop(places)) + self.sample_s * (1 + self._noise * self._random.uniform(-1, 1))
                heapq.heappush(places, ends)
                heapq.heappush(ready, ends)
            asked, last = at + self.train_s, at
            at = max(asked, heapq.heappop(ready))
            num_left = sum(each <= at for each in ready)
            ahead.delivered(
                Delivered(interval_s=at - last, waited_s=at - asked, size=1.0, num_left=num_left, limit=limit)
            )
            steps.append((ahead.batches, at - asked, at - last))
        return steps


@settings(max_examples=60, deadline=None)
@given(
    train_s=st.floats(0.2, 5.0),
    sample_s=st.floats(0.2, 20.0),
    capacity=st.integers(1, 20),
    noise=st.sampled_from((0.0, 0.05, 0.3)),
    seed=st.integers(0, 1000),
)
def test_it_stays_within_bounds_changes_rarely_and_keeps_up_for_any_speeds(
    train_s: float, sample_s: float, capacity: int, noise: float, seed: int
) -> None:
    ahead = SamplingAhead()
    steps = Plant(train_s=train_s, sample_s=sample_s, capacity=capacity, noise=noise, seed=seed).run(ahead, 600)
    numbers = [number for number, _, _ in steps]
    assert all(1 <= number <= 8 for number in numbers)
    assert all(abs(after - before) <= 2 for before, after in pairwise(numbers))
    late = numbers[300:]
    assert sum(one != other for one, other in pairwise(late)) <= 30
    needed = sample_s * (1 + noise) / train_s
    if capacity >= 8 and needed <= 6:  # servers could keep up: so they do, and nothing more is sampled
        assert sum(waited for _, waited, _ in steps[300:]) <= 0.08 * sum(spent for _, _, spent in steps[300:])
        assert min(late) <= needed + 3


@pytest.mark.parametrize(
    ("train_s", "sample_s", "capacity", "batches"),
    [
        (1.0, 0.5, 20, 1),  # sampled in half a step: one batch ahead is there in time
        (1.0, 2.5, 20, 3),
        (1.0, 5.5, 20, 6),
        (1.0, 20.0, 20, 8),  # as far as it may go: all are sampled at a time
        (1.0, 20.0, 3, 3),  # servers that take three at a time: more would only wait there
    ],
)
def test_without_noise_it_settles_at_what_the_trainer_needs(
    train_s: float, sample_s: float, capacity: int, batches: int
) -> None:
    ahead = SamplingAhead()
    steps = Plant(train_s=train_s, sample_s=sample_s, capacity=capacity, noise=0.0, seed=0).run(ahead, 400)
    numbers = [number for number, _, _ in steps[200:]]
    assert max(set(numbers), key=numbers.count) == batches


@pytest.mark.parametrize("seed", range(3))
def test_the_number_does_not_drift_up_at_full_servers_that_do_not_say_so(seed: int) -> None:
    ahead = SamplingAhead()
    plant = Plant(train_s=1.0, sample_s=8.0, capacity=2, noise=0.9, seed=seed)
    assert max(number for number, _, _ in plant.run(ahead, 2000, SamplingLimit.UNKNOWN)) == 3


# --- in the state of the rollout API --------------------------------------------------------------------------------


def state_with_environments(num: int, **registration: object) -> ApiState:
    state = ApiState(
        Stored(run=None, environments=[], leases=[], groups=[], latest_body=None),
        lease_s=60,
        liveness_s=1e9,
        share_wait_s=60,
        now=0.0,
    )
    run = {
        "wandb_group": "",
        "wandb_project": "",
        "batch_size": 4,
        "max_token_len": 64,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 100,
    }
    state.register(RegisterRequest(**{**run, **registration}), 0)
    state.next_batch(client="t", ack="", lease_id="none", now=0.0)
    for number in range(num):
        state.register_environment(
            RegisterEnvironmentRequest(max_token_length=64, desired_name=f"e{number}", weight=1.0, group_size=4), 0.0
        )
    return state


def test_all_environments_that_follow_it_are_told_the_same_number_and_others_none() -> None:
    state = state_with_environments(3)
    state.report_limit(0, SamplingLimit.BATCHES_AHEAD)
    state.report_limit(1, SamplingLimit.WORKERS)
    now, lease = 0.0, ""
    for number in range(10):
        state.next_batch(client="t", ack=lease, lease_id="none", now=now)  # there is none: the trainer waits
        state.place(0, 4, 100, now + 1)
        handout = state.next_batch(client="t", ack=lease, lease_id=str(number), now=now + 1)
        assert handout.lease is not None
        lease, now = handout.lease.id, now + 2  # it trains for as long as it has waited
        assert handout.ahead is not None
    assert handout.ahead.batches == 5
    told = [state.environment_status(number, now) for number in range(3)]
    assert [each.ahead.batches if each is not None and each.ahead is not None else None for each in told] == [
        5,
        5,
        None,
    ]
    assert "trainer waited for groups 50 %" in handout.ahead.why


def test_with_a_staleness_bound_slots_decide_and_no_number_is_told() -> None:
    state = state_with_environments(1, max_staleness=1)
    state.report_limit(0, SamplingLimit.BATCHES_AHEAD)
    state.place(0, 4, 100, 1.0)
    assert state.next_batch(client="t", ack="", lease_id="1", now=2.0).ahead is None
    status = state.environment_status(0, 2.0)
    assert status is not None
    assert status.ahead is None


def test_servers_are_the_limit_where_they_are_for_every_environment() -> None:
    state = state_with_environments(2)
    limits = []
    for first, second in (
        ("servers", "unknown"),
        ("servers", "batches_ahead"),
        ("servers", "workers"),
        ("workers", "workers"),
    ):
        state.report_limit(0, SamplingLimit(first))
        state.report_limit(1, SamplingLimit(second))
        ahead = state.batches_ahead(0.0)
        assert ahead is not None
        limits.append(ahead.limit)
    assert limits == [SamplingLimit.UNKNOWN, SamplingLimit.BATCHES_AHEAD, SamplingLimit.SERVERS, SamplingLimit.WORKERS]
