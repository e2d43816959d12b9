"""What a server measures of its own speed."""

from __future__ import annotations

import pytest

from grpo_engine.server.speed_meter import SpeedMeter


def decode(meter: SpeedMeter, *, sequences: int, steps: int, from_s: float, step_s: float) -> float:
    """So many steps; when the last one has ended."""
    for step in range(1, steps + 1):
        meter.stepped(sequences, num_running=sequences, num_cached=100 * sequences, now=from_s + step * step_s)
    return from_s + steps * step_s


def test_steps_of_about_as_many_sequences_are_counted_together_and_few_are_left_out() -> None:
    meter = SpeedMeter()
    now = decode(meter, sequences=40, steps=21, from_s=0, step_s=0.01)
    now = decode(meter, sequences=50, steps=20, from_s=now, step_s=0.02)
    decode(meter, sequences=3, steps=5, from_s=now, step_s=0.01)
    (point,) = meter.speeds().points
    assert (point.sequences, point.num_steps) == (45, 40)
    assert point.tokens_per_s == pytest.approx(20 * 90 / 0.6)


def test_time_without_requests_is_no_step() -> None:
    meter = SpeedMeter()
    for second in range(20):
        meter.stepped(1, num_running=1, num_cached=1, now=second)
        meter.stepped(1, num_running=0, num_cached=0, now=second + 0.1)
    (point,) = meter.speeds().points
    assert point.tokens_per_s == pytest.approx(10)


def test_after_an_update_the_time_is_measured_until_nearly_all_have_tokens_again() -> None:
    meter = SpeedMeter()
    now = decode(meter, sequences=10, steps=3, from_s=0, step_s=0.01)
    meter.updated(now)
    meter.stepped(0, num_running=4, num_cached=400, now=now + 0.2)
    meter.stepped(6, num_running=8, num_cached=800, now=now + 0.4)
    meter.stepped(9, num_running=9, num_cached=900, now=now + 0.5)
    speeds = meter.speeds()
    assert speeds.recomputed_tokens == 1000
    assert speeds.recomputed_s == pytest.approx(0.5)
    assert speeds.points == []
