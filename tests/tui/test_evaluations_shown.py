"""Evaluations on the screen and in `status`: the latest holds until the next; step 0 is read as any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from screen_fakes import metrics_line

from grpo_engine.wire.metrics import HEALTHY_BANDS, MetricsLine
from grpo_tui.cli.look import _metric_lines
from grpo_tui.run_files.metrics import MetricsTail, latest_metrics
from grpo_tui.ui.widgets.main.metrics_panel import MetricsPanel, shown_metrics
from grpo_tui.view.diagnosis import diagnose
from grpo_tui.view.metrics.history import extended
from grpo_tui.view.state import MetricHistory, ViewState

EVALUATION = {"eval/avg@4": 0.25, "eval/avg@4_se": 0.01, "eval/pass@1": 0.125, "eval/sums/avg@4": 0.5, "eval/time": 2.0}


def baseline() -> MetricsLine:
    return MetricsLine(time=0.0, step=0, policy_version=0, metrics=EVALUATION)


def evaluated(step: int, value: float) -> MetricsLine:
    line = metrics_line(step)
    return line.model_copy(update={"metrics": {**line.metrics, **EVALUATION, "eval/avg@4": value}})


def rows(state: ViewState, width: int = 120) -> list[str]:
    return [str(row) for row in MetricsPanel().lines(state, width, 40)]


@pytest.fixture
def state(tmp_path: Path) -> ViewState:
    lines = [baseline(), metrics_line(1), evaluated(2, 0.75), *(metrics_line(step) for step in range(3, 8))]
    return ViewState(run_folder=tmp_path, now=0.0, history=extended(MetricHistory(), lines))


def test_the_latest_evaluation_is_shown_between_two_of_them(state: ViewState) -> None:
    assert [name for name in shown_metrics(state) if name.startswith("eval/")] == ["eval/avg@4", "eval/pass@1"]
    [row] = [row for row in rows(state) if "eval/avg@4" in row]
    assert "0.7500" in row


def test_a_baseline_alone_is_shown_and_diagnosed_as_nothing(state: ViewState) -> None:
    young = replace(state, history=extended(MetricHistory(), [baseline()]))
    assert any("0.2500" in row for row in rows(young))
    assert diagnose(young.history.lines, None) == []


def test_readers_of_the_file_take_step_0_as_they_take_any_other(tmp_path: Path) -> None:
    lines = [baseline(), metrics_line(1)]
    (tmp_path / "metrics.jsonl").write_text("".join(line.model_dump_json() + "\n" for line in lines))
    assert [line.step for line in MetricsTail(tmp_path / "metrics.jsonl").read().lines] == [0, 1]
    latest = latest_metrics(tmp_path)
    assert (latest["step"], latest["eval/avg@4"]) == (1, 0.25)
    assert [row for row in _metric_lines(latest, HEALTHY_BANDS) if row[0].startswith("eval/")] == [
        ("eval/avg@4", "0.25", ""),
        ("eval/pass@1", "0.125", ""),
    ]


def test_rewards_of_each_environment_are_shown(state: ViewState) -> None:
    line = metrics_line(8, reward__sort6__mean=0.25, reward__sums__mean=0.5)
    several = replace(state, history=extended(state.history, [line]))
    assert "0.2500" in next(row for row in rows(several) if "reward/sort6/mean" in row)
    assert "0.5000" in next(row for row in rows(several) if "reward/sums/mean" in row)


def test_metrics_with_other_names_are_shown_where_ours_would_be(tmp_path: Path) -> None:
    metrics = {"actor/pg_clipfrac": 0.45, "critic/score/mean": 0.75, "actor/ppo_kl": 0.01}
    history = extended(MetricHistory(), [MetricsLine(time=1.0, step=1, policy_version=1, metrics=metrics)])
    shown = rows(ViewState(run_folder=tmp_path, now=0.0, history=history), width=60)
    assert "0.7500" in next(row for row in shown if row.startswith("score"))
    assert "0.4500 ▲" in next(row for row in shown if row.startswith("pg_clipfrac"))


def test_a_sparkline_with_a_band_is_that_band_and_signs_what_lies_outside(tmp_path: Path) -> None:
    values = {1: 0.8, 2: 1.0, 3: 1.5, 4: 0.1}
    lines = [metrics_line(step, grpo__mean_ratio=value) for step, value in values.items()]
    state = ViewState(run_folder=tmp_path, now=0.0, history=extended(MetricHistory(), lines))
    [row] = [row for row in rows(state, width=60) if row.startswith("mean_ratio")]
    assert row.rstrip().endswith("▁▅▲▼")
