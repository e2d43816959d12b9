"""The one state of the screen: what each change does to it."""

from dataclasses import replace
from pathlib import Path

from screen_fakes import NOW, STARTED, changed, four_services, gpu, metrics_line, run_status, service

from grpo_engine.wire.supervisor import (
    Bye,
    GpuStatus,
    Notice,
    RunChanged,
    RunState,
    ServiceState,
    Snapshot,
    UsageSampled,
)
from grpo_tui.view import state as view
from grpo_tui.view.state import Connection, ViewState, inference_service, phases_of_restart, reduce


def fresh() -> ViewState:
    return ViewState(run_folder=Path("/runs/a-run"), now=NOW)


def live() -> ViewState:
    return reduce(fresh(), Snapshot(number=5, status=run_status()))


def test_a_snapshot_connects_and_selects_the_trainer() -> None:
    state = live()
    assert state.connection is Connection.LIVE
    assert [service.name for service in state.services] == ["api", "vllm", "env", "trainer"]
    assert state.selected == "trainer"


def test_a_failed_service_is_selected_first() -> None:
    broken = [*four_services()[:1], service("vllm", state="failed", why="no CUDA"), *four_services()[2:]]
    assert reduce(fresh(), Snapshot(number=1, status=run_status(services=broken))).selected == "vllm"


def test_while_a_run_starts_the_log_of_what_it_waits_for_is_shown_until_somebody_chooses() -> None:
    """Nobody saw what vLLM did for a minute: the log of the trainer, which had not begun, was shown."""
    starting = [*four_services()[:1], service("vllm", state="starting"), *four_services()[2:]]
    status = run_status(services=starting, state=RunState.STARTING)
    state = reduce(fresh(), Snapshot(number=1, status=status))
    assert state.selected == "vllm"
    moved_on = reduce(state, changed(2, NOW, service("vllm", state="ready")))
    moved_on = reduce(moved_on, changed(3, NOW, service("env", state="starting")))
    assert moved_on.selected == "env"
    chosen = reduce(reduce(state, view.ServiceSelected(name="api")), changed(2, NOW, service("env", state="starting")))
    assert chosen.selected == "api"


def test_a_restart_of_a_run_that_is_up_leaves_the_selection_to_the_person() -> None:
    assert reduce(live(), changed(6, NOW, service("vllm", state="starting"))).selected == "trainer"


def test_a_later_snapshot_keeps_the_selection() -> None:
    state = reduce(live(), view.ServiceSelected(name="api"))
    assert reduce(state, Snapshot(number=9, status=run_status())).selected == "api"


def test_events_that_the_snapshot_holds_already_change_nothing() -> None:
    state = live()
    assert reduce(state, changed(5, NOW, service("vllm", state="failed"))) is state


def test_a_service_event_replaces_that_service_only() -> None:
    state = reduce(live(), changed(6, NOW, service("vllm", state="stopping")))
    assert [service.state.value for service in state.services] == ["ready", "stopping", "ready", "ready"]


def test_an_event_before_any_snapshot_does_not_invent_a_run() -> None:
    assert reduce(fresh(), changed(6, NOW, service("vllm"))).status is None


def test_the_phases_of_a_restart_carry_their_times() -> None:
    state = live()
    for number, (time, word) in enumerate([(100.0, "stopping"), (100.4, "starting"), (137.0, "ready")], start=6):
        state = reduce(state, changed(number, time, service("vllm", state=word)))
    phases = phases_of_restart(state, "vllm")
    assert [(phase.state.value, phase.time) for phase in phases] == [
        ("stopping", 100.0),
        ("starting", 100.4),
        ("ready", 137.0),
    ]


def entering(*words: str) -> ViewState:
    """A run in which vLLM went from ready through these states, one a second."""
    state = live()
    for number, word in enumerate(words, start=6):
        state = reduce(state, changed(number, 100.0 + number, service("vllm", state=word)))
    return state


def words_of_restart(state: ViewState) -> list[str]:
    return [phase.state.value for phase in phases_of_restart(state, "vllm")]


def test_a_restart_ends_where_it_led() -> None:
    assert words_of_restart(entering("stopping", "waiting", "starting", "ready", "unhealthy", "ready")) == [
        "stopping",
        "waiting",
        "starting",
        "ready",
    ]


def test_a_start_after_a_stop_does_not_count_the_time_in_between() -> None:
    assert words_of_restart(entering("stopping", "stopped")) == ["stopping", "stopped"]
    assert words_of_restart(entering("stopping", "stopped", "waiting", "starting")) == ["waiting", "starting"]


def test_the_phases_of_a_start_keep_their_time_while_they_count_on_and_begin_anew_with_the_next_start() -> None:
    state = entering("stopping", "starting")
    for number, (time, words) in enumerate([(120.0, "loading, 1 of 4"), (125.0, "loading, 2 of 4"), (130.0, "graphs")]):
        state = reduce(state, changed(20 + number, time, service("vllm", state="starting", phase=words)))
    told = [(phase.words, phase.since) for phase in state.start_phases["vllm"]]
    assert told == [("loading, 2 of 4", 120.0), ("graphs", 130.0)]
    state = reduce(state, changed(30, 140.0, service("vllm", state="stopping")))
    state = reduce(state, changed(31, 141.0, service("vllm", state="starting")))
    assert state.start_phases["vllm"] == ()


def test_a_phase_that_began_before_anybody_looked_has_no_time() -> None:
    loading = run_status(services=[service("vllm", state="starting", phase="loading, 1 of 4")])
    state = reduce(fresh(), Snapshot(number=5, status=loading))
    state = reduce(state, changed(6, 100.0, service("vllm", state="starting", phase="loading, 2 of 4")))
    assert [(phase.words, phase.since) for phase in state.start_phases["vllm"]] == [("loading, 2 of 4", None)]


def test_a_command_that_ends_a_stranger_is_told_as_such() -> None:
    state = reduce(live(), view.CommandSent(do="start", service="vllm", time=NOW, takes_ports=True))
    assert state.outcome is not None
    assert state.outcome.text == "start vllm, ending the process on its port …"


def test_a_service_that_never_restarted_has_no_phases() -> None:
    assert phases_of_restart(live(), "vllm") == ()


def test_the_same_state_twice_is_one_transition() -> None:
    state = reduce(live(), changed(6, 100.0, service("vllm", state="starting", why="loads weights")))
    state = reduce(state, changed(7, 105.0, service("vllm", state="starting", why="captures graphs")))
    assert [transition.time for transition in state.transitions["vllm"]][-1] == 100.0


def test_usage_replaces_loads_and_gpus_and_leaves_unknown_unknown() -> None:
    usage = UsageSampled(
        number=6, time=NOW, cpu_percent={"vllm": 12.5}, rss_bytes={"vllm": 7}, gpu_memory_bytes={}, gpus=[gpu(1)]
    )
    state = reduce(live(), usage)
    vllm, api = state.service("vllm"), state.service("api")
    assert vllm is not None
    assert (vllm.cpu_percent, vllm.rss_bytes, vllm.gpu_memory_bytes) == (12.5, 7, None)
    assert api is not None
    assert api.cpu_percent is None
    assert state.status is not None
    assert [one.index for one in state.status.gpus] == [1]


def test_a_run_that_ends_says_when() -> None:
    state = reduce(live(), RunChanged(number=6, time=NOW + 9, state=RunState.FINISHED))
    assert state.has_ended
    assert state.status is not None
    assert state.status.ended_at == NOW + 9


def test_goodbye_ends_the_connection_with_its_state() -> None:
    state = reduce(live(), Bye(state=RunState.STOPPED))
    assert state.connection is Connection.ENDED
    assert "stopped" in state.connection_note


def test_a_lost_connection_keeps_the_last_known_services_until_a_snapshot_comes() -> None:
    lost = reduce(live(), view.ConnectionLost(note="no answer"))
    assert lost.connection is Connection.LOST
    assert len(lost.services) == 4
    again = reduce(lost, Snapshot(number=1, status=run_status()))
    assert (again.connection, again.connection_note, again.last_number) == (Connection.LIVE, "", 1)


def test_metrics_bring_their_warnings_with_them() -> None:
    bad = tuple(metrics_line(step, grpo__clipped_fraction=0.5) for step in range(1, 7))
    state = reduce(live(), view.MetricsRead(lines=bad))
    assert [warning.id for warning in state.warnings] == ["clipped-fraction"]
    healthy = tuple(metrics_line(step) for step in range(7, 13))
    assert reduce(state, view.MetricsRead(lines=healthy)).warnings == ()


def test_a_warning_of_the_daemon_is_not_shown_twice() -> None:
    from grpo_engine.wire.supervisor import Warning

    said = Warning(id="failed:vllm", severity="error", text="vllm failed at 12:00")
    broken = [service("vllm", state="failed", why="boom")]
    state = reduce(fresh(), Snapshot(number=1, status=run_status(services=broken, warnings=[said], gpus=[])))
    assert [warning.text for warning in state.warnings] == ["vllm failed at 12:00"]


def test_errors_stand_before_warnings() -> None:
    bad = tuple(metrics_line(step, grpo__clipped_fraction=0.5, train__loss=-30.0) for step in range(1, 7))
    assert [w.severity for w in reduce(live(), view.MetricsRead(lines=bad)).warnings] == ["error", "warning"]


def test_log_lines_of_another_service_are_not_mixed_in() -> None:
    state = live()
    assert reduce(state, view.LogRead(service="api", lines=("x",))) is state


def test_the_open_line_of_a_progress_bar_is_replaced_not_appended() -> None:
    state = reduce(live(), view.LogRead(service="trainer", lines=("a",), open_line="10%"))
    state = reduce(state, view.LogRead(service="trainer", lines=(), open_line="90%"))
    assert (state.log.lines, state.log.open_line) == (("a",), "90%")


def test_a_log_in_memory_is_bounded_and_counts_what_it_dropped() -> None:
    state = reduce(live(), view.LogRead(service="trainer", lines=tuple(map(str, range(view.MAX_LOG_LINES)))))
    state = reduce(state, view.LogRead(service="trainer", lines=("new", "newer")))
    assert len(state.log.lines) == view.MAX_LOG_LINES
    assert (state.log.lines[0], state.log.lines[-1], state.log.num_dropped) == ("2", "newer", 2)


def test_a_restarted_log_replaces_the_old_one() -> None:
    state = reduce(live(), view.LogRead(service="trainer", lines=("old",)))
    state = reduce(state, view.LogRead(service="trainer", lines=("new",), is_restarted=True))
    assert state.log.lines == ("new",)


def test_the_selection_stops_at_both_ends_and_clears_the_log() -> None:
    state = reduce(live(), view.LogRead(service="trainer", lines=("x",)))
    assert reduce(state, view.SelectionMoved(by=1)).log == state.log
    up = reduce(state, view.SelectionMoved(by=-1))
    assert (up.selected, up.log.service, up.log.lines) == ("env", "env", ())
    assert reduce(up, view.SelectionMoved(by=-9)).selected == "api"


def test_selecting_another_service_follows_its_log_again() -> None:
    held = reduce(live(), view.FollowChanged(is_following=False))
    assert reduce(held, view.ServiceSelected(name="vllm")).is_following


def test_a_refused_command_is_said_with_its_reason() -> None:
    state = reduce(live(), view.CommandRefused(do="restart", service="vllm", error="the run is ending", time=NOW))
    assert state.outcome is not None
    assert state.outcome.severity == "error"
    assert "restart vllm" in state.outcome.text
    assert "the run is ending" in state.outcome.text


def test_a_notice_is_shown_and_kept() -> None:
    state = reduce(live(), Notice(number=6, time=NOW, severity="info", service="vllm", text="GPU free after 0.3 s"))
    assert state.outcome is not None
    assert state.outcome.text == "vllm: GPU free after 0.3 s"
    assert len(state.notices) == 1


def test_the_restart_key_is_for_the_selected_inference_server_or_the_first() -> None:
    two = [service("a", kind="inference"), service("b", kind="inference"), service("c")]
    state = reduce(fresh(), Snapshot(number=1, status=run_status(services=two)))
    assert inference_service(state) == "a"
    assert inference_service(reduce(state, view.ServiceSelected(name="b"))) == "b"


def test_a_plain_command_called_vllm_counts_as_inference() -> None:
    commands = [service("vllm", kind="command"), service("web", kind="command")]
    assert inference_service(reduce(fresh(), Snapshot(number=1, status=run_status(services=commands)))) == "vllm"
    none = reduce(fresh(), Snapshot(number=1, status=run_status(services=commands[1:])))
    assert inference_service(none) is None


def test_the_clock_moves_time_and_nothing_else() -> None:
    state = live()
    assert reduce(state, view.Ticked(now=NOW + 1)) == replace(state, now=NOW + 1)


def test_unknown_gpu_memory_stays_unknown() -> None:
    mig = GpuStatus(
        index=0, uuid="MIG-1", name="MIG", memory_used_bytes=None, memory_total_bytes=None, utilization_percent=None
    )
    state = reduce(fresh(), Snapshot(number=1, status=run_status(gpus=[mig])))
    assert state.warnings == ()
    assert state.services[0].state is ServiceState.READY
    assert state.status is not None
    assert state.status.started_at == STARTED
