"""The life of services and runs is pure, so its tests need no process, no clock and no sleep."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.wire.supervisor import ProbeOutcome, Refusal, RunState
from grpo_engine.wire.supervisor import ServiceState as S
from grpo_tui.services.base import Launch, NeedCondition, Probe, RestartInPlace, RestartPolicy
from grpo_tui.supervisor import order, takeover
from grpo_tui.supervisor.explanations import why
from grpo_tui.supervisor.machine import (
    MAX_BACKOFF_S,
    UNKILLABLE_AFTER_S,
    Admitted,
    Effect,
    Event,
    Exited,
    KillAsked,
    LimitExceeded,
    ProbeAnswered,
    Progressed,
    Refused,
    RestartAsked,
    RestartedInPlace,
    RestartRequired,
    Service,
    Spawned,
    StartAsked,
    StopAsked,
    Tick,
    adopted,
    backoff_s,
    step,
)
from grpo_tui.supervisor.state_file import Ledger, boot_id, to_ledger

READY_WITHIN_60_S = Probe(http="http://127.0.0.1:1/health", within_s=60)
READY_WITHIN_60_S_OR_MOVING = Probe(http="http://127.0.0.1:1/health", within_s=60, stalled_s=30)
TAKEN = Refusal(resource="port", port=9001, text="port 9001 is held by pid 7 (user eve): nc")
IN_PLACE = RestartInPlace(signal="SIGHUP", log="restarted")
READY, STARTED, FINISHED = NeedCondition.READY, NeedCondition.STARTED, NeedCondition.FINISHED


def launch(name: str = "vllm", **changes: Any) -> Launch:
    """A service that restarts on failure and has a readiness probe, unless a test says otherwise."""
    settings_of: dict[str, Any] = {
        "name": name,
        "kind": "command",
        "argv": ("true",),
        "cwd": Path("/"),
        "needs": {},
        "ready": READY_WITHIN_60_S,
        "live": None,
        "restart": RestartPolicy.ON_FAILURE,
        "restart_unhealthy": False,
        "max_restarts": 2,
        "restart_window_s": 600.0,
        "backoff_s": 1.0,
        "stop_grace_s": 10.0,
        "stop_signal": signal.SIGTERM,
        "ports": (),
        "gpus": (),
        "ends_run": None,
    }
    return Launch(**{**settings_of, **changes})


def launches(*made: Launch) -> Mapping[str, Launch]:
    return {each.name: each for each in made}


def play(how: Launch, *timed: tuple[float, Event], service: Service | None = None) -> tuple[Service, list[Effect]]:
    service = service or Service(name=how.name)
    effects: list[Effect] = []
    for now_s, event in timed:
        service, new = step(service, event, now_s, how)
        effects += new
    return service, effects


def passed(attempt: int = 1, in_place: int = 0) -> ProbeAnswered:
    words = "/health answers 200"
    return ProbeAnswered(attempt=attempt, num_in_place_restarts=in_place, outcome=ProbeOutcome.PASSED, words=words)


def refused(attempt: int = 1) -> ProbeAnswered:
    return ProbeAnswered(attempt=attempt, outcome=ProbeOutcome.BAD_STATUS, words="/health answers 503")


def restart(at_s: float) -> tuple[tuple[float, Event], ...]:
    """A request for a restart that no follower holds up."""
    return (at_s, RestartAsked()), (at_s, Admitted())


UP = ((0.0, Admitted()), (0.1, Spawned()), (5.0, passed()))


def test_a_service_is_ready_when_its_probe_says_so() -> None:
    service, effects = play(launch(), (0.0, Admitted()), (0.1, Spawned()), (1.0, refused()))
    assert (service.state, service.answer) == (S.STARTING, "/health answers 503")
    service, _ = play(launch(), (5.0, passed()), service=service)
    assert service.state is S.READY
    assert effects == [Effect.SPAWN]


def test_a_service_without_a_probe_is_ready_as_soon_as_it_runs() -> None:
    service, _ = play(launch(ready=None), (0.0, Admitted()))
    assert service.state is S.STARTING
    service, _ = play(launch(ready=None), (0.1, Spawned()), service=service)
    assert service.state is S.READY


def test_a_late_answer_about_an_earlier_attempt_changes_nothing() -> None:
    how = launch()
    service, _ = play(how, *UP, *restart(6.0), (7.0, Exited(code=0)), (7.0, Admitted()), (7.1, passed(1)))
    assert (service.state, service.attempt) == (S.STARTING, 2)


@pytest.mark.parametrize(
    ("policy", "code", "state"),
    [
        (RestartPolicy.NEVER, 0, S.FINISHED),
        (RestartPolicy.NEVER, 3, S.FAILED),
        (RestartPolicy.ON_FAILURE, 0, S.FINISHED),
        (RestartPolicy.ON_FAILURE, 3, S.BACKOFF),
        (RestartPolicy.ON_FAILURE, None, S.BACKOFF),
        (RestartPolicy.ON_FAILURE, -9, S.BACKOFF),
        (RestartPolicy.ALWAYS, 0, S.BACKOFF),
        (RestartPolicy.ALWAYS, 3, S.BACKOFF),
    ],
)
def test_the_restart_policy_decides_what_an_end_means(policy: RestartPolicy, code: int | None, state: S) -> None:
    service, _ = play(launch(restart=policy), *UP, (9.0, Exited(code=code)))
    assert service.state is state


def test_back_off_doubles_up_to_a_minute_and_is_spread_by_a_quarter() -> None:
    delays = [backoff_s(launch(), number, 0.0) for number in range(8)]
    assert delays == [1, 2, 4, 8, 16, 32, MAX_BACKOFF_S, MAX_BACKOFF_S]
    assert backoff_s(launch(), 2, 1.0) == 5.0


def test_it_fails_once_its_restarts_are_used_up_and_says_so() -> None:
    how = launch(max_restarts=2)
    service, now_s = Service(name="vllm"), 0.0
    for _ in range(3):
        service, _ = play(how, (now_s, Admitted()), (now_s, Exited(code=3, last_lines=("boom",))), service=service)
        now_s = service.deadline_s or now_s
        service, _ = step(service, Tick(), now_s, how)
    assert (service.state, service.attempt) == (S.FAILED, 3)
    assert service.reason == "exit code 3; given up after 2 restarts"
    words = why("vllm", {"vllm": service}, launches(how), now_s)
    assert words == "exit code 3; given up after 2 restarts; last lines:\n  boom"


@pytest.mark.parametrize("policy", list(RestartPolicy))
def test_an_exit_that_says_a_setting_is_wrong_is_final_and_its_reason_is_the_last_line(policy: RestartPolicy) -> None:
    how = launch(restart=policy, final_exit_codes=(2,))
    said = "grpo-engine env: task: my_onw cannot be imported"
    service, _ = play(how, (0.0, Admitted()), (0.1, Spawned()), (1.0, Exited(code=2, last_lines=(said,))))
    assert (service.state, service.reason) == (S.FAILED, f"exit code 2: {said}")
    assert why("vllm", {"vllm": service}, launches(how), 1.0) == f"exit code 2: {said}"
    service, _ = play(how, (0.0, Admitted()), (0.1, Spawned()), (1.0, Exited(code=2, last_lines=("first", "x" * 300))))
    assert service.reason == f"exit code 2: {'x' * 199}…"
    words = why("vllm", {"vllm": service}, launches(how), 1.0)
    assert words == f"{service.reason}; last lines:\n  first\n  {'x' * 300}"


def test_a_command_that_exits_with_code_2_is_restarted_as_its_policy_says() -> None:
    service, _ = play(launch(), *UP, (9.0, Exited(code=2)))
    assert service.state is S.BACKOFF


def test_a_stop_that_ends_in_a_final_exit_code_is_a_stop() -> None:
    service, _ = play(launch(final_exit_codes=(2,)), *UP, (6.0, StopAsked()), (7.0, Exited(code=2)))
    assert service.state is S.STOPPED


def test_a_service_in_backoff_shows_its_last_log_line() -> None:
    how = launch()
    service, _ = play(how, *UP, (9.0, Exited(code=1, last_lines=("Traceback", "ValueError: no data"))))
    words = why("vllm", {"vllm": service}, launches(how), 9.0)
    assert words == "exit code 1; restart 1 of 2 after 1.0 s; last line: ValueError: no data"


def test_restarts_before_the_window_no_longer_count() -> None:
    how = launch(max_restarts=1, restart_window_s=100.0)
    service, _ = play(how, (0.0, Admitted()), (0.0, Exited(code=1)), (1.0, Tick()), (1.0, Admitted()))
    late, _ = play(how, (200.0, Exited(code=1)), service=service)
    soon, _ = play(how, (50.0, Exited(code=1)), service=service)
    assert (late.state, soon.state) == (S.BACKOFF, S.FAILED)


def test_never_becoming_ready_is_a_failure_with_its_own_reason() -> None:
    how = launch(restart=RestartPolicy.NEVER)
    timed = ((0.0, Admitted()), (1.0, refused()), (59.9, Tick()), (60.0, Tick()), (61.0, Exited(code=-15)))
    service, effects = play(how, *timed)
    assert effects == [Effect.SPAWN, Effect.STOP]
    assert service.state is S.FAILED
    assert service.reason == "not ready within 60 s: /health answers 503"


def test_a_start_that_makes_progress_gets_more_time_until_it_stalls() -> None:
    how = launch(ready=Probe(tcp="a:1", within_s=60, stalled_s=20), restart=RestartPolicy.NEVER)
    service, _ = play(how, (0.0, Admitted()), (0.0, Spawned()), (55.0, Progressed(attempt=1, phase="loading weights")))
    service, effects = step(service, Tick(), 60.0, how)
    assert (service.state, service.deadline_s, effects) == (S.STARTING, 75.0, ())
    service, _ = play(how, (74.0, Progressed(attempt=1, phase=None)), (75.0, Tick()), service=service)
    assert (service.state, service.deadline_s, service.phase) == (S.STARTING, 94.0, "loading weights")
    service, effects = step(service, Tick(), 94.0, how)
    assert (service.state, effects) == (S.STOPPING, (Effect.STOP,))
    service, _ = step(service, Exited(code=-15), 95.0, how)
    words = "not ready after 94 s and no progress for 20 s (loading weights): its probe never answered"
    assert (service.state, service.reason) == (S.FAILED, words)


def test_checking_ports_and_memory_does_not_count_against_the_readiness_limit() -> None:
    service, _ = play(launch(), (0.0, Admitted()), (50.0, Spawned()), (60.0, Tick()))
    assert (service.state, service.deadline_s) == (S.STARTING, 110.0)


def test_a_start_that_is_refused_after_its_time_was_up_has_failed() -> None:
    service, _ = play(launch(), (0.0, Admitted()), (60.0, Tick()))
    assert service.state is S.STOPPING
    service, _ = play(launch(), (61.0, Refused("stopped before it was started")), service=service)
    assert service.state is S.FAILED
    assert (service.reason or "").startswith("not ready within 60 s")


def test_without_stalled_s_a_start_fails_at_the_limit_though_it_makes_progress() -> None:
    how = launch()
    service, _ = play(how, (0.0, Admitted()), (59.0, Progressed(attempt=1, phase=None)), (60.0, Tick()))
    assert service.state is S.STOPPING


def test_an_end_before_it_was_ready_says_so_though_the_exit_code_is_0() -> None:
    service, _ = play(launch(), (0.0, Admitted()), (0.1, Spawned()), (0.5, refused()), (1.0, Exited(code=0)))
    assert service.state is S.FINISHED
    assert service.reason == "exit code 0 before it was ready (/health answers 503)"


def test_a_service_that_takes_too_much_is_ended_as_failed_and_the_policy_decides() -> None:
    service, effects = play(launch(), *UP, (9.0, LimitExceeded("holds 12.1 GB, over its limit of 10 GB")))
    assert (service.state, effects[-1]) == (S.STOPPING, Effect.STOP)
    service, _ = play(launch(), (9.5, Exited(code=-15)), service=service)
    assert service.state is S.BACKOFF
    assert service.reason is not None
    assert service.reason.startswith("holds 12.1 GB, over its limit of 10 GB; restart 1 of 2")


def test_a_live_probe_without_a_good_answer_makes_it_unhealthy_until_there_is_one() -> None:
    how = launch(live=Probe(http="http://127.0.0.1:1/health", within_s=30))
    service, effects = play(how, *UP, (20.0, passed()), (36.0, Tick()))
    assert service.state is S.READY
    service, effects = play(how, (49.0, refused()), (50.0, Tick()), service=service)
    assert (service.state, effects) == (S.UNHEALTHY, [])
    assert service.reason == "no liveness for 30 s: /health answers 503"
    service, _ = play(how, (55.0, passed()), service=service)
    assert service.state is S.READY


def test_an_unhealthy_service_is_restarted_where_the_policy_says_so() -> None:
    how = launch(live=Probe(tcp="a:1", within_s=30), restart_unhealthy=True)
    service, effects = play(how, *UP, (35.0, Tick()))
    assert effects == [Effect.SPAWN, Effect.STOP]
    service, _ = play(how, (36.0, Exited(code=-15)), service=service)
    assert service.state is S.BACKOFF


def test_a_restart_by_hand_counts_as_no_failure() -> None:
    how = launch(restart=RestartPolicy.NEVER)
    service, effects = play(how, *UP, *restart(6.0), (7.0, Exited(code=-15)))
    assert (service.state, service.restarted_at_s) == (S.WAITING, ())
    assert effects == [Effect.SPAWN, Effect.STOP]


def test_a_stop_while_it_restarts_wins() -> None:
    service, _ = play(launch(), *UP, *restart(6.0), (6.5, StopAsked()), (7.0, Exited(code=-15)))
    assert service.state is S.STOPPED


def test_a_start_while_it_stops_is_done_after_the_stop() -> None:
    service, effects = play(launch(), *UP, (6.0, StopAsked()), (6.5, StartAsked()), (7.0, Exited(code=-15)))
    assert service.state is S.WAITING
    assert effects == [Effect.SPAWN, Effect.STOP]


def test_a_stop_escalates_to_sigkill_and_reports_what_outlives_it_as_failed() -> None:
    how = launch(stop_grace_s=10.0)
    service, effects = play(how, *UP, (6.0, StopAsked()), (17.9, Tick()), (18.0, Tick()))
    assert effects == [Effect.SPAWN, Effect.STOP, Effect.KILL]
    service, effects = play(how, (18.0 + UNKILLABLE_AFTER_S, Tick()), service=service)
    assert (service.state, service.has_process, effects) == (S.FAILED, True, [])
    service, effects = play(how, (99.0, StartAsked()), (99.0, Admitted()), service=service)
    assert (service.state, effects) == (S.FAILED, [])
    service, effects = play(how, (120.0, Exited(code=-9)), service=service)
    assert (service.state, service.has_process, effects) == (S.FAILED, False, [])


def test_a_taken_port_fails_it_whatever_the_policy_says() -> None:
    how = launch(restart=RestartPolicy.ALWAYS)
    service, _ = play(how, (0.0, Admitted()), (0.1, Refused(TAKEN.text, (TAKEN,))))
    assert (service.state, service.is_refused, service.has_process) == (S.FAILED, True, False)
    assert (service.reason, service.refusals) == (TAKEN.text, (TAKEN,))


def test_an_adopted_service_goes_on_in_the_state_its_last_supervisor_saw() -> None:
    how = launch()
    ready, _ = play(how, *UP)
    assert adopted(ready, 100.0, how).state is S.READY
    watched = launch(live=Probe(tcp="a:1", within_s=30))
    assert adopted(replace(ready, deadline_s=50.0), 100.0, watched).deadline_s == 130.0
    late, _ = play(how, (0.0, Admitted()), (0.1, Spawned()))
    probe = READY_WITHIN_60_S
    assert adopted(late, 100.0, how).deadline_s == 100.0 + 2 * probe.timeout_s + probe.interval_s
    unseen = adopted(Service(name="vllm", attempt=2), 100.0, how)
    assert (unseen.state, unseen.deadline_s, unseen.has_process) == (S.STARTING, 160.0, True)


# --- restarts in place ---------------------------------------------------------------------------------------------


def test_a_restart_in_place_keeps_the_process_and_is_ready_once_the_new_start_answers() -> None:
    how = launch(restart_in_place=IN_PLACE)
    service, effects = play(how, *UP, *restart(6.0))
    assert (service.state, service.has_process, service.is_running) == (S.STARTING, True, False)
    service, _ = play(how, (6.1, passed(in_place=0)), (6.2, passed(in_place=1)), service=service)
    assert service.state is S.STARTING, "the last start still answers"
    service, _ = play(how, (7.0, RestartedInPlace(num_in_place_restarts=1)), (7.1, passed(in_place=0)), service=service)
    assert (service.state, service.is_running, service.deadline_s) == (S.STARTING, True, 67.0)
    service, more = play(how, (9.0, passed(in_place=1)), service=service)
    assert (service.state, service.attempt, service.num_starts) == (S.READY, 1, 2)
    assert [*effects, *more] == [Effect.SPAWN, Effect.RESTART_IN_PLACE]


def test_a_restart_in_place_that_takes_longer_than_the_grace_becomes_a_stop_and_start_however_often_requested() -> None:
    how = launch(restart_in_place=IN_PLACE, stop_grace_s=10.0)
    service, effects = play(how, *UP, *restart(6.0), *restart(15.0), (16.0, Tick()))
    assert effects == [Effect.SPAWN, Effect.RESTART_IN_PLACE, Effect.RESTART_IN_PLACE, Effect.STOP]
    assert (service.state, service.reason) == (
        S.STOPPING,
        "did not restart in place within 10 s: stopped and started instead",
    )
    service, effects = play(how, (17.0, Exited(code=0)), (17.0, Admitted()), service=service)
    assert (service.state, service.attempt, effects) == (S.STARTING, 2, [Effect.SPAWN])


def test_a_restart_in_place_that_does_not_become_ready_fails_as_any_start() -> None:
    how = launch(restart_in_place=IN_PLACE, restart=RestartPolicy.NEVER)
    service, effects = play(how, *UP, *restart(6.0), (7.0, RestartedInPlace(num_in_place_restarts=1)), (67.0, Tick()))
    assert effects[-1] is Effect.STOP
    service, _ = step(service, Exited(code=0), 68.0, how)
    assert (service.state, service.reason) == (S.FAILED, "not ready within 60 s: its probe never answered")


def test_a_service_that_exits_instead_of_restarting_in_place_is_started_again_whatever_the_policy() -> None:
    how = launch(restart_in_place=IN_PLACE, restart=RestartPolicy.NEVER)
    service, _ = play(how, *UP, *restart(6.0), (6.1, Exited(code=-1)))
    assert (service.state, service.restarted_at_s) == (S.WAITING, ())
    after, _ = play(how, *UP, *restart(6.0), (6.5, RestartedInPlace(num_in_place_restarts=1)), (6.6, Exited(code=1)))
    assert after.state is S.FAILED


def test_an_unhealthy_service_and_one_that_starts_restart_in_place_too() -> None:
    how = launch(restart_in_place=IN_PLACE, live=Probe(tcp="a:1", within_s=30))
    unhealthy, _ = play(how, *UP, (35.0, Tick()))
    assert unhealthy.state is S.UNHEALTHY
    starting, _ = play(how, (0.0, Admitted()), (0.1, Spawned()))
    for service in (unhealthy, starting):
        assert play(how, *restart(40.0), service=service)[1] == [Effect.RESTART_IN_PLACE]
    unseen, _ = play(how, (0.0, Admitted()))
    assert play(how, *restart(0.1), service=unseen)[1] == [Effect.STOP], "it has no process yet to send a signal to"


def test_a_follower_is_stopped_though_it_could_restart_in_place() -> None:
    how = launch(restart_in_place=IN_PLACE)
    assert play(how, *UP, (6.0, RestartRequired("restarted because vllm restarts")))[1][-1] is Effect.STOP


def test_a_required_restart_does_not_undo_a_stop_by_request() -> None:
    service, _ = play(launch(), *UP, (6.0, StopAsked()), (6.1, RestartRequired("late")), (7.0, Exited(code=-15)))
    assert service.state is S.STOPPED


def test_a_restart_is_pending_until_it_is_admitted_and_a_stop_cancels_it() -> None:
    pending, effects = play(launch(), *UP, (6.0, RestartAsked()))
    assert (pending.state, pending.is_restart_pending, effects) == (S.READY, True, [Effect.SPAWN])
    admitted, effects = play(launch(), (7.0, Admitted()), service=pending)
    assert (admitted.state, admitted.is_restart_pending, effects) == (S.STOPPING, False, [Effect.STOP])
    for request in (StopAsked(), KillAsked()):
        assert not step(pending, request, 7.0, launch())[0].is_restart_pending
    waiting, _ = step(Service(name="vllm"), RestartAsked(), 0.0, launch())
    assert not waiting.is_restart_pending, "it starts anyway"


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_service_that_exits_while_its_restart_is_pending_is_started_again(exit_code: int) -> None:
    how = launch(restart=RestartPolicy.NEVER)
    service, _ = play(how, *UP, (6.0, RestartAsked()), (6.5, Exited(code=exit_code)), (7.0, Admitted()))
    assert (service.state, service.is_restart_pending) == (S.WAITING, False)


def test_a_service_without_a_probe_is_ready_as_soon_as_it_restarted_in_place() -> None:
    how = launch(restart_in_place=IN_PLACE, ready=None)
    service, _ = play(how, (0.0, Admitted()), (0.1, Spawned()), *restart(1.0))
    assert service.state is S.STARTING
    service, _ = step(service, RestartedInPlace(num_in_place_restarts=1), 1.5, how)
    assert service.state is S.READY


def test_a_service_taken_over_in_the_middle_of_a_restart_in_place_gets_its_grace_once_more() -> None:
    how = launch(restart_in_place=IN_PLACE, stop_grace_s=10.0)
    service, _ = play(how, *UP, *restart(6.0))
    taken = adopted(service, 100.0, how)
    assert (taken.state, taken.is_restarting_in_place) == (S.STARTING, True)
    assert (taken.is_running, taken.deadline_s) == (False, 110.0)
    assert step(taken, Spawned(), 100.1, how) == (taken, ()), "its process was there all the time"
    renewed, _ = step(taken, RestartedInPlace(num_in_place_restarts=1), 101.0, how)
    assert adopted(renewed, 102.0, how).deadline_s == 161.0


# --- needs, endings, standing --------------------------------------------------------------------------------------

CHAIN = launches(
    launch("api"),
    launch("vllm", needs={"api": READY}),
    launch("trainer", needs={"vllm": READY}, ends_run=True, restart=RestartPolicy.NEVER),
)


def standing(**states: S) -> dict[str, Service]:
    alive = {S.STARTING, S.READY, S.UNHEALTHY, S.STOPPING}
    return {
        name: Service(name=name, state=state, has_process=state in alive, is_running=state in alive, attempt=1)
        for name, state in states.items()
    }


@pytest.mark.parametrize(
    ("condition", "needed", "expected"),
    [
        (STARTED, Service(name="a", state=S.STARTING), False),
        (STARTED, Service(name="a", state=S.STARTING, is_running=True), True),
        (STARTED, Service(name="a", state=S.FINISHED), True),
        (STARTED, Service(name="a", state=S.STOPPING, is_running=True), False),
        (READY, Service(name="a", state=S.STARTING, is_running=True), False),
        (READY, Service(name="a", state=S.READY, is_running=True), True),
        (READY, Service(name="a", state=S.READY), False),
        (READY, Service(name="a", state=S.UNHEALTHY), False),
        (READY, Service(name="a", state=S.FINISHED, was_ready=True), True),
        (READY, Service(name="a", state=S.FINISHED), False),
        (FINISHED, Service(name="a", state=S.READY), False),
        (FINISHED, Service(name="a", state=S.FINISHED), True),
        (FINISHED, Service(name="a", state=S.FAILED), False),
    ],
)
def test_a_need_is_met_when_its_condition_holds(condition: NeedCondition, needed: Service, expected: bool) -> None:
    assert order.is_met(condition, needed) is expected


def test_services_start_as_soon_as_all_they_need_is_there() -> None:
    assert order.admissible(standing(api=S.WAITING, vllm=S.WAITING, trainer=S.WAITING), CHAIN) == ["api"]
    assert order.admissible(standing(api=S.READY, vllm=S.WAITING, trainer=S.WAITING), CHAIN) == ["vllm"]


def test_a_run_is_over_when_the_service_that_ends_it_has_finished() -> None:
    assert order.run_outcome(standing(api=S.READY, vllm=S.READY, trainer=S.READY), CHAIN) is None
    assert order.run_outcome(standing(api=S.READY, vllm=S.READY, trainer=S.FINISHED), CHAIN) is RunState.FINISHED


def test_a_run_has_failed_when_what_ends_it_can_never_start() -> None:
    waiting = standing(api=S.READY, vllm=S.FAILED, trainer=S.WAITING)
    assert order.run_outcome(waiting, CHAIN) is RunState.FAILED
    assert order.run_outcome({**waiting, **standing(trainer=S.READY)}, CHAIN) is None
    assert order.run_outcome({**waiting, **standing(vllm=S.STOPPED)}, CHAIN) is None


def test_unless_set_the_services_that_no_other_needs_end_the_run() -> None:
    pair = launches(launch("a"), launch("b", needs={"a": READY}), launch("c"))
    assert order.run_enders(pair) == ["b", "c"]
    assert order.run_outcome(standing(a=S.READY, b=S.FINISHED, c=S.READY), pair) is None
    assert order.run_outcome(standing(a=S.READY, b=S.FINISHED, c=S.FINISHED), pair) is RunState.FINISHED
    assert order.run_outcome(standing(a=S.READY, b=S.FINISHED, c=S.FAILED), pair) is RunState.FAILED
    assert order.run_enders(launches(launch("a", ends_run=False))) == []


def test_a_failure_beside_the_point_leaves_a_run_degraded() -> None:
    services = standing(api=S.READY, vllm=S.READY, trainer=S.READY, monitor=S.FAILED)
    all_ = {**CHAIN, **launches(launch("monitor", ends_run=False))}
    assert order.run_outcome(services, all_) is None
    assert order.run_state(services, all_, has_been_up=True) is RunState.DEGRADED


def test_a_stack_is_stopped_from_the_top_and_one_that_ignores_sigterm_gets_no_more_than_one_budget() -> None:
    services = standing(api=S.READY, vllm=S.READY, trainer=S.READY)
    ending = order.Ending(state=RunState.STOPPED, since_s=100.0, budget_s=9.0)
    assert order.stop_times_s(ending, services, CHAIN) == {"trainer": 0.0, "vllm": 103.0, "api": 106.0}
    assert order.decisions(services, CHAIN, ending, 100.0) == [("trainer", StopAsked("stopped with the run"))]
    gone = {**services, **standing(trainer=S.STOPPED)}
    assert order.stop_times_s(ending, gone, CHAIN) == {"vllm": 0.0, "api": 106.0}
    last = [name for name, event in order.decisions(services, CHAIN, ending, 109.0) if isinstance(event, KillAsked)]
    assert last == ["api", "vllm", "trainer"]


def test_independent_services_are_stopped_at_once() -> None:
    free = launches(launch("a"), launch("b"), launch("c"))
    ending = order.Ending(state=RunState.STOPPED, since_s=0.0, budget_s=10.0)
    assert set(order.stop_times_s(ending, standing(a=S.READY, b=S.READY, c=S.READY), free).values()) == {0.0}


def test_a_service_is_not_started_again_before_its_followers_have_ended() -> None:
    shared = launches(launch("vllm", followers=("trainer",)), launch("trainer", needs={"vllm": READY}))
    services = standing(vllm=S.WAITING, trainer=S.READY)
    required = RestartRequired("restarted because vllm restarts")
    assert order.decisions(services, shared, None, 0.0) == [("trainer", required)]
    services |= standing(trainer=S.STOPPING)
    assert order.decisions(services, shared, None, 0.0) == []
    services |= standing(trainer=S.WAITING)
    assert order.decisions(services, shared, None, 0.0) == [("vllm", Admitted())]


@pytest.mark.parametrize("state", [S.READY, S.UNHEALTHY, S.STOPPED, S.BACKOFF])
def test_a_pending_restart_is_admitted_once_its_followers_have_ended_and_they_do_not_start_before(state: S) -> None:
    shared = launches(launch("vllm", followers=("trainer",)), launch("trainer"))
    services = standing(vllm=state, trainer=S.READY)
    services["vllm"] = replace(services["vllm"], is_restart_pending=True)
    required = RestartRequired("restarted because vllm restarts")
    assert order.decisions(services, shared, None, 0.0) == [("trainer", required)]
    services |= standing(trainer=S.STOPPING)
    assert order.decisions(services, shared, None, 0.0) == []
    services |= standing(trainer=S.WAITING)
    assert order.decisions(services, shared, None, 0.0) == [("vllm", Admitted())]


def test_a_follower_that_hangs_in_the_kernel_holds_up_no_restart() -> None:
    shared = launches(launch("vllm", followers=("trainer",)), launch("trainer", needs={"vllm": READY}))
    services = standing(vllm=S.READY, trainer=S.READY)
    services["trainer"] = replace(services["trainer"], state=S.FAILED, has_process=True)
    services["vllm"] = replace(services["vllm"], is_restart_pending=True)
    assert order.decisions(services, shared, None, 0.0) == [("vllm", Admitted())]


def test_why_a_service_waits_is_said_in_words() -> None:
    services = standing(api=S.READY, vllm=S.STARTING, trainer=S.WAITING)
    services["vllm"] = replace(services["vllm"], answer="/health answers 503", since_s=2.0)
    words = why("trainer", services, CHAIN, 40.0)
    assert words == "waits for vllm to be ready: starting for 38 s, /health answers 503"
    assert why("vllm", services, CHAIN, 40.0) == "starting for 38 s, /health answers 503 (limit 60 s)"
    services["vllm"] = replace(services["vllm"], state=S.FAILED, reason="exit code 3")
    assert why("trainer", services, CHAIN, 40.0) == "cannot start without vllm to be ready: failed, exit code 3"


# --- histories -----------------------------------------------------------------------------------------------------


@dataclass
class World:
    """Processes as the kernel would have them: they end on SIGTERM, or ignore all but SIGKILL."""

    launches: Mapping[str, Launch]
    ignores_sigterm: frozenset[str] = frozenset()
    services: dict[str, Service] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)
    dying: set[str] = field(default_factory=set)
    is_down: set[str] = field(default_factory=set)
    """Services that have stopped as the last request asked."""
    ending: order.Ending | None = None
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.services = {name: Service(name=name) for name in self.launches}

    def apply(self, name: str, event: Event) -> None:
        self.services[name], effects = step(self.services[name], event, self.now_s, self.launches[name])
        for effect in effects:
            match effect:
                case Effect.SPAWN:
                    assert name not in self.alive, f"two processes of {name}"
                    assert name not in self.is_down, f"{name} was started after an obeyed stop"
                    self.alive.add(name)
                case Effect.STOP if name not in self.ignores_sigterm:
                    self.dying.add(name)
                case Effect.KILL:
                    self.dying.add(name)
                case Effect.RESTART_IN_PLACE:
                    assert name in self.alive, f"{name} restarts in place without a process"
                    assert name not in self.is_down, f"{name} was restarted after an obeyed stop"
                case Effect.STOP:
                    pass
        assert (name in self.alive) == self.services[name].has_process
        assert not self.services[name].is_restarting_in_place or self.services[name].state is S.STARTING
        if self.services[name].state is S.STOPPED and not self.services[name].is_restart_pending:
            self.is_down.add(name)

    def decide(self) -> None:
        if self.ending is None and (state := order.run_outcome(self.services, self.launches)):
            self.end(state)
        for name, event in order.decisions(self.services, self.launches, self.ending, self.now_s):
            if self.services[name].is_restart_pending and isinstance(event, Admitted):
                followers = [f for f in order.transitive_followers(name, self.launches) if f in self.alive]
                is_alone = all(self.services[f].state is S.FAILED for f in followers)  # they hang in the kernel
                assert self.ending or is_alone, f"{name} is restarted before its followers have ended"
            self.apply(name, event)

    def end(self, state: RunState) -> None:
        budget_s = order.ending_budget_s(self.services, self.launches)
        self.ending = order.Ending(state=state, since_s=self.now_s, budget_s=budget_s)

    def die(self, name: str, code: int) -> None:
        if name in self.alive:
            self.alive.discard(name)
            self.dying.discard(name)
            self.apply(name, Exited(code=code))

    def command(self, name: str, event: Event) -> None:
        if isinstance(event, StartAsked | RestartAsked):
            self.is_down.discard(name)
        self.apply(name, event)

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        for name in self.launches:
            self.apply(name, Tick())


POLICIES = st.sampled_from(list(RestartPolicy))
CONDITIONS = st.sampled_from(list(NeedCondition))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    names = ["a", "b", "c", "d"][: draw(st.integers(1, 4))]
    made = []
    for index, name in enumerate(names):
        needs = {other: draw(CONDITIONS) for other in names[:index] if draw(st.booleans())}
        followers = tuple(other for other in names[index + 1 :] if draw(st.integers(0, 5)) == 0)
        made.append(
            launch(
                name,
                needs=needs,
                followers=followers,
                restart=draw(POLICIES),
                ready=draw(st.sampled_from([None, READY_WITHIN_60_S, READY_WITHIN_60_S_OR_MOVING])),
                live=draw(st.sampled_from([None, Probe(tcp="a:1", within_s=30)])),
                restart_unhealthy=draw(st.booleans()),
                max_restarts=draw(st.integers(0, 2)),
                restart_in_place=draw(st.sampled_from([None, IN_PLACE])),
            )
        )
    return World(launches(*made), ignores_sigterm=frozenset(name for name in names if draw(st.integers(0, 3)) == 0))


HAPPENINGS = st.tuples(
    st.sampled_from(
        ["start", "stop", "restart", "kill", "spawned", "renewed", "pass", "fail", "move", "overrun"]
        + ["exit 0", "exit 1", "die"]
        + 2 * ["time"]
    ),
    st.integers(0, 3),
    st.sampled_from([0.1, 1.0, 13.0, 40.0, 70.0]),
)


def happen(world: World, what: str, index: int, seconds: float) -> None:
    name = list(world.launches)[index % len(world.launches)]
    attempt, in_place = world.services[name].attempt, world.services[name].num_in_place_restarts
    match what:
        case "start" | "stop" | "restart" | "kill" if world.ending is None:
            asked: dict[str, Event] = {
                "start": StartAsked(),
                "stop": StopAsked(),
                "restart": RestartAsked(),
                "kill": KillAsked(),
            }
            world.command(name, asked[what])
        case "spawned" if name in world.alive:
            world.apply(name, Spawned())
        case "renewed" if name in world.alive:
            world.apply(name, RestartedInPlace(num_in_place_restarts=in_place))
        case "pass" | "fail" if name in world.alive:
            outcome = ProbeOutcome.PASSED if what == "pass" else ProbeOutcome.CLOSED
            answer = ProbeAnswered(attempt=attempt, num_in_place_restarts=in_place, outcome=outcome, words=what)
            was_restarting = world.services[name].is_restarting_in_place
            world.apply(name, answer)
            assert not (was_restarting and world.services[name].state is S.READY), "the previous start answered"
        case "move" if name in world.alive:
            world.apply(name, Progressed(attempt=attempt, num_in_place_restarts=in_place, phase="loading"))
        case "overrun" if name in world.alive:
            world.apply(name, LimitExceeded("too much"))
        case "exit 0" | "exit 1":
            world.die(name, int(what[-1]))
        case "die" if name in world.dying:
            world.die(name, -15)
        case "time" if seconds < UNKILLABLE_AFTER_S or not world.dying:
            world.tick(seconds)  # what was killed dies within seconds: no process hangs in the kernel in these worlds
    world.decide()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(world=worlds(), history=st.lists(HAPPENINGS, max_size=60))
def test_no_history_runs_two_processes_or_starts_after_a_stop_and_every_run_settles(
    world: World, history: list[tuple[str, int, float]]
) -> None:
    world.decide()
    for what, index, seconds in history:
        happen(world, what, index, seconds)
    if world.ending is None:
        world.end(RunState.STOPPED)
    started_s = world.now_s
    while world.alive and world.now_s < started_s + 60:
        world.decide()
        for name in sorted(world.dying):
            world.die(name, -9)
        world.tick(0.5)
    world.decide()
    assert not world.alive
    assert world.now_s - started_s <= 10.0 + 1.0, "the run took more than its budget"
    settled = {S.STOPPED, S.FINISHED, S.FAILED}
    assert {service.state for service in world.services.values()} <= settled


@pytest.mark.parametrize("names_service", [True, False])
def test_a_pending_restart_goes_on_under_the_next_supervisor_also_one_of_the_version_before(
    tmp_path: Path, names_service: bool
) -> None:
    pending, _ = step(Service(name="vllm", state=S.STOPPED, attempt=1), RestartAsked(), 0.0, launch())
    entry = to_ledger(pending, started_at=None, begins_at=None, ready_at=None, processes=())
    written = Ledger(boot_id=boot_id(), ending=None, has_been_up=True, services={"vllm": entry}).model_dump(mode="json")
    if names_service:  # as earlier versions wrote it
        written["restarting"] = ["vllm"]
        del written["services"]["vllm"]["is_restart_pending"]
    ledger = Ledger.model_validate(written)
    assert takeover.find(launch(), ledger, tmp_path, 1.0).service == pending
