"""The one state of the screen: what each change does to it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from screen_fakes import NOW, STARTED, changed, four_services, gpu, metrics_line, run_status, service

from grpo_engine.wire.supervisor import (
    Bye,
    GpuStatus,
    Notice,
    RunChanged,
    RunState,
    RunStatus,
    ServiceState,
    ServiceStatus,
    Snapshot,
    UsageSampled,
    Warning,
)
from grpo_tui.view import state as view
from grpo_tui.view.state import Connection, ViewState, inference_service, phases_of_restart, reduce


def fresh() -> ViewState:
    return ViewState(run_folder=Path("/runs/a-run"), now=NOW)


def after(state: ViewState, *changes: Any) -> ViewState:
    for change in changes:
        state = reduce(state, change)
    return state


def showing(*services: ServiceStatus, **changes: Any) -> ViewState:
    """Connected to a run with these services."""
    return after(fresh(), Snapshot(number=1, status=run_status(services=list(services), **changes)))


def live() -> ViewState:
    return after(fresh(), Snapshot(number=5, status=run_status()))


def vllm(number: int, time: float, state: str, **known: Any) -> Any:
    return changed(number, time, service("vllm", state=state, **known))


def with_vllm(state: str) -> list[ServiceStatus]:
    """The usual stack with its server in this state."""
    api, _, *others = four_services()
    return [api, service("vllm", state=state), *others]


def status_of(state: ViewState) -> RunStatus:
    assert state.status is not None
    return state.status


# --- selection -------------------------------------------------------------------------------------------------------


def test_a_snapshot_connects_and_selects_the_trainer_or_a_failed_service() -> None:
    state = live()
    assert state.connection is Connection.LIVE
    assert [service.name for service in state.services] == ["api", "vllm", "env", "trainer"]
    assert state.selected == "trainer"
    assert showing(*with_vllm("failed")).selected == "vllm"


def test_while_a_run_starts_the_service_it_waits_for_is_selected_unless_the_user_chose_one() -> None:
    state = showing(*with_vllm("starting"), state=RunState.STARTING)
    assert state.selected == "vllm"
    env_starts = changed(3, NOW, service("env", state="starting"))
    assert after(state, vllm(2, NOW, "ready"), env_starts).selected == "env"
    assert after(state, view.ServiceSelected(name="api"), env_starts).selected == "api"


def test_neither_a_restart_of_a_run_that_is_up_nor_a_later_snapshot_moves_the_selection() -> None:
    assert after(live(), vllm(6, NOW, "starting")).selected == "trainer"
    again = Snapshot(number=9, status=run_status())
    assert after(live(), view.ServiceSelected(name="api"), again).selected == "api"


def test_the_selection_stops_at_both_ends_and_clears_the_log() -> None:
    state = after(live(), view.LogRead(service="trainer", lines=("x",)))
    assert after(state, view.SelectionMoved(by=1)).log == state.log
    up = after(state, view.SelectionMoved(by=-1))
    assert (up.selected, up.log.service, up.log.lines) == ("env", "env", ())
    assert after(up, view.SelectionMoved(by=-9)).selected == "api"


def test_selecting_another_service_follows_its_log_again() -> None:
    assert after(live(), view.FollowChanged(is_following=False), view.ServiceSelected(name="vllm")).is_following


def test_the_restart_key_is_for_the_selected_inference_server_or_the_first() -> None:
    state = showing(service("a", kind="inference"), service("b", kind="inference"), service("c"))
    assert inference_service(state) == "a"
    assert inference_service(after(state, view.ServiceSelected(name="b"))) == "b"
    web = service("web", kind="command")
    assert inference_service(showing(service("vllm", kind="command"), web)) == "vllm", "a command called vllm counts"
    assert inference_service(showing(web)) is None


# --- services and their restarts -------------------------------------------------------------------------------------


def test_a_service_event_replaces_that_service_only() -> None:
    state = after(live(), vllm(6, NOW, "stopping"))
    assert [service.state.value for service in state.services] == ["ready", "stopping", "ready", "ready"]


def test_events_that_the_snapshot_includes_and_those_before_any_snapshot_change_nothing() -> None:
    state = live()
    assert after(state, vllm(5, NOW, "failed")) is state
    assert after(fresh(), vllm(6, NOW, "ready")).status is None


@pytest.mark.parametrize(
    ("entered", "phases"),
    [
        ("", ""),
        ("stopping starting ready", "stopping starting ready"),
        ("stopping waiting starting ready unhealthy ready", "stopping waiting starting ready"),
        ("stopping stopped", "stopping stopped"),
        ("stopping stopped waiting starting", "waiting starting"),
    ],
)
def test_the_phases_of_a_restart_end_where_it_led_and_have_their_times(entered: str, phases: str) -> None:
    events = [vllm(number, 100.0 + number, state) for number, state in enumerate(entered.split(), start=6)]
    found = phases_of_restart(after(live(), *events), "vllm")
    assert [phase.state.value for phase in found] == phases.split()
    times = {event.service.state: event.time for event in reversed(events)}
    assert [phase.time for phase in found] == [times[phase.state] for phase in found]


def test_the_phases_of_a_start_keep_their_time_while_they_count_on_and_begin_anew_with_the_next_start() -> None:
    state = after(live(), vllm(6, 106.0, "stopping"), vllm(7, 107.0, "starting"))
    for number, (time, words) in enumerate([(120.0, "loading, 1 of 4"), (125.0, "loading, 2 of 4"), (130.0, "graphs")]):
        state = after(state, vllm(20 + number, time, "starting", phase=words))
    phases = [(phase.words, phase.since) for phase in state.start_phases["vllm"]]
    assert phases == [("loading, 2 of 4", 120.0), ("graphs", 130.0)]
    state = after(state, vllm(30, 140.0, "stopping"), vllm(31, 141.0, "starting"))
    assert state.start_phases["vllm"] == ()


def test_a_phase_that_began_before_the_screen_connected_has_no_time() -> None:
    state = showing(service("vllm", state="starting", phase="loading, 1 of 4"))
    state = after(state, vllm(6, 100.0, "starting", phase="loading, 2 of 4"))
    assert [(phase.words, phase.since) for phase in state.start_phases["vllm"]] == [("loading, 2 of 4", None)]


def test_the_same_state_twice_is_one_transition() -> None:
    loading, capturing = (vllm(at, 94.0 + at, "starting", why=why) for at, why in ((6, "loads"), (7, "captures")))
    assert [transition.time for transition in after(live(), loading, capturing).transitions["vllm"]][-1] == 100.0


def test_usage_replaces_loads_and_gpus_and_leaves_unknown_unknown() -> None:
    state = after(live(), UsageSampled(
        number=6, time=NOW, cpu_percent={"vllm": 12.5}, rss_bytes={"vllm": 7}, gpu_memory_bytes={}, gpus=[gpu(1)]
    ))  # fmt: skip
    api, server, *_ = state.services
    assert (server.cpu_percent, server.rss_bytes, server.gpu_memory_bytes) == (12.5, 7, None)
    assert api.cpu_percent is None
    assert [one.index for one in status_of(state).gpus] == [1]


def test_unknown_gpu_memory_stays_unknown() -> None:
    unknown: dict[str, Any] = {"memory_used_bytes": None, "memory_total_bytes": None, "utilization_percent": None}
    state = showing(service("vllm"), gpus=[GpuStatus(index=0, uuid="MIG-1", name="MIG", **unknown)])
    assert state.warnings == ()
    assert state.services[0].state is ServiceState.READY
    assert status_of(state).started_at == STARTED


# --- the run and the connection --------------------------------------------------------------------------------------


def test_a_run_that_ends_has_its_end_time() -> None:
    state = after(live(), RunChanged(number=6, time=NOW + 9, state=RunState.FINISHED))
    assert state.has_ended
    assert status_of(state).ended_at == NOW + 9


def test_the_last_message_of_the_supervisor_ends_the_connection_with_the_state() -> None:
    state = after(live(), Bye(state=RunState.STOPPED))
    assert state.connection is Connection.ENDED
    assert "stopped" in state.connection_note


def test_a_lost_connection_keeps_the_last_known_services_until_a_snapshot_comes() -> None:
    lost = after(live(), view.ConnectionLost(note="no answer"))
    assert lost.connection is Connection.LOST
    assert len(lost.services) == 4
    again = after(lost, Snapshot(number=1, status=run_status()))
    assert (again.connection, again.connection_note, again.last_number) == (Connection.LIVE, "", 1)


def test_the_clock_moves_time_and_nothing_else() -> None:
    state = after(live(), view.Ticked(now=STARTED + 60))
    assert after(state, view.Ticked(now=STARTED + 61)) == replace(state, now=STARTED + 61)


def test_a_run_that_makes_no_steps_is_warned_of_as_time_passes_and_at_a_moment_of_the_past() -> None:
    lines = tuple(metrics_line(step) for step in range(1, 13))
    last = lines[-1].time
    state = after(live(), view.MetricsRead(lines=lines), view.Ticked(now=last + 59))
    assert state.warnings == ()
    [warning] = after(state, view.Ticked(now=last + 61)).warnings
    assert warning.text.startswith("no step for 1m01s (usually one takes 2.4s)")


# --- warnings and messages -------------------------------------------------------------------------------------------


def test_metrics_come_with_their_warnings_and_errors_first() -> None:
    bad = tuple(metrics_line(step, grpo__clipped_fraction=0.5, train__loss=-30.0) for step in range(1, 7))
    state = after(live(), view.Ticked(now=STARTED + 30), view.MetricsRead(lines=bad))
    assert [(warning.id, warning.severity) for warning in state.warnings] == [
        ("loss", "error"),
        ("clipped-fraction", "warning"),
    ]
    healthy = tuple(metrics_line(step) for step in range(7, 13))
    assert after(state, view.MetricsRead(lines=healthy)).warnings == ()


def test_a_warning_of_the_supervisor_is_not_shown_twice() -> None:
    theirs = Warning(id="failed:vllm", severity="error", text="vllm failed at 12:00")
    state = showing(service("vllm", state="failed", why="boom"), warnings=[theirs], gpus=[])
    assert [warning.text for warning in state.warnings] == ["vllm failed at 12:00"]


@pytest.mark.parametrize(
    ("change", "severity", "text"),
    [
        (view.CommandSent(do="start", service="vllm", time=NOW, takes_ports=True), "info",
         "start vllm, ending the process on its port …"),
        (view.CommandRefused(do="restart", service="vllm", error="the run is ending", time=NOW), "error",
         "restart vllm refused: the run is ending"),
        (Notice(number=6, time=NOW, severity="info", service="vllm", text="GPU free after 0.3 s"), "info",
         "vllm: GPU free after 0.3 s"),
        (Notice(number=6, time=NOW, severity="info", service="vllm", text="vllm ended in 0.3 s"), "info",
         "vllm ended in 0.3 s"),
        (Notice(number=6, time=NOW, severity="info", service="vllm", text="vllm: the crash report is x"), "info",
         "vllm: the crash report is x"),
    ],
)  # fmt: skip
def test_commands_their_refusals_and_notices_are_shown(change: Any, severity: str, text: str) -> None:
    state = after(live(), change)
    assert state.outcome is not None
    assert (state.outcome.severity, state.outcome.text) == (severity, text)
    assert state.messages == (state.outcome,)


# --- the log ---------------------------------------------------------------------------------------------------------


def trainer_log(*lines: str, **changes: Any) -> view.LogRead:
    return view.LogRead(service="trainer", lines=lines, **changes)


def test_log_lines_of_another_service_are_not_mixed_in() -> None:
    state = live()
    assert after(state, view.LogRead(service="api", lines=("x",))) is state


def test_the_open_line_of_a_progress_bar_and_a_restarted_log_are_replaced() -> None:
    state = after(live(), trainer_log("a", open_line="10%"), trainer_log(open_line="90%"))
    assert (state.log.lines, state.log.open_line) == (("a",), "90%")
    assert after(state, trainer_log("new", is_restarted=True)).log.lines == ("new",)


def test_a_log_in_memory_is_bounded_and_counts_what_it_dropped() -> None:
    state = after(live(), trainer_log(*map(str, range(view.MAX_LOG_LINES))), trainer_log("new", "newer"))
    assert len(state.log.lines) == view.MAX_LOG_LINES
    assert (state.log.lines[0], state.log.lines[-1], state.log.num_dropped) == ("2", "newer", 2)
