"""The phases of a trainer that samples and trains in turn, as stretches of a timeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from screen_fakes import metrics_line, run_status, service

from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.supervisor import WaitsFor
from grpo_tui.ui.widgets.main.metrics_panel import MetricsPanel
from grpo_tui.ui.widgets.main.phase_timeline import FILLS, STYLES, phase_lines, rows_wanted, ticks
from grpo_tui.view.metrics.history import MetricHistory, extended
from grpo_tui.view.state import ViewState
from grpo_tui.view.turns import cells_of, phase_now, turns_of

TIMES = {"time/sampling": 6.0, "time/training": 3.0, "time/syncing": 1.0}
MEMORY = {"memory/sampling_gb": 31.2, "memory/training_gb": 66.04, "memory/syncing_gb": 49.0}


def step(number: int, **changes: float) -> MetricsLine:
    line = metrics_line(number)
    return line.model_copy(update={"metrics": {**line.metrics, **TIMES, **MEMORY, **changes}})


def state_of(folder: Path, *lines: MetricsLine, age_s: float = 1.0, **trainer: Any) -> ViewState:
    services = [service("trainer", **trainer)]
    history = extended(MetricHistory(), lines)
    return ViewState(
        run_folder=folder, now=lines[-1].time + age_s, history=history, status=run_status(services=services)
    )


def test_each_phase_has_cells_as_its_seconds_and_its_colour(tmp_path: Path) -> None:
    state = state_of(tmp_path, step(1), step(2))
    timeline, _ = phase_lines(state, 40)
    _, legend = phase_lines(state, 78)
    sampling, training, syncing = FILLS
    one_step = f"{sampling * 3} 6.0s {sampling * 3}{training * 6}{syncing * 2}"
    assert timeline.plain == one_step * 2
    assert [span.style for span in timeline.spans] == [*STYLES, *STYLES]
    assert legend.plain.rstrip() == (
        f"{sampling} sampling 6.0s 31.2 GB  {training} training 3.0s 66.0 GB  {syncing} syncing 1.0s 49.0 GB"
    )


def test_stretches_fill_the_line_and_short_ones_add_up_to_no_error() -> None:
    turns = turns_of([step(number, **{"time/syncing": 0.01}) for number in range(1, 9)], 8)
    assert turns is not None
    cells = cells_of(turns, 100)
    assert sum(each for _, _, each in cells) == 100
    assert sum(each for phase, _, each in cells if phase == 2) <= 4  # of 0.08 in 72 s: by rounding alone
    assert all(abs(each - 100 * seconds / turns.seconds) <= 1 for _, seconds, each in cells)


def test_a_run_without_turns_has_no_timeline(tmp_path: Path) -> None:
    state = state_of(tmp_path, metrics_line(1))
    assert (rows_wanted(state), phase_lines(state, 80), ticks(state)) == (0, [], False)


@pytest.mark.parametrize(
    ("waits_for", "age_s", "shown"),
    [
        (WaitsFor.BATCH, 13.0, "now: sampling 12s"),
        (WaitsFor.EVALUATION, 13.0, "now: sampling 12s"),
        (WaitsFor.UPDATE, 13.0, "now: syncing 12s"),
        (None, 13.0, "now: training"),
        (None, 2.0, ""),
    ],
)
def test_the_phase_that_goes_on_is_told_from_what_the_trainer_waits_for(
    waits_for: WaitsFor | None, age_s: float, shown: str, tmp_path: Path
) -> None:
    line = step(1)
    since = line.time + age_s - 12 if waits_for else None
    state = state_of(tmp_path, line, age_s=age_s, waits_for=waits_for, waits_since=since)
    _, legend = phase_lines(state, 120)
    assert legend.plain.partition("49.0 GB  ")[2] == shown
    assert ticks(state) == bool(shown)


def test_no_phase_goes_on_where_two_trainers_or_none_run() -> None:
    two = run_status(services=[service("trainer"), service("other", kind="trainer")])
    assert phase_now(two, step(1), now=1e10) is None
    assert phase_now(run_status(services=[service("vllm")]), step(1), now=1e10) is None


def test_the_panel_has_the_timeline_above_as_many_metrics_as_still_fit(tmp_path: Path) -> None:
    state = replace(state_of(tmp_path, step(1)), status=run_status())
    panel = MetricsPanel()
    with_phases = [row.plain for row in panel.lines(state, 80, 10)]
    assert len(with_phases) == 10
    assert with_phases[1].startswith(FILLS[0])
    assert "sampling 6.0s" in with_phases[2]
    assert "reward/mean" in with_phases[3]
