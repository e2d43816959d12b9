"""The launcher of a trainer's ranks reads where each is, and names the one that the others wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_engine.ranks.positions import POSITIONS_FILE, OwnPosition, Position, PositionFile
from grpo_engine.ranks.watching import Stall, find_stall

NOW_S, LIMIT_S = 1000.0, 60.0


def position(work: int, point: int, *, for_s: float = 100.0, place: str = "the loss", **flags: bool) -> Position:
    return Position(pid=4242, work=work, point=point, since_s=NOW_S - for_s, place=place, **flags)


def waiting(work: int, point: int, for_s: float = 100.0) -> Position:
    return position(work, point, for_s=for_s, place="the all-reduce of metrics", is_waiting=True)


def stall(*positions: Position, stopped: tuple[int, ...] = ()) -> Stall | None:
    return find_stall(dict(enumerate(positions)), now_s=NOW_S, limit_s=LIMIT_S, stopped=stopped)


def test_the_rank_that_has_passed_the_fewest_points_is_named_with_its_place() -> None:
    found = stall(waiting(3, 9), position(3, 7, for_s=101), waiting(3, 9))
    assert found == Stall(
        ranks=(1,),
        since_s=NOW_S - 101,
        text="rank 1 is in the loss; ranks 0 and 2 wait for it in the all-reduce of metrics",
    )


def test_a_rank_that_did_not_take_the_announcement_is_behind_one_that_did() -> None:
    idle = position(3, 0, place="the wait for an announcement", is_idle=True)
    found = stall(waiting(4, 1), idle, stopped=(1,))
    assert found is not None
    assert found.text == (
        "rank 1 (stopped by a signal; SIGCONT to process 4242 continues it) is in the wait for an announcement; "
        "rank 0 waits for it in the all-reduce of metrics"
    )


def test_of_ranks_in_the_same_operation_the_stopped_one_is_named_and_else_none() -> None:
    together = (waiting(3, 9), waiting(3, 9))
    found = stall(*together, stopped=(0,))
    assert found is not None
    assert found.ranks == (0,)
    alone = stall(*together)
    assert alone is not None
    assert (alone.ranks, alone.text) == (
        (),
        "ranks 0 and 1 wait in the all-reduce of metrics, for a GPU, for the network, or for ranks of other machines",
    )


def test_a_stopped_rank_0_is_named_also_while_it_works_alone() -> None:
    alone = position(3, 0, place="work of rank 0 alone", is_idle=True)
    idle = position(3, 0, place="the wait for an announcement", is_idle=True)
    found = stall(alone, idle, stopped=(0,))
    assert found is not None
    assert (found.ranks, found.text) == (
        (0,),
        "rank 0 (stopped by a signal; SIGCONT to process 4242 continues it) is in work of rank 0 alone",
    )


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param((waiting(3, 9, for_s=59), position(3, 7)), id="the wait is short"),
        pytest.param((waiting(3, 9), position(3, 7, for_s=59)), id="the rank behind moves"),
        pytest.param((position(3, 9), position(3, 9)), id="both compute"),
        pytest.param((position(3, 0, is_idle=True), position(3, 0, is_idle=True)), id="rank 0 fetches a batch"),
        pytest.param((), id="no rank has begun"),
    ],
)
def test_nothing_is_named_while(positions: tuple[Position, ...]) -> None:
    assert stall(*positions) is None


def test_a_launcher_reads_the_place_of_a_rank_in_words_and_how_far_it_is(tmp_path: Path) -> None:
    file = PositionFile.make(tmp_path / "positions", num_ranks=2)
    own = OwnPosition.from_environment({POSITIONS_FILE: str(tmp_path / "positions")}, local_rank=1)
    own.begin("step 3")
    own.at("the backward pass of micro-batch 1 of 2", is_backward=True)
    before = file.read()[1]
    with own.waiting("the reduce-scatter of layer 18", then_backward="layer 17"):
        during = file.read()[1]
    after = file.read()[1]
    own.end("the wait for an announcement")
    idle = file.read()
    assert list(idle) == [1]  # rank 0 has written none
    assert before.progress < during.progress < after.progress < idle[1].progress
    assert (before.is_waiting, during.is_waiting, after.is_waiting) == (False, True, False)
    assert during.place == "the reduce-scatter of layer 18 in the backward pass of micro-batch 1 of 2, step 3"
    assert after.place == "layer 17 in the backward pass of micro-batch 1 of 2, step 3"


def test_a_slot_that_is_half_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "positions"
    file = PositionFile.make(path, num_ranks=1)
    file.write(0, position(1, 2))
    assert file.read()[0] == position(1, 2)
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    assert file.read() == {}
