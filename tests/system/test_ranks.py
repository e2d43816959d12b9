"""Ranks of a trainer under a supervisor: which one hangs, where, and which one ended the others."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import hanging_ranks
import pytest
from rank_training import make_model
from workplace import UP, Workplace, until

from grpo_engine.wire.supervisor import ServiceState, ServiceStatus


@pytest.mark.extended("tests/engine/train/test_rank_watch.py")
@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_place_within_the_limit_and_in_why_the_service_ended(
    place: Workplace, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model")
    (place.folder / hanging_ranks.GO_ON).touch()
    argv = json.dumps([sys.executable, hanging_ranks.__file__, str(place.folder), str(model)])
    paths = json.dumps(os.pathsep.join(sys.path))
    place.up(f'[services.a]\nkind = "command"\nargv = {argv}\nenv = {{ PYTHONPATH = {paths} }}\nready = {UP}\n')

    def stalled() -> ServiceStatus:
        until(lambda: place.service().rank_stall is not None)
        return place.service()

    def goes_on() -> bool:
        return place.service().rank_stall is None

    until(lambda: all(rank.rss_bytes for rank in place.service().ranks) and len(place.service().ranks) == 2)
    ranks = place.service().ranks
    assert [rank.rank for rank in ranks] == [0, 1]

    (place.folder / hanging_ranks.HANG).touch()
    service = stalled()
    assert service.rank_stall is not None
    assert service.rank_stall.ranks == [1]
    assert re.match(r"rank 1 is in the loss of micro-batch [12] of 2, step \d+; ", service.rank_stall.text)
    assert "; rank 0 waits for it in the " in service.rank_stall.text
    [warning] = [each for each in place.status().warnings if each.id == "rank-stalled:a"]
    assert service.rank_stall.text in warning.text
    until(lambda: "in hang_in_loss" in Path(service.log).read_text())  # the stack of rank 1, not mixed with rank 0's
    (place.folder / hanging_ranks.HANG).unlink()
    until(goes_on)
    waits_s = map(float, (place.folder / hanging_ranks.WAITS).read_text().split())
    assert max(waits_s) > hanging_ranks.STALL_S

    os.kill(ranks[1].pid, signal.SIGSTOP)
    service = stalled()
    assert service.rank_stall is not None
    assert service.rank_stall.text.startswith(
        f"rank 1 (stopped by a signal; SIGCONT to process {ranks[1].pid} continues it) is in "
    )
    place.until_state(ServiceState.FAILED)
    why = place.service().why or ""
    assert f"exit code 1: rank 0 (process {ranks[0].pid}) exited with code 1 after no progress for " in why
    assert ": rank 1 (stopped by a signal" in why
