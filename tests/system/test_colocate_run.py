"""The profile tiny-colocate to its end, with one rank and with two: one service that learns."""

from __future__ import annotations

import pytest
from workplace import Workplace

from grpo_engine.wire.metrics import MetricsLine

LEARNED = 0.85
"""As tiny-cpu; it begins at 0.64."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.extended("test_colocate and test_colocate_profile in tests/engine and tests/tui")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_trainer_that_samples_itself_learns_under_a_supervisor(place: Workplace, processes: int) -> None:
    ranks = f"services.trainer.processes={processes}"
    place.succeed("up", "--profile", "tiny-colocate", "--set", ranks, "--wait", "finished", limit_s=360)
    lines = [
        MetricsLine.model_validate_json(line)
        for line in (place.run_folder() / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[0].metrics["eval/avg@4"] < 0.7
    assert lines[-1].metrics["eval/avg@4"] > LEARNED
    assert {line.metrics["rollout/staleness_max"] for line in lines[1:]} == {0}
