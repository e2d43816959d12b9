"""Policy versions of the groups on the way, as the main screen and `status` show them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from screen_fakes import metrics_line, run_status, service

from grpo_engine.wire.supervisor import ServiceState, ServiceStatus, VersionsInFlight
from grpo_tui.ui.widgets.main.metrics_panel import MetricsPanel, version_rows_wanted
from grpo_tui.view.metrics.history import MetricHistory, extended
from grpo_tui.view.state import ViewState
from grpo_tui.view.versions import version_words

SOME = VersionsInFlight(newest=120, queued={118: 16, 120: 4, 119: 12}, num_sampled=7)
TURNS = {"time/sampling": 6.0, "time/training": 3.0, "time/syncing": 1.0}


def state_of(folder: Path, *services: ServiceStatus, **metrics: float) -> ViewState:
    line = metrics_line(120)
    line = line.model_copy(update={"metrics": {**line.metrics, **metrics}})
    history = extended(MetricHistory(), [line])
    return ViewState(run_folder=folder, now=line.time + 1, history=history, status=run_status(services=list(services)))


def shown(state: ViewState, width: int) -> list[str]:
    return [each.plain.rstrip() for each in MetricsPanel().lines(state, width, 12)]


def test_the_newest_versions_stand_first() -> None:
    assert list(version_words(SOME)) == [
        ("served", "120"),
        ("sampling", "7 groups"),
        ("queued", "120: 4, 119: 12, 118: 16"),
    ]


def test_groups_without_a_version_and_of_many_old_ones_are_counted_together() -> None:
    versions = VersionsInFlight(newest=9, queued={9: 1}, num_older=30, num_unversioned=2, num_sampled=1)
    assert list(version_words(versions))[1:] == [("sampling", "1 group"), ("queued", "9: 1, older: 30, unknown: 2")]
    assert next(version_words(VersionsInFlight(newest=1132))) == ("served", "1,132")
    assert list(version_words(VersionsInFlight(newest=0)))[2] == ("queued", "none")


def test_versions_stand_above_the_metrics_and_are_cut_where_they_do_not_fit(tmp_path: Path) -> None:
    state = state_of(tmp_path, service("api", versions=SOME))
    assert version_rows_wanted(state) == 1
    assert shown(state, 80)[1] == "versions  served 120  sampling 7 groups  queued 120: 4, 119: 12, 118: 16"
    assert shown(state, 50)[1] == "versions  served 120  sampling 7 groups  queued 1…"
    assert shown(state, 80)[2].startswith("reward/mean")


def test_apis_of_several_policies_are_named(tmp_path: Path) -> None:
    other = service("other_api", kind="rollout_api", versions=VersionsInFlight(newest=3))
    state = state_of(tmp_path, service("api", versions=SOME), other)
    assert version_rows_wanted(state) == 2
    assert [row.partition("  ")[0] for row in shown(state, 80)[1:3]] == ["api", "other_api"]


def test_an_api_that_reports_nothing_or_is_down_has_no_line(tmp_path: Path) -> None:
    down = service("api", state=ServiceState.WAITING, versions=SOME)
    for state in (state_of(tmp_path, service("api")), state_of(tmp_path, down)):
        assert version_rows_wanted(state) == 0
        assert shown(state, 80)[1].startswith("reward/mean")


def test_phases_of_turns_stand_in_their_place(tmp_path: Path) -> None:
    state = state_of(tmp_path, service("api", versions=SOME), **TURNS)
    assert version_rows_wanted(state) == 0
    assert not any("versions" in row for row in shown(state, 80))


def test_where_there_is_one_row_it_has_the_reward(tmp_path: Path) -> None:
    state = state_of(tmp_path, service("api", versions=SOME))
    rows = [each.plain for each in MetricsPanel().lines(state, 80, 2)]
    assert len(rows) == 2
    assert rows[1].startswith("reward/mean")


def test_the_panel_is_drawn_again_for_other_versions_alone(tmp_path: Path) -> None:
    panel, state = MetricsPanel(), state_of(tmp_path, service("api", versions=SOME))
    assert state.status is not None
    later = state.status.model_copy(update={"services": [service("api", versions=VersionsInFlight(newest=121))]})
    before, after = panel.inputs(state), panel.inputs(replace(state, status=later))
    assert [now is then for now, then in zip(before, after, strict=True)] == [True, True, True, False, True]
