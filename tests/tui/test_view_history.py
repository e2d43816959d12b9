"""The history of metrics over long runs, resumed runs and damaged files: bounded, and nothing rare is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from screen_fakes import metrics_line

from grpo_engine.wire.metrics import Band, MetricsLine
from grpo_tui.run_files import metrics as metrics_file
from grpo_tui.run_files.metrics import MetricsTail
from grpo_tui.view.metrics.curves import curve_of
from grpo_tui.view.metrics.history import MAX_EVALUATIONS, MAX_LINES, MetricHistory, band_heights, bucketed, extended
from grpo_tui.view.metrics.state import XAxis
from grpo_tui.view.timeline.past import history_until

BARE = {"reward/mean": 0.5}


def line(step: int, **metrics: float) -> MetricsLine:
    return MetricsLine(time=float(step), step=step, policy_version=step, metrics=metrics or BARE)


def evaluated(step: int, value: float = 0.25) -> MetricsLine:
    return MetricsLine(time=float(step), step=step, policy_version=step, metrics={**BARE, "eval/avg@4": value})


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


def test_two_lines_of_one_step_that_measure_different_things_are_one() -> None:
    history = extended(MetricHistory(), [line(1), line(2), MetricsLine(time=3, step=2, policy_version=2,
                                                                       metrics={"eval/avg@4": 0.5})])  # fmt: skip
    assert [each.step for each in history.lines] == [1, 2]
    assert history.lines[-1].metrics == {**BARE, "eval/avg@4": 0.5}


def test_a_step_that_is_measured_again_counts_as_the_newer_line_says() -> None:
    history = extended(MetricHistory(), [line(2), line(2, **{"reward/mean": 0.75})])
    assert history.series("reward/mean") == [(2, 0.75)]


def written(path: Path, *records: dict[str, Any] | str) -> None:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))


@pytest.mark.parametrize("strange", ["null", '"n/a"', "NaN", "-Infinity", "1" + "0" * 400, "[1]", "1e999"])
def test_a_value_that_is_no_finite_number_hides_itself_only(tmp_path: Path, strange: str) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, f'{{"time": 1, "step": 1, "policy_version": 1, "metrics": {{"a": {strange}, "reward/mean": 0.5}}}}')
    chunk = MetricsTail(path).read()
    assert [each.metrics for each in chunk.lines] == [BARE]


def test_garbage_of_any_depth_is_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, line(1).model_dump(), "[" * 100_000, line(2).model_dump())
    chunk = MetricsTail(path).read()
    assert ([each.step for each in chunk.lines], chunk.num_bad_lines) == ([1, 2], 1)


def test_a_line_without_an_end_is_passed_over_in_bounded_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "MAX_BYTES_A_READ", 1000)
    path = tmp_path / "metrics.jsonl"
    written(path, line(1).model_dump(), "x" * 5000, line(2).model_dump())
    tail = MetricsTail(path)
    chunks = [tail.read()]
    while chunks[-1].has_more:
        chunks.append(tail.read())
    assert [each.step for chunk in chunks for each in chunk.lines] == [1, 2]
    assert sum(chunk.num_bad_lines for chunk in chunks) == 1


def test_a_file_that_was_written_anew_and_is_longer_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, line(1).model_dump(), line(2).model_dump())
    tail = MetricsTail(path)
    tail.read()
    written(path, *(metrics_line(step).model_dump() for step in (7, 8, 9)))
    chunk = tail.read()
    assert (chunk.is_restarted, [each.step for each in chunk.lines]) == (True, [7, 8, 9])


def test_a_file_that_cannot_be_read_leaves_what_was_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    assert MetricsTail(tmp_path / "metrics.jsonl").read() == metrics_file.MetricsChunk()


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
