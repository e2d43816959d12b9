"""Curves, axes with round numbers, panes, names and other runs: what the metrics screen draws from."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from screen_fakes import metrics_line, write_metrics

from grpo_engine.wire.metrics import HEALTHY_BANDS, METRIC_NAMES, MetricsLine
from grpo_engine.wire.run_folder import METRICS_FILE, STATE_FILE
from grpo_tui.ui.widgets.plot_drawing import Geometry, axis_rows
from grpo_tui.view.metrics import other_runs
from grpo_tui.view.metrics import state as plot_view
from grpo_tui.view.metrics.braille import Canvas
from grpo_tui.view.metrics.curves import (
    Curve,
    Point,
    Scale,
    clipped,
    curve_of,
    figures,
    own_scale,
    panes_of,
    smoothed,
    tick_texts,
    ticks,
    x_range,
    x_ticks,
)
from grpo_tui.view.metrics.history import MetricHistory, extended
from grpo_tui.view.metrics.names import ALIASES, band_of, found, in_groups, measured_as, our_name, unit_of
from grpo_tui.view.metrics.state import PlotView, XAxis, after


def history_of(*metrics: dict[str, float], every_s: float = 2.0) -> MetricHistory:
    lines = [
        MetricsLine(time=100 + every_s * step, step=step, policy_version=step // 2, metrics=each)
        for step, each in enumerate(metrics, start=1)
    ]
    return extended(MetricHistory(), lines)


def curve(number: int, *values: float, name: str = "reward/mean") -> Curve:
    points = [Point(x=float(x), y=y, step=x, time=float(x), policy_version=x) for x, y in enumerate(values)]
    return Curve(name=name, number=number, points=tuple(points), band=HEALTHY_BANDS.get(name))


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("reward", "reward/mean"), ("train/reward", "reward/mean"), ("critic/score/mean", "reward/mean"),
        ("reward/all/mean", "reward/mean"), ("actor/ppo_kl", "grpo/kl"), ("objective/kl", "grpo/kl"),
        ("actor/pg_clipfrac", "grpo/clipped_fraction"), ("clip_ratio/region_mean", "grpo/clipped_fraction"),
        ("ppo_clip_ratio", "grpo/clipped_fraction"), ("completions/mean_length", "rollout/length_mean"),
        ("response_length/clip_ratio", "rollout/truncated_fraction"), ("optim/grad_norm", "train/grad_norm"),
        ("mismatch_kl/mean", "alignment/diff_abs_mean"), ("frac_reward_zero_std", "reward/frac_zero_std"),
        ("timing_s/step", "train/step_time"), ("perf/throughput", "train/tokens_per_second"),
    ],
)  # fmt: skip
def test_names_of_other_trainers_are_mapped_to_ours(theirs: str, ours: str) -> None:
    assert our_name(theirs) == ours
    assert found(theirs.removeprefix("train/"), METRIC_NAMES)[0] == ours


def test_every_alias_means_one_of_our_metrics() -> None:
    aliases = [alias for others in ALIASES.values() for alias in others]
    assert len(aliases) == len(set(aliases))
    assert set(ALIASES) <= set(METRIC_NAMES)


def test_a_search_finds_parts_then_scattered_letters_and_nothing_else() -> None:
    assert found("diff", METRIC_NAMES) == ["alignment/diff_mean", "alignment/diff_abs_mean", "alignment/diff_max"]
    assert found("trunc rollout", METRIC_NAMES) == ["rollout/truncated_fraction"]
    assert found("clpfr", METRIC_NAMES) == ["grpo/clipped_fraction"]
    assert found("zzz", METRIC_NAMES) == []
    assert found("  ", METRIC_NAMES) == list(METRIC_NAMES)


def test_metrics_of_a_run_with_other_names_are_found_by_ours() -> None:
    assert measured_as("reward/mean", ["loss", "reward", "critic/score/mean"]) == "reward"
    assert measured_as("reward/mean", ["train/reward"]) == "train/reward"
    assert measured_as("grpo/kl", ["loss"]) is None
    assert band_of("actor/pg_clipfrac", HEALTHY_BANDS) == HEALTHY_BANDS["grpo/clipped_fraction"]
    assert band_of("actor/ppo_kl", HEALTHY_BANDS) is None


def test_metrics_are_sorted_by_group_and_each_environment_is_one() -> None:
    names = ["train/loss", "reward/sort6/mean", "grpo/kl", "reward/std", "custom", "reward/mean", "eval/avg@4"]
    assert in_groups(names) == [
        "reward/mean", "reward/std", "reward/sort6/mean", "eval/avg@4", "grpo/kl", "train/loss", "custom",
    ]  # fmt: skip


def test_units_of_metrics_that_have_one() -> None:
    names = ("train/step_time", "train/tokens_per_second", "grpo/kl", "train/gpu_memory_gb", "rollout/length_mean")
    assert [unit_of(name) for name in names] == ["s", "tokens/s", "nats", "GB", "tokens"]
    assert [unit_of(name) for name in ("reward/mean", "grpo/mean_ratio", "rollout/truncated_fraction")] == [""] * 3


# --- curves ----------------------------------------------------------------------------------------------------------


def test_a_curve_runs_along_steps_time_or_versions() -> None:
    history = history_of({"a": 1.0}, {"a": 2.0}, {"a": 3.0}, {"a": 4.0})
    xs = {x: [point.x for point in curve_of(history, "a", 1, x).points] for x in XAxis}
    assert xs == {XAxis.STEP: [1, 2, 3, 4], XAxis.TIME: [0, 2, 4, 6], XAxis.VERSION: [0, 1, 1, 2]}


def test_a_step_without_the_value_is_a_gap_and_an_evaluation_has_none() -> None:
    history = history_of({"a": 1.0, "eval/x": 5.0}, {}, {"a": 3.0}, {"a": 4.0, "eval/x": 6.0})
    assert [point.y for point in curve_of(history, "a", 1, XAxis.STEP).points] == [1.0, None, 3.0, 4.0]
    evaluated = curve_of(history, "eval/x", 1, XAxis.STEP)
    assert (evaluated.is_sparse, evaluated.measured) == (True, [(1.0, 5.0), (4.0, 6.0)])
    assert [(point.step if point else None) for point in map(evaluated.at, (0.5, 3.0, 9.0))] == [None, 1, 4]
    assert curve_of(history, "unknown", 1, XAxis.STEP).points == ()


def test_smoothing_begins_at_the_first_value_and_keeps_gaps() -> None:
    assert smoothed([4.0, None, 4.0, 4.0], 0.9) == [4.0, None, pytest.approx(4.0), pytest.approx(4.0)]
    # After 0 and 1 with weight 0.5: (0.5 * 0 + 0.5 * 1) / (1 - 0.25)
    assert smoothed([0.0, 1.0], 0.5) == [0.0, pytest.approx(2 / 3)]


def test_a_line_is_cut_at_the_edges_of_the_window_and_at_gaps() -> None:
    points = [(0.0, 0.0), (10.0, 10.0), (11.0, None), (12.0, 4.0), (20.0, 4.0)]
    assert clipped(points, (5.0, 15.0)) == [[(5.0, 5.0), (10.0, 10.0)], [(12.0, 4.0), (15.0, 4.0)]]
    assert clipped([(0.0, 0.0), (20.0, 20.0)], (5.0, 15.0)) == [[(5.0, 5.0), (15.0, 15.0)]]


def test_figures_are_of_the_values_in_the_window() -> None:
    sums = figures([2.0, 4.0, 3.0])
    assert sums is not None
    assert (sums.last, sums.mean, sums.least, sums.most) == (3.0, 3.0, 2.0, 4.0)
    assert figures([]) is None
    huge = figures([1.7e308, 1.7e308])
    assert huge is not None
    assert math.isfinite(huge.mean)


# --- axes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "count", "texts"),
    [
        (0.0, 1.0, 5, ["0.0", "0.2", "0.4", "0.6", "0.8"]),
        (0.93, 1.07, 4, ["0.95", "1.00", "1.05"]),
        (11_000, 23_900, 4, ["15,000", "20,000"]),
        (-0.012, 0.012, 3, ["-0.01", "0.00", "0.01"]),
        (1e-6, 9e-6, 4, ["2.0e-06", "4.0e-06", "6.0e-06", "8.0e-06"]),
    ],
)
def test_axes_have_round_numbers(low: float, high: float, count: int, texts: list[str]) -> None:
    values = ticks(Scale(low=low, high=high), count)
    assert tick_texts(values, is_log=False) == texts


def test_a_logarithmic_axis_has_powers_of_ten() -> None:
    scale = Scale(low=1e-4, high=10.0, is_log=True)
    assert ticks(scale, 6) == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0])
    assert [scale.place(value) for value in (1e-4, 10.0, 0.0, -1.0)] == [0.0, 1.0, None, None]


@pytest.mark.parametrize("is_log", [False, True])
def test_values_too_small_for_all_digits_have_an_axis(is_log: bool) -> None:
    scale = own_scale([curve(0, 5e-324, 5e-324 if is_log else -5e-324)], (0.0, 1.0), is_log=is_log)
    assert len(ticks(scale, 3)) <= 3
    assert scale.place(5e-324) is not None


def test_time_has_minutes_and_hours_and_steps_are_whole() -> None:
    assert [text for _, text in x_ticks((0.0, 3700.0), XAxis.TIME, 5)] == ["0", "15m00s", "30m00s", "45m00s", "1h00m"]
    assert [text for _, text in x_ticks((1.0, 4.0), XAxis.STEP, 8)] == ["1", "2", "3", "4"]
    assert [text for _, text in x_ticks((0.0, 1_000_000.0), XAxis.STEP, 2)] == ["0", "500,000", "1,000,000"]


@pytest.mark.parametrize(
    ("end", "columns", "words"),
    [(150.0, 70, "0 50 100 step 150"), (140.0, 70, "0 50 100 step"), (5.0, 12, "0 step 5"), (5.0, 6, "step")],
)
def test_the_last_number_of_the_axis_stands_beside_the_word(end: float, columns: int, words: str) -> None:
    geometry = Geometry(left=4, columns=columns, window=(0.0, end), whole=(0.0, end), places=())
    _, labels = axis_rows(geometry, PlotView(), columns + 4)
    assert labels.plain.split() == words.split()
    assert labels.cell_length == columns + 4


def test_a_growing_run_gets_room_so_that_the_plot_does_not_move() -> None:
    ranges = {x_range([curve(1, *([0.5] * (count + 1)))], is_growing=True) for count in (141, 145, 150)}
    assert ranges == {(0.0, 150.0)}
    assert x_range([curve(1, 0.5)]) == (-0.5, 0.5)
    assert x_range([]) is None


def test_metrics_share_an_axis_only_where_their_ranges_are_alike() -> None:
    near, far = curve(1, 0.2, 0.8), curve(2, 0.3, 0.9)
    tall = curve(2, 5000.0, 9000.0)
    share = {"window": (0.0, 1.0), "is_log": False, "shows_band": False, "how": "auto"}
    assert panes_of([near, far], num_rows=20, **share)[1] == "one axis for all"  # type: ignore[arg-type]
    assert panes_of([near, tall], num_rows=20, **share)[1] == "one pane each"  # type: ignore[arg-type]
    assert panes_of([near, tall], num_rows=9, **share)[1] == "each over its own range"  # type: ignore[arg-type]


def test_a_band_far_away_is_left_out_until_it_is_requested() -> None:
    quiet = curve(1, 0.0010, 0.0012, name="grpo/clipped_fraction")

    def top(shows_band: bool) -> float:
        [pane], _ = panes_of([quiet], (0.0, 1.0), is_log=False, shows_band=shows_band, how="auto", num_rows=20)
        assert pane.scale is not None
        return pane.scale.high

    assert top(False) < 0.002
    assert 0.3 < top(True) < 0.35


def test_dots_make_braille() -> None:
    canvas = Canvas(2, 1)
    canvas.polyline([(0, 0), (3, 3)], "line")
    canvas.dot(9, 9, "outside")
    assert [canvas.cell(column, 0) for column in (0, 1)] == [("⠑", "line"), ("⢄", "line")]
    dashed = Canvas(8, 1)
    dashed.polyline([(0, 0), (15, 0)], "line", is_dashed=True)
    assert "".join(dashed.cell(column, 0)[0] for column in range(8)) == "⠉⠉  ⠉⠉  "


# --- state -----------------------------------------------------------------------------------------------------------


def test_marks_are_set_and_cleared_and_their_number_is_limited() -> None:
    plots = PlotView()
    for number in range(9):
        plots = after(plots, plot_view.MetricMarked(name=f"m{number}"))
    assert plots.marked == tuple(f"m{number}" for number in range(plot_view.MAX_MARKED))
    assert after(plots, plot_view.MetricMarked(name="m2")).marked == ("m0", "m1", "m3", "m4", "m5")
    assert after(plots, plot_view.MarksCleared()).marked == ()


def test_another_x_axis_resets_window_and_cursor() -> None:
    plots = replace(PlotView(), window=(2.0, 3.0), cursor=2.5)
    turned = after(plots, plot_view.XAxisTurned())
    assert (turned.x, turned.window, turned.cursor) == (XAxis.TIME, None, None)
    assert after(after(turned, plot_view.XAxisTurned()), plot_view.XAxisTurned()).x is XAxis.STEP


# --- other runs ------------------------------------------------------------------------------------------------------


def test_a_pipe_in_the_place_of_the_state_of_another_run_stops_no_list(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / METRICS_FILE).write_text('{"time": 1, "step": 1, "policy_version": 1, "metrics": {}}\n')
    os.mkfifo(tmp_path / "other" / STATE_FILE)
    assert [run.state for run in other_runs.other_runs(tmp_path / "here")] == [""]


def test_other_runs_are_listed_with_profile_state_and_last_step(tmp_path: Path) -> None:
    for name, steps in (("here", 3), ("a", 5), ("b", 7)):
        (tmp_path / name).mkdir()
        write_metrics(tmp_path / name, steps)
    (tmp_path / "a" / "state.json").write_text('{"profile": "tiny", "state": "finished"}')
    (tmp_path / "b" / "state.json").write_text("half of it {")
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"time": 1, "st')
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    seen = {run.run: run for run in other_runs.other_runs(tmp_path / "here")}
    assert set(seen) == {"a", "b"}
    assert (seen["a"].profile, seen["a"].state, seen["a"].last_step) == ("tiny", "finished", 5)
    assert seen["a"].last_reward == pytest.approx(metrics_line(5).metrics["reward/mean"])
    assert (seen["b"].profile, seen["b"].last_step) == ("", 7)


def test_a_huge_run_is_read_in_part_and_keeps_its_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_runs, "WHOLE_BYTES", 20_000)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 2001):
            extra = {"eval/avg@4": 0.5} if step % 250 == 3 else {}
            metrics = {"reward/mean": 0.1, **extra}
            file.write(json.dumps({"time": step, "step": step, "policy_version": step, "metrics": metrics}) + "\n")
    history = other_runs.read_history(tmp_path)
    assert len(history.lines) < 400
    assert [step for step, _ in history.series("eval/avg@4")] == list(range(3, 2001, 250))
