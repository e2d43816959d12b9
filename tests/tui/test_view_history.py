"""The history of metrics over long and resumed runs: bounded, and nothing rare is lost."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from grpo_engine.wire.metrics import Band, MetricsLine
from grpo_engine.wire.run_folder import METRICS_FILE, RESOLVED_FILE
from grpo_tui.view.metrics.curves import curve_of
from grpo_tui.view.metrics.history import (
    MAX_EVALUATIONS,
    MAX_LINES,
    RECENT_LINES,
    MetricHistory,
    band_heights,
    bucketed,
    extended,
)
from grpo_tui.view.metrics.state import XAxis
from grpo_tui.view.progress import Progress, progress_of, read_progress, usual_step_s
from grpo_tui.view.timeline.past import history_until

BARE = {"reward/mean": 0.5}


def line(step: int, **metrics: float) -> MetricsLine:
    return MetricsLine(time=float(step), step=step, policy_version=step, metrics=metrics or BARE)


def evaluated(step: int) -> MetricsLine:
    return line(step, **BARE, **{"eval/avg@4": 0.25})


def grown(lines: list[MetricsLine]) -> MetricHistory:
    history = MetricHistory()
    for start in range(0, len(lines), 500):
        history = extended(history, lines[start : start + 500])
    return history


def test_evaluations_survive_the_thinning() -> None:
    steps = range(1, 20_001)
    history = grown([evaluated(step) if step % 125 == 0 else line(step) for step in steps])
    assert len(history.lines) <= MAX_LINES
    assert [step for step, _ in history.series("eval/avg@4")] == list(range(125, 20_001, 125))


def test_a_run_that_evaluates_at_every_step_stays_bounded() -> None:
    history = grown([evaluated(step) for step in range(1, 3 * MAX_LINES)])
    assert len(history.lines) <= MAX_LINES
    assert len(history.series("eval/avg@4")) > MAX_EVALUATIONS // 2
    assert history.lines[0].step == 1


def test_a_single_spike_survives_the_thinning_at_its_step_and_changes_no_mean() -> None:
    spikes = {1778: 40.0, 3331: -25.0, 3332: 30.0}
    values = {step: spikes.get(step, 1.0 + 0.01 * (step % 7)) for step in range(1, 20_001)}
    history = grown([line(step, **{"train/grad_norm": value}) for step, value in values.items()])
    assert len(history.lines) <= MAX_LINES
    assert history.stride > 8
    series = history.series("train/grad_norm")
    assert spikes.items() <= dict(series).items()
    assert all(values[step] == value for step, value in series)
    assert len(series) < 2 * MAX_LINES
    curve = curve_of(history, "train/grad_norm", 1, XAxis.STEP)
    found = curve.figures((1, 20_000))
    assert found is not None
    assert (found.least, found.most, round(found.mean, 2)) == (-25.0, 40.0, 1.03)
    bars = bucketed(series, 60)
    assert {40.0, 30.0} <= set(bars)
    assert all(bar is not None and 1.0 <= bar <= 1.06 for bar in bars if bar not in spikes.values())


def test_a_spike_is_not_seen_before_it_was_there() -> None:
    history = grown([line(step, **{"a": 9.0 if step == 3001 else 1.0}) for step in range(1, 8001)])
    assert max(value for _, value in history.series("a")) == 9.0
    assert max(value for _, value in history_until(history, 3000.5).series("a")) == 1.0
    resumed = extended(history, [line(2500, **{"a": 1.0})])
    assert max(value for _, value in resumed.series("a")) == 1.0
    assert resumed.series("a")[-1][0] == 2500


def test_a_trainer_that_logs_every_tenth_step_keeps_its_past() -> None:
    history = grown([line(step) for step in range(1, 10 * 3 * MAX_LINES, 10)])
    assert MAX_LINES // 4 < len(history.lines) <= MAX_LINES
    assert history.lines[0].step == 1


def test_a_long_run_is_thinned_evenly_and_its_newest_steps_are_kept() -> None:
    num_steps = 3 * MAX_LINES
    history = grown([line(step) for step in range(1, num_steps + 1)])
    kept = [each.step for each in history.lines]
    assert len(kept) <= MAX_LINES
    assert kept[-RECENT_LINES:] == list(range(num_steps - RECENT_LINES + 1, num_steps + 1))
    assert kept == sorted(kept)
    old = kept[: -MAX_LINES // 2]
    assert len(old) > 100
    assert {later - earlier for earlier, later in itertools.pairwise(old)} == {history.stride}
    assert kept[0] <= history.stride


def test_a_resumed_trainer_replaces_the_steps_that_it_repeats() -> None:
    history = grown([line(1), line(2), line(3), line(4), line(3, **{"reward/mean": 0.75})])
    assert history.series("reward/mean") == [(1, 0.5), (2, 0.5), (3, 0.75)]


def test_two_lines_of_one_step_that_measure_different_things_are_one() -> None:
    history = grown([line(1), line(2), line(2, **{"eval/avg@4": 0.5})])
    assert [each.step for each in history.lines] == [1, 2]
    assert history.lines[-1].metrics == {**BARE, "eval/avg@4": 0.5}


@pytest.mark.parametrize(
    ("band", "heights"),
    [
        (Band(0.8, 1.2), [-1, 0, 4, 7, 8, None]),
        (Band(None, 1.2), [0, 5, 6, 7, 8, None]),
        (Band(0.8, None), [-1, 0, 2, 4, 7, None]),
    ],
)
def test_bars_of_a_band_rise_from_its_low_end_to_its_high_end(band: Band, heights: list[int | None]) -> None:
    assert band_heights([-0.5, 0.8, 1.0, 1.2, 1.5, None], band, 8) == heights


# --- how far a run is ------------------------------------------------------------------------------------------------


def test_the_time_left_is_the_steps_left_by_the_median_of_recent_steps_without_pauses() -> None:
    times = [0.0, 2.0, 4.0, 90_000.0, 90_002.0, 90_003.0]  # stopped for a day after the third step
    lines = [line(step).model_copy(update={"time": time}) for step, time in enumerate(times, 1)]
    progress = progress_of(lines, 16, is_live=True)
    assert (progress.step, progress.steps, progress.steps_left, progress.time_left_s) == (6, 16, 10, 20.0)
    assert progress.left == "20s left"
    ended = progress_of(lines, 16, is_live=False)
    assert (ended.steps_left, ended.time_left_s) == (10, None)
    assert progress_of(lines, None, is_live=True) == Progress(step=6)
    assert progress_of([], 16, is_live=True) == Progress(steps=16, steps_left=16)
    assert progress_of(lines, 4, is_live=True).steps_left == 0


def test_a_run_that_paused_after_its_first_step_is_not_slow() -> None:
    first, second = line(1, **{"train/step_time": 3.0}), line(2, **{"train/step_time": 1.0})
    second = second.model_copy(update={"time": 90_000.0})
    assert usual_step_s([first, second]) == 2.0
    assert usual_step_s([line(0), first]) == 3.0, "the time of the first evaluation is no step"
    back = [line(5), line(6).model_copy(update={"time": 1.0})]
    assert usual_step_s(back) is None, "the clock was set back"


def test_progress_is_read_from_the_folder_of_a_run(tmp_path: Path) -> None:
    assert read_progress(tmp_path, is_live=True) == Progress()
    trainer = {"kind": "trainer", "training_steps": 150}
    (tmp_path / RESOLVED_FILE).write_text(json.dumps({"services": {"trainer": trainer}}))
    lines = [line(step) for step in [*range(1, 9), *range(5, 13)]]  # resumed from the checkpoint of step 4
    (tmp_path / METRICS_FILE).write_text("".join(each.model_dump_json() + "\n" for each in lines))
    assert read_progress(tmp_path, is_live=True) == Progress(step=12, steps=150, steps_left=138, time_left_s=138.0)
    (tmp_path / RESOLVED_FILE).write_text(json.dumps({"services": {"trainer": {**trainer, "training_steps": "9"}}}))
    assert read_progress(tmp_path, is_live=False).steps is None
