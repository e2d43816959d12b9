"""Batches are whole groups, exact, old before new; checked against trying every combination."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_engine.rollouts.state.batch_forming import (
    QueuedGroup,
    Supplier,
    form_batch,
    least_sequences,
    oldest_combination,
    why_unreachable,
)
from grpo_engine.rollouts.state.queue import Queue


def queue_of(*groups: tuple[int | None, int]) -> list[QueuedGroup]:
    return [QueuedGroup(id=i, env_id=env_id, num_sequences=size) for i, (env_id, size) in enumerate(groups)]


def every_batch(queue: list[QueuedGroup], batch_size: int, shares: dict[int, float]) -> list[tuple[QueuedGroup, ...]]:
    """All combinations that are a batch, found by trying each."""
    least = least_sequences(batch_size, shares)
    return [
        chosen
        for count in range(1, len(queue) + 1)
        for chosen in itertools.combinations(queue, count)
        if sum(g.num_sequences for g in chosen) == batch_size
        and all(sum(g.num_sequences for g in chosen if g.env_id == e) >= n for e, n in least.items())
    ]


queues = st.lists(st.tuples(st.sampled_from([None, 0, 1, 2]), st.integers(1, 9)), max_size=9).map(
    lambda groups: queue_of(*groups)
)


@given(queues, st.integers(1, 30), st.dictionaries(st.sampled_from([0, 1]), st.floats(0.0, 1.0), max_size=2))
def test_a_batch_is_found_exactly_when_one_exists_that_keeps_the_guaranteed_shares(
    queue: list[QueuedGroup], batch_size: int, shares: dict[int, float]
) -> None:
    batch = form_batch(queue, batch_size, shares)
    possible = every_batch(queue, batch_size, shares)
    assert (batch is not None) == bool(possible)
    if batch is not None:
        assert tuple(batch) in possible


@given(queues, st.integers(1, 30))
def test_a_batch_waits_for_no_newer_group_than_it_must(queue: list[QueuedGroup], batch_size: int) -> None:
    batch = form_batch(queue, batch_size)
    possible = every_batch(queue, batch_size, {})
    if batch is not None:
        newest = min(max(g.id for g in chosen) for chosen in possible)
        within = [[g.id for g in chosen] for chosen in possible if max(g.id for g in chosen) == newest]
        assert [g.id for g in batch] == min(within)


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(9, 40))
def test_small_groups_that_complete_one_are_those_of_a_batch_of_its_size(sizes: list[int], group_size: int) -> None:
    batch = form_batch(queue_of(*((None, size) for size in sizes)), group_size)
    assert oldest_combination(sizes, group_size) == (None if batch is None else [group.id for group in batch])


def test_old_groups_that_follow_a_long_queue_are_sorted_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted at each, one post of 1,024 groups held the rollout API for 29 s."""
    num_sorts = 0

    def counted(items: Iterable[Any]) -> list[Any]:
        nonlocal num_sorts
        num_sorts += 1
        return sorted(items)

    monkeypatch.setattr("grpo_engine.rollouts.state.queue.sorted", counted, raising=False)
    groups = queue_of(*[(None, 1)] * 200)
    queue = Queue(groups[100:])
    for old in groups[:100]:
        queue.add([old])
    assert list(queue) == groups
    assert num_sorts == 1


def test_a_batch_is_found_among_ten_thousand_groups_of_which_one_completes_it() -> None:
    queue = queue_of(*[(index % 2, 6) for index in range(9_999)], (0, 4))
    batch = form_batch(queue, 514, {0: 0.25, 1: 0.25})
    assert batch is not None
    assert sum(g.num_sequences for g in batch) == 514
    assert batch[-1].id == 9_999


def test_shares_above_one_in_sum_are_scaled_down() -> None:
    assert least_sequences(16, {0: 1.0, 1: 1.0}) == {0: 8, 1: 8}
    assert least_sequences(10, {0: 0.25, 1: 0.0}) == {0: 2}


def test_a_share_takes_newer_groups_of_its_environment() -> None:
    batch = form_batch(queue_of((0, 2), (0, 2), (0, 2), (1, 2)), 4, {1: 0.5})
    assert [g.id for g in batch or ()] == [0, 3]


def test_an_unreachable_batch_size_is_reported_with_its_nearest_sums() -> None:
    reason = why_unreachable({}, [Supplier(env_id=0, name="sums_0", group_size=4)], 10)
    assert reason == (
        "batch_size 10 can never be made of whole groups (sums_0 sends groups of 4): reachable sizes are 8 and 12"
    )


def test_a_group_that_waits_can_make_a_batch_size_reachable_once() -> None:
    supplier = Supplier(env_id=0, name="sums_0", group_size=4)
    assert why_unreachable({(9, 2): 1}, [supplier], 10) is None
    assert why_unreachable({(9, 3): 1}, [supplier], 10) is not None


def test_senders_without_an_id_may_send_more_of_what_they_sent() -> None:
    assert why_unreachable({(None, 2): 1}, [], 4) is None
    assert why_unreachable({(None, 2): 1}, [], 5) == (
        "batch_size 5 can never be made of whole groups (groups of 2 are queued): reachable sizes are 4 and 6"
    )
    assert why_unreachable({(9, 3): 1}, [], 4) is None


@pytest.mark.timeout(30)
def test_an_environment_with_groups_of_a_million_sequences_does_not_hold_the_search_for_reachable_sizes() -> None:
    suppliers = [Supplier(env_id=id_, name="a", group_size=size) for id_, size in enumerate((3, 8, 1_000_000))]
    assert why_unreachable({}, suppliers, 128, {0: 0.3, 1: 0.3}) is None
    assert "no size is reachable" in (why_unreachable({}, suppliers[2:], 128) or "")


@pytest.mark.parametrize("shares", [{}, {0: 0.5}])
def test_nothing_is_unreachable_before_the_first_group(shares: dict[int, float]) -> None:
    assert why_unreachable({}, [], 10, shares) is None


def test_shares_that_exclude_each_other_are_reported() -> None:
    suppliers = [Supplier(env_id=0, name="a_0", group_size=4), Supplier(env_id=1, name="b_0", group_size=6)]
    reason = why_unreachable({}, suppliers, 8, {0: 0.5, 1: 0.5})
    assert reason is not None
    assert "guaranteed shares need at least 4, 4" in reason
    assert "reachable sizes are 10" in reason
