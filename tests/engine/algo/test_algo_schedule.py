"""Learning rates step by step."""

from __future__ import annotations

import math

import pytest

from grpo_engine.algo.schedule import Schedule, learning_rate


def rates(schedule: Schedule, *, steps: int, **settings: int) -> list[float]:
    return [learning_rate(step, peak=1.0, schedule=schedule, **settings) for step in range(steps)]


def test_the_warm_up_rises_from_its_first_step_to_the_peak() -> None:
    assert rates("constant", steps=6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates("constant", steps=2) == [1.0, 1.0]


def test_a_line_falls_to_zero_one_step_after_the_last() -> None:
    assert rates("linear", steps=7, warmup_steps=2, total_steps=6) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_cosine_falls_by_half_a_wave() -> None:
    expected = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0, 0.0]
    assert rates("cosine", steps=6, total_steps=4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step": -1}, "step = -1"),
        ({"peak": -1.0}, "peak = -1.0"),
        ({"schedule": "linear"}, "needs more steps than its warm-up"),
        ({"schedule": "cosine", "warmup_steps": 5, "total_steps": 5}, "needs more steps than its warm-up"),
    ],
)
def test_an_invalid_schedule_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learning_rate(**({"step": 0, "peak": 1.0} | settings))  # type: ignore[arg-type]
