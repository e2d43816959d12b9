"""The life cycle of a service is a pure function, so its tests need no process, no clock and no sleep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launches import IN_PLACE, READY_WITHIN_60_S, UP, Timed, launch, launches, passed, play, refused, restart

from grpo_engine.wire.supervisor import Refusal, RunState
from grpo_engine.wire.supervisor import ServiceState as S
from grpo_tui.services.base import Probe, RestartPolicy
from grpo_tui.supervisor import order, takeover
from grpo_tui.supervisor.explanations import why
from grpo_tui.supervisor.machine import (
    MAX_BACKOFF_S,
    UNKILLABLE_AFTER_S,
    Admitted,
    AfterStop,
    Effect,
    Exited,
    KillAsked,
    LimitExceeded,
    Progressed,
    Refused,
    RestartAsked,
    RestartedInPlace,
    RestartRequired,
    ServerKilled,
    Service,
    Spawned,
    StartAsked,
    StopAsked,
    Tick,
    adopted,
    backoff_s,
    step,
)
from grpo_tui.supervisor.state_file import Ledger, StartTimes, boot_id, from_ledger, to_ledger

TAKEN = Refusal(resource="port", port=9001, text="port 9001 is held by pid 7 (user eve): nc")
NEVER, ON_FAILURE, ALWAYS = RestartPolicy.NEVER, RestartPolicy.ON_FAILURE, RestartPolicy.ALWAYS
param = pytest.param
SPAWN, STOP, KILL = Effect.SPAWN, Effect.STOP, Effect.KILL
SPAWNED: tuple[Timed, ...] = ((0.0, Admitted()), (0.1, Spawned()))
LIVE = Probe(tcp="a:1", within_s=30)
WATCHED: dict[str, Any] = {"live": LIVE, "restart_unhealthy": True}
REQUIRED = RestartRequired("restarted because vllm restarts")
RENEWED = RestartedInPlace(num_in_place_restarts=1)
PROGRESSED = Progressed(attempt=1, phase=None)
ENDED: Timed = (7.0, Exited(code=-15))


def killed(in_place: int) -> ServerKilled:
    """The server of this start was killed."""
    return ServerKilled(attempt=1, num_in_place_restarts=in_place, words="its server was killed by SIGKILL")


def words_of(service: Service, how: Any, now_s: float) -> str | None:
    return why("vllm", {"vllm": service}, launches(how), now_s)


def test_a_service_is_ready_once_its_probe_passes() -> None:
    service, effects = play(launch(), *SPAWNED, (1.0, refused()))
    assert (service.state, service.answer) == (S.STARTING, "/health answers 503")
    service, _ = play(launch(), (5.0, passed()), service=service)
    assert (service.state, effects) == (S.READY, [SPAWN])


def test_a_service_without_a_probe_is_ready_as_soon_as_it_runs() -> None:
    how = launch(ready=None, restart_in_place=IN_PLACE)
    assert play(how, *SPAWNED[:1])[0].state is S.STARTING
    service, _ = play(how, *SPAWNED)
    assert service.state is S.READY
    service, _ = play(how, *restart(1.0), service=service)
    assert service.state is S.STARTING
    assert step(service, RENEWED, 1.5, how)[0].state is S.READY


def test_a_late_answer_about_an_earlier_attempt_changes_nothing() -> None:
    service, _ = play(launch(), *UP, *restart(6.0), (7.0, Exited(code=0)), (7.0, Admitted()), (7.1, passed(1)))
    assert (service.state, service.attempt) == (S.STARTING, 2)


@pytest.mark.parametrize(
    ("settings", "events", "state"),
    [
        param({}, [*UP, *restart(6.0), (6.5, StopAsked()), ENDED], S.STOPPED, id="stop overrides restart"),
        param({}, [*UP, (6.0, StopAsked()), (6.1, REQUIRED), ENDED], S.STOPPED, id="stop overrides required restart"),
        param({}, [*UP, (6.0, StopAsked()), (6.5, StartAsked()), ENDED], S.WAITING, id="start comes after the stop"),
        param({"final_exit_codes": (-15,)}, [*UP, (6.0, StopAsked()), ENDED], S.STOPPED, id="stop with a final code"),
        param(
            WATCHED,
            [*UP, (9.0, refused()), (35.0, Tick()), (36.0, Exited(code=-15))],
            S.BACKOFF,
            id="unhealthy is restarted",
        ),
        param({"restart_in_place": IN_PLACE}, [*UP, (6.0, REQUIRED)], S.STOPPING, id="follower is not in place"),
        param({"restart_in_place": IN_PLACE}, [SPAWNED[0], *restart(0.1)], S.STOPPING, id="no process to signal"),
        param({}, [SPAWNED[0], (59.0, PROGRESSED), (60.0, Tick())], S.STOPPING, id="progress without stalled_s"),
    ],
)
def test_a_service_is_stopped_once_and_ends_as_requested(
    settings: dict[str, Any], events: list[Timed], state: S
) -> None:
    service, effects = play(launch(**settings), *events)
    assert (service.state, effects) == (state, [SPAWN, STOP])


@pytest.mark.parametrize(
    ("policy", "code", "state"),
    [
        (NEVER, 0, S.FINISHED),
        (NEVER, 3, S.FAILED),
        (ON_FAILURE, 0, S.FINISHED),
        (ON_FAILURE, 2, S.BACKOFF),
        (ON_FAILURE, 3, S.BACKOFF),
        (ON_FAILURE, None, S.BACKOFF),
        (ON_FAILURE, -9, S.BACKOFF),
        (ALWAYS, 0, S.BACKOFF),
        (ALWAYS, 3, S.BACKOFF),
    ],
)
def test_the_restart_policy_decides_what_an_exit_means(policy: RestartPolicy, code: int | None, state: S) -> None:
    assert play(launch(restart=policy), *UP, (9.0, Exited(code=code)))[0].state is state


@pytest.mark.parametrize(("policy", "state"), [(NEVER, S.FAILED), (ON_FAILURE, S.BACKOFF), (ALWAYS, S.BACKOFF)])
def test_an_exit_with_code_0_that_nobody_asked_for_is_a_failure_before_the_work_is_done(
    policy: RestartPolicy, state: S
) -> None:
    """By SIGTERM from outside a trainer, and its run, were finished with steps left, and a server did not come back."""
    unfinished = Exited(code=0, is_unfinished=True)
    service, _ = play(launch(restart=policy), *UP, (9.0, unfinished))
    assert service.state is state
    assert (service.reason or "").startswith("exit code 0, but nothing here stopped it: a signal from outside")
    stopped, _ = play(launch(restart=policy), *UP, (8.0, StopAsked()), (9.0, unfinished))
    assert stopped.state is S.STOPPED


def test_backoff_doubles_up_to_a_minute_and_has_a_quarter_of_jitter() -> None:
    delays = [backoff_s(launch(), number, 0.0) for number in range(8)]
    assert delays == [1, 2, 4, 8, 16, 32, MAX_BACKOFF_S, MAX_BACKOFF_S]
    assert backoff_s(launch(), 2, 1.0) == 5.0


def test_a_service_fails_once_its_restarts_are_used_up() -> None:
    how = launch(max_restarts=2)
    service, now_s = Service(name="vllm"), 0.0
    for _ in range(3):
        service, _ = play(how, (now_s, Admitted()), (now_s, Exited(code=3, last_lines=("boom",))), service=service)
        now_s = service.deadline_s or now_s
        service, _ = step(service, Tick(), now_s, how)
    assert (service.state, service.attempt) == (S.FAILED, 3)
    assert service.reason == "exit code 3; given up after 2 restarts"
    assert words_of(service, how, now_s) == "exit code 3; given up after 2 restarts; last lines:\n  boom"


@pytest.mark.parametrize("policy", list(RestartPolicy))
def test_a_final_exit_code_is_never_restarted_and_its_reason_is_the_last_line(policy: RestartPolicy) -> None:
    how = launch(restart=policy, final_exit_codes=(2,))
    line = "grpo-engine env: task: my_onw cannot be imported"
    service, _ = play(how, *SPAWNED, (1.0, Exited(code=2, last_lines=(line,))))
    assert (service.state, service.reason) == (S.FAILED, f"exit code 2: {line}")
    assert words_of(service, how, 1.0) == f"exit code 2: {line}"
    service, _ = play(how, *SPAWNED, (1.0, Exited(code=2, last_lines=("first", "x" * 300))))
    assert service.reason == f"exit code 2: {'x' * 199}…"
    assert words_of(service, how, 1.0) == f"{service.reason}; last lines:\n  first\n  {'x' * 300}"


@pytest.mark.parametrize("policy", list(RestartPolicy))
def test_a_service_that_another_one_ended_is_restarted_a_few_times_whatever_its_policy(policy: RestartPolicy) -> None:
    how = launch(restart=policy, max_restarts=9, final_exit_codes=(1,))
    ended, service, now_s = Exited(code=1, failed_by="mps"), Service(name="vllm"), 0.0
    for _ in range(4):
        service, _ = play(how, (now_s, Admitted()), (now_s, ended), service=service)
        reason, now_s = service.reason, service.deadline_s or now_s
        service, _ = step(service, Tick(), now_s, how)
    assert (service.state, service.attempt) == (S.FAILED, 4)
    assert reason == "ended by a failure of mps: exit code 1; given up after 3 restarts"


def test_an_optional_service_that_exits_with_0_says_why_in_its_last_line() -> None:
    how = launch(is_optional=True)
    service, _ = play(how, *SPAWNED, (1.0, Exited(code=0, last_lines=("began", "no MPS, since GPU 0 has MIG"))))
    assert (service.state, service.reason) == (S.FINISHED, "no MPS, since GPU 0 has MIG")


def test_a_service_in_backoff_shows_its_last_log_line() -> None:
    service, _ = play(launch(), *UP, (9.0, Exited(code=1, last_lines=("Traceback", "ValueError: no data"))))
    words = words_of(service, launch(), 9.0)
    assert words == "exit code 1; restart 1 of 2 after 1.0 s; last line: ValueError: no data"


def test_restarts_before_the_window_no_longer_count() -> None:
    how = launch(max_restarts=1, restart_window_s=100.0)
    service, _ = play(how, (0.0, Admitted()), (0.0, Exited(code=1)), (1.0, Tick()), (1.0, Admitted()))
    late, _ = play(how, (200.0, Exited(code=1)), service=service)
    soon, _ = play(how, (50.0, Exited(code=1)), service=service)
    assert (late.state, soon.state) == (S.BACKOFF, S.FAILED)


def test_a_service_that_is_not_ready_in_time_fails_with_the_last_answer_of_its_probe() -> None:
    timed = ((0.0, Admitted()), (1.0, refused()), (59.9, Tick()), (60.0, Tick()), (61.0, Exited(code=-15)))
    service, effects = play(launch(restart=NEVER), *timed)
    assert effects == [SPAWN, STOP]
    assert (service.state, service.reason) == (S.FAILED, "not ready within 60 s: /health answers 503")


def test_a_start_that_makes_progress_gets_more_time_until_it_stalls() -> None:
    how = launch(ready=Probe(tcp="a:1", within_s=60, stalled_s=20), restart=NEVER)
    service, _ = play(how, (0.0, Admitted()), (0.0, Spawned()), (55.0, Progressed(attempt=1, phase="loading weights")))
    service, effects = step(service, Tick(), 60.0, how)
    assert (service.state, service.deadline_s, effects) == (S.STARTING, 75.0, ())
    service, _ = play(how, (74.0, PROGRESSED), (75.0, Tick()), service=service)
    assert (service.state, service.deadline_s, service.phase) == (S.STARTING, 94.0, "loading weights")
    service, effects = step(service, Tick(), 94.0, how)
    assert (service.state, effects) == (S.STOPPING, (STOP,))
    service, _ = step(service, Exited(code=-15), 95.0, how)
    words = "not ready after 94 s and no progress for 20 s (loading weights): its probe never answered"
    assert (service.state, service.reason) == (S.FAILED, words)


def test_checking_ports_and_memory_does_not_count_against_the_readiness_limit() -> None:
    service, _ = play(launch(), (0.0, Admitted()), (50.0, Spawned()), (60.0, Tick()))
    assert (service.state, service.deadline_s) == (S.STARTING, 110.0)


def test_a_start_that_is_refused_after_its_limit_has_failed() -> None:
    service, _ = play(launch(), (0.0, Admitted()), (60.0, Tick()))
    assert service.state is S.STOPPING
    service, _ = play(launch(), (61.0, Refused("stopped before it was started")), service=service)
    assert service.state is S.FAILED
    assert (service.reason or "").startswith("not ready within 60 s")


def test_an_exit_before_readiness_is_named_so_even_with_exit_code_0() -> None:
    service, _ = play(launch(), *SPAWNED, (0.5, refused()), (1.0, Exited(code=0)))
    assert service.state is S.FINISHED
    assert service.reason == "exit code 0 before it was ready (/health answers 503)"


def test_a_service_over_its_limit_is_stopped_as_failed_and_the_policy_decides() -> None:
    service, effects = play(launch(), *UP, (9.0, LimitExceeded("holds 12.1 GB, over its limit of 10 GB")))
    assert (service.state, effects[-1]) == (S.STOPPING, STOP)
    service, _ = play(launch(), (9.5, Exited(code=-15)), service=service)
    assert service.state is S.BACKOFF
    assert (service.reason or "").startswith("holds 12.1 GB, over its limit of 10 GB; restart 1 of 2")


def test_a_live_probe_that_fails_makes_the_service_unhealthy_until_it_passes() -> None:
    how = launch(live=Probe(http="http://127.0.0.1:1/health", within_s=30))
    service, effects = play(how, *UP, (20.0, passed()), (36.0, Tick()))
    assert service.state is S.READY
    service, effects = play(how, (49.0, refused()), (50.0, Tick()), service=service)
    assert (service.state, effects) == (S.UNHEALTHY, [])
    assert service.reason == "no liveness for 30 s: /health answers 503"
    assert play(how, (55.0, passed()), service=service)[0].state is S.READY


def test_a_service_that_nobody_asked_in_time_is_not_unhealthy_before_it_has_answered() -> None:
    """On a machine with load 20 the supervisor itself gets no time for a probe, and the last answer was 200."""
    how = launch(live=Probe(http="http://127.0.0.1:1/health", within_s=20, interval_s=1, timeout_s=5))
    service, _ = play(how, *UP, (20.0, passed()), (41.0, Tick()))
    assert service.state is S.READY
    assert play(how, (44.0, passed()), (63.0, Tick()), service=service)[0].state is S.READY
    silent, _ = play(how, (44.0, refused()), (47.0, Tick()), service=service)
    assert silent.state is S.UNHEALTHY


@pytest.mark.parametrize(
    ("settings", "events"),
    [
        param({}, [*restart(6.0), ENDED], id="stopped and started"),
        param({"restart_in_place": IN_PLACE}, [*restart(6.0), (6.1, Exited(code=-1))], id="exit instead of restart"),
        param({}, [(6.0, RestartAsked()), (6.5, Exited(code=0)), (7.0, Admitted())], id="exit 0 while pending"),
        param({}, [(6.0, RestartAsked()), (6.5, Exited(code=1)), (7.0, Admitted())], id="exit 1 while pending"),
    ],
)
def test_a_restart_by_request_counts_as_no_failure_whatever_the_policy(
    settings: dict[str, Any], events: list[Timed]
) -> None:
    service, _ = play(launch(restart=NEVER, **settings), *UP, *events)
    assert (service.state, service.restarted_at_s, service.is_restart_pending) == (S.WAITING, (), False)


GONE, STARTED = (7.0, Exited(code=-15)), (7.0, Admitted())


@pytest.mark.parametrize(
    ("settings", "events", "state"),
    [
        param({}, restart(6.0), RunState.RESTARTING, id="stopping"),
        param({}, [*restart(6.0), GONE], RunState.RESTARTING, id="waiting"),
        param({}, [*restart(6.0), GONE, STARTED, (7.1, Spawned())], RunState.RESTARTING, id="starting"),
        param({"restart_in_place": IN_PLACE}, restart(6.0), RunState.RESTARTING, id="in place"),
        param({}, [(6.0, REQUIRED), GONE], RunState.RESTARTING, id="following"),
        param({}, [*restart(6.0), GONE, STARTED, (7.1, Spawned()), (8.0, passed(2))], RunState.RUNNING, id="ready"),
        param({}, [*restart(6.0), (6.5, StopAsked())], RunState.DEGRADED, id="stopped instead"),
        param({}, [*restart(6.0), GONE, STARTED, (7.1, Exited(code=1))], RunState.DEGRADED, id="failed instead"),
        param({}, [(6.0, StopAsked())], RunState.DEGRADED, id="stop"),
        param({}, [(6.0, StopAsked()), GONE, (8.0, StartAsked())], RunState.DEGRADED, id="start of a stopped one"),
        param({}, [(6.0, Exited(code=1)), (9.0, Tick())], RunState.DEGRADED, id="restart by policy"),
        param({}, [(6.0, Exited(code=1)), *restart(6.1)], RunState.DEGRADED, id="asked for after a crash"),
    ],
)
def test_a_run_whose_services_restart_by_request_is_restarting_and_not_degraded(
    settings: dict[str, Any], events: Sequence[Timed], state: RunState
) -> None:
    how = launch(restart=ALWAYS, **settings)
    service, _ = play(how, *UP, *events)
    other = replace(play(how, *UP)[0], name="b")
    services, plan = {service.name: service, "b": other}, {service.name: how, "b": how}
    assert order.run_state(services, plan, has_been_up=True) is state
    entry = to_ledger(service, started_at=None, begins_at=None, times=StartTimes(), processes=())
    assert from_ledger(service.name, entry).is_restarting_by_request is (state is RunState.RESTARTING)


def test_a_stop_escalates_to_sigkill_and_a_process_that_outlives_it_is_a_failure() -> None:
    how = launch(stop_grace_s=10.0)
    service, effects = play(how, *UP, (6.0, StopAsked()), (17.9, Tick()), (18.0, Tick()))
    assert effects == [SPAWN, STOP, KILL]
    soon = RestartRequired("restarted because mps restarts", grace_s=5.0)
    assert play(how, *UP, (6.0, soon), (10.9, Tick()), (11.0, Tick()))[1] == [SPAWN, STOP, KILL]
    service, effects = play(how, (18.0 + UNKILLABLE_AFTER_S, Tick()), service=service)
    assert (service.state, service.has_process, effects) == (S.FAILED, True, [])
    service, effects = play(how, (99.0, StartAsked()), (99.0, Admitted()), service=service)
    assert (service.state, effects) == (S.FAILED, [])
    service, effects = play(how, (120.0, Exited(code=-9)), service=service)
    assert (service.state, service.has_process, effects) == (S.FAILED, False, [])


def test_a_taken_port_is_a_failure_whatever_the_policy() -> None:
    service, _ = play(launch(restart=ALWAYS), (0.0, Admitted()), (0.1, Refused(TAKEN.text, (TAKEN,))))
    assert (service.state, service.is_refused, service.has_process) == (S.FAILED, True, False)
    assert (service.reason, service.refusals) == (TAKEN.text, (TAKEN,))


def test_a_restart_by_policy_at_a_taken_port_is_tried_again_until_its_limit() -> None:
    how = launch(restart=ALWAYS, max_restarts=2)
    service, _ = play(how, *UP, (20.0, Exited(code=-9)), (30.0, Tick()), (30.0, Admitted()))
    service, _ = play(how, (30.1, Refused(TAKEN.text, (TAKEN,))), service=service)
    assert (service.state, service.is_refused, service.has_process) == (S.BACKOFF, False, False)
    assert service.refusals == (), "a later failure has another cause"
    assert TAKEN.text in (service.reason or "")
    freed, effects = play(how, (60.0, Tick()), (60.0, Admitted()), service=service)
    assert (freed.state, effects) == (S.STARTING, [Effect.SPAWN])
    service, _ = play(how, (60.1, Refused(TAKEN.text, (TAKEN,))), service=freed)
    assert (service.state, service.is_refused, service.refusals) == (S.FAILED, True, (TAKEN,))
    service, _ = play(launch(), *UP, *restart(6.0), (7.0, Exited(code=0)), (7.0, Admitted()))
    service, _ = play(launch(), (7.1, Refused(TAKEN.text, (TAKEN,))), service=service)
    assert service.state is S.BACKOFF, "nor does one that was asked for end the run, whatever the policy"


def test_an_adopted_service_goes_on_in_the_state_of_the_previous_supervisor() -> None:
    how = launch()
    ready, _ = play(how, *UP)
    assert adopted(ready, 100.0, how).state is S.READY
    assert adopted(replace(ready, deadline_s=50.0), 100.0, launch(live=LIVE)).deadline_s == 130.0
    late, _ = play(how, *SPAWNED)
    probe = READY_WITHIN_60_S
    assert adopted(late, 100.0, how).deadline_s == 100.0 + 2 * probe.timeout_s + probe.interval_s
    unseen = adopted(Service(name="vllm", attempt=2), 100.0, how)
    assert (unseen.state, unseen.deadline_s, unseen.has_process) == (S.STARTING, 160.0, True)


def test_a_restart_is_pending_until_it_is_admitted_and_a_stop_cancels_it() -> None:
    pending, effects = play(launch(), *UP, (6.0, RestartAsked()))
    assert (pending.state, pending.is_restart_pending, effects) == (S.READY, True, [SPAWN])
    admitted, effects = play(launch(), (7.0, Admitted()), service=pending)
    assert (admitted.state, admitted.is_restart_pending, effects) == (S.STOPPING, False, [STOP])
    for request in (StopAsked(), KillAsked()):
        assert not step(pending, request, 7.0, launch())[0].is_restart_pending
    waiting, _ = step(Service(name="vllm"), RestartAsked(), 0.0, launch())
    assert not waiting.is_restart_pending, "it starts anyway"


@pytest.mark.parametrize("names_service", [True, False])
def test_a_pending_restart_goes_on_under_the_next_supervisor_also_one_of_the_version_before(
    tmp_path: Path, names_service: bool
) -> None:
    pending, _ = step(Service(name="vllm", state=S.STOPPED, attempt=1), RestartAsked(), 0.0, launch())
    entry = to_ledger(pending, started_at=None, begins_at=None, times=StartTimes(), processes=())
    written = Ledger(boot_id=boot_id(), ending=None, has_been_up=True, services={"vllm": entry}).model_dump(mode="json")
    if names_service:  # as earlier versions wrote it
        written["restarting"] = ["vllm"]
        del written["services"]["vllm"]["is_restart_pending"]
    ledger = Ledger.model_validate(written)
    assert takeover.find(launch(), ledger, tmp_path, 1.0).service == pending


# --- restarts in place ---------------------------------------------------------------------------------------------


def test_a_restart_in_place_keeps_the_process_and_is_ready_once_the_new_start_answers() -> None:
    how = launch(restart_in_place=IN_PLACE)
    service, effects = play(how, *UP, *restart(6.0))
    assert (service.state, service.has_process, service.is_running) == (S.STARTING, True, False)
    service, _ = play(how, (6.1, passed(in_place=0)), (6.2, passed(in_place=1)), service=service)
    assert service.state is S.STARTING, "the last start still answers"
    service, _ = play(how, (7.0, RENEWED), (7.1, passed(in_place=0)), service=service)
    assert (service.state, service.is_running, service.deadline_s) == (S.STARTING, True, 67.0)
    service, more = play(how, (9.0, passed(in_place=1)), service=service)
    assert (service.state, service.attempt, service.num_starts) == (S.READY, 1, 2)
    assert [*effects, *more] == [SPAWN, Effect.RESTART_IN_PLACE]


def test_a_restart_in_place_beyond_the_grace_period_becomes_a_stop_and_start_however_often_requested() -> None:
    how = launch(restart_in_place=IN_PLACE, stop_grace_s=10.0)
    service, effects = play(how, *UP, *restart(6.0), *restart(15.0), (16.0, Tick()))
    assert effects == [SPAWN, Effect.RESTART_IN_PLACE, Effect.RESTART_IN_PLACE, STOP]
    words = "did not restart in place within 10 s: stopped and started instead"
    assert (service.state, service.reason) == (S.STOPPING, words)
    service, effects = play(how, (17.0, Exited(code=0)), (17.0, Admitted()), service=service)
    assert (service.state, service.attempt, effects) == (S.STARTING, 2, [SPAWN])


def test_a_restart_in_place_that_exits_or_does_not_become_ready_fails_as_any_start() -> None:
    how = launch(restart_in_place=IN_PLACE, restart=NEVER)
    after, _ = play(how, *UP, *restart(6.0), (6.5, RENEWED), (6.6, Exited(code=1)))
    assert after.state is S.FAILED
    service, effects = play(how, *UP, *restart(6.0), (7.0, RENEWED), (67.0, Tick()))
    assert effects[-1] is STOP
    service, _ = step(service, Exited(code=0), 68.0, how)
    assert (service.state, service.reason) == (S.FAILED, "not ready within 60 s: its probe never answered")


def test_an_unhealthy_service_and_one_that_starts_restart_in_place_too() -> None:
    how = launch(restart_in_place=IN_PLACE, live=LIVE)
    unhealthy, _ = play(how, *UP, (34.0, refused()), (35.0, Tick()))
    assert unhealthy.state is S.UNHEALTHY
    for service in (unhealthy, play(how, *SPAWNED)[0]):
        assert play(how, *restart(40.0), service=service)[1] == [Effect.RESTART_IN_PLACE]


def test_a_killed_server_is_restarted_in_place_once_and_then_as_after_any_failure() -> None:
    how = launch(restart_in_place=IN_PLACE, restart_window_s=600.0)
    service, effects = play(how, *UP, (6.0, killed(0)), (6.1, killed(0)))
    assert (service.state, service.is_restart_pending, service.reason, effects) == (
        S.READY,
        True,
        "its server was killed by SIGKILL",
        [Effect.SPAWN],
    )
    service, effects = play(
        how, (6.2, Admitted()), (6.3, killed(0)), (6.4, RENEWED), (7.0, passed(in_place=1)), service=service
    )
    assert (service.state, service.attempt, service.num_in_place_restarts) == (S.READY, 1, 1)
    assert effects == [Effect.RESTART_IN_PLACE]
    service, effects = play(
        how, (8.0, killed(0)), (9.0, killed(1)), service=service
    )  # the first is of the start before
    assert (service.state, service.after_stop, effects) == (S.STOPPING, AfterStop.FAILURE, [Effect.STOP])
    service, _ = play(how, (9.1, Exited(code=-9)), service=service)
    assert service.state is S.BACKOFF
    assert "its server was killed by SIGKILL; restart 2 of 2" in (service.reason or "")


@pytest.mark.parametrize("changes", [{"restart": NEVER}, {"max_restarts": 0}, {"restart_in_place": None}])
def test_a_killed_server_that_may_not_be_restarted_in_place_is_stopped_as_after_a_failure(changes: dict) -> None:
    service, effects = play(launch(**{"restart_in_place": IN_PLACE, **changes}), *UP, (6.0, killed(0)))
    assert (service.state, service.after_stop, effects[1:]) == (S.STOPPING, AfterStop.FAILURE, [Effect.STOP])


def test_a_service_adopted_during_a_restart_in_place_gets_its_grace_period_again() -> None:
    how = launch(restart_in_place=IN_PLACE, stop_grace_s=10.0)
    service, _ = play(how, *UP, *restart(6.0))
    taken = adopted(service, 100.0, how)
    assert (taken.state, taken.is_restarting_in_place) == (S.STARTING, True)
    assert (taken.is_running, taken.deadline_s) == (False, 110.0)
    assert step(taken, Spawned(), 100.1, how) == (taken, ()), "its process was there all the time"
    renewed, _ = step(taken, RENEWED, 101.0, how)
    assert adopted(renewed, 102.0, how).deadline_s == 161.0
