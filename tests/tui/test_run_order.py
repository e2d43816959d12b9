"""The order of services: who may start, when a run is over, and how it is stopped; pure functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from launches import launch, launches

from grpo_engine.wire.supervisor import RunState
from grpo_engine.wire.supervisor import ServiceState as S
from grpo_tui.services.base import NeedCondition, RestartPolicy
from grpo_tui.supervisor import order
from grpo_tui.supervisor.explanations import why
from grpo_tui.supervisor.machine import Admitted, KillAsked, RestartRequired, Service, StopAsked

READY, STARTED, FINISHED = NeedCondition.READY, NeedCondition.STARTED, NeedCondition.FINISHED
REQUIRED = RestartRequired("restarted because vllm restarts")
CHAIN = launches(
    launch("api"),
    launch("vllm", needs={"api": READY}),
    launch("trainer", needs={"vllm": READY}, ends_run=True, restart=RestartPolicy.NEVER),
)


def in_states(**states: S) -> dict[str, Service]:
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
    assert order.admissible(in_states(api=S.WAITING, vllm=S.WAITING, trainer=S.WAITING), CHAIN) == ["api"]
    assert order.admissible(in_states(api=S.READY, vllm=S.WAITING, trainer=S.WAITING), CHAIN) == ["vllm"]


def test_a_run_is_over_when_the_service_that_ends_it_has_finished() -> None:
    assert order.run_outcome(in_states(api=S.READY, vllm=S.READY, trainer=S.READY), CHAIN) is None
    assert order.run_outcome(in_states(api=S.READY, vllm=S.READY, trainer=S.FINISHED), CHAIN) is RunState.FINISHED


def test_a_run_has_failed_when_what_ends_it_can_never_start() -> None:
    waiting = in_states(api=S.READY, vllm=S.FAILED, trainer=S.WAITING)
    assert order.run_outcome(waiting, CHAIN) is RunState.FAILED
    assert order.run_outcome({**waiting, **in_states(trainer=S.READY)}, CHAIN) is None
    assert order.run_outcome({**waiting, **in_states(vllm=S.STOPPED)}, CHAIN) is None


def test_unless_set_the_services_that_no_other_needs_end_the_run() -> None:
    pair = launches(launch("a"), launch("b", needs={"a": READY}), launch("c"))
    assert order.run_enders(pair) == ["b", "c"]
    assert order.run_outcome(in_states(a=S.READY, b=S.FINISHED, c=S.READY), pair) is None
    assert order.run_outcome(in_states(a=S.READY, b=S.FINISHED, c=S.FINISHED), pair) is RunState.FINISHED
    assert order.run_outcome(in_states(a=S.READY, b=S.FINISHED, c=S.FAILED), pair) is RunState.FAILED
    assert order.run_enders(launches(launch("a", ends_run=False))) == []


def test_a_failed_service_that_does_not_end_the_run_leaves_it_degraded() -> None:
    services = in_states(api=S.READY, vllm=S.READY, trainer=S.READY, monitor=S.FAILED)
    all_ = {**CHAIN, **launches(launch("monitor", ends_run=False))}
    assert order.run_outcome(services, all_) is None
    assert order.run_state(services, all_, has_been_up=True) is RunState.DEGRADED


def test_a_stack_is_stopped_from_the_top_and_one_that_ignores_sigterm_gets_no_more_than_one_budget() -> None:
    services = in_states(api=S.READY, vllm=S.READY, trainer=S.READY)
    ending = order.Ending(state=RunState.STOPPED, since_s=100.0, budget_s=9.0)
    assert order.stop_times_s(ending, services, CHAIN) == {"trainer": 0.0, "vllm": 103.0, "api": 106.0}
    assert order.decisions(services, CHAIN, ending, 100.0) == [("trainer", StopAsked("stopped with the run"))]
    gone = {**services, **in_states(trainer=S.STOPPED)}
    assert order.stop_times_s(ending, gone, CHAIN) == {"vllm": 0.0, "api": 106.0}
    last = [name for name, event in order.decisions(services, CHAIN, ending, 109.0) if isinstance(event, KillAsked)]
    assert last == ["api", "vllm", "trainer"]


def test_independent_services_are_stopped_at_once() -> None:
    free = launches(launch("a"), launch("b"), launch("c"))
    ending = order.Ending(state=RunState.STOPPED, since_s=0.0, budget_s=10.0)
    assert set(order.stop_times_s(ending, in_states(a=S.READY, b=S.READY, c=S.READY), free).values()) == {0.0}


@pytest.mark.parametrize("state", [S.WAITING, S.READY, S.UNHEALTHY, S.STOPPED, S.BACKOFF])
def test_a_restart_waits_until_the_followers_have_ended_and_they_start_after_it(state: S) -> None:
    """In state `waiting` the service has ended already, and its restart is no longer pending."""
    needs = {"vllm": READY} if state is S.WAITING else {}
    shared = launches(launch("vllm", followers=("trainer",)), launch("trainer", needs=needs))
    services = in_states(vllm=state, trainer=S.READY)
    services["vllm"] = replace(services["vllm"], is_restart_pending=state is not S.WAITING)
    assert order.decisions(services, shared, None, 0.0) == [("trainer", REQUIRED)]
    services |= in_states(trainer=S.STOPPING)
    assert order.decisions(services, shared, None, 0.0) == []
    services |= in_states(trainer=S.WAITING)
    assert order.decisions(services, shared, None, 0.0) == [("vllm", Admitted())]


def test_a_follower_that_hangs_in_the_kernel_delays_no_restart() -> None:
    shared = launches(launch("vllm", followers=("trainer",)), launch("trainer", needs={"vllm": READY}))
    services = in_states(vllm=S.READY, trainer=S.READY)
    services["trainer"] = replace(services["trainer"], state=S.FAILED, has_process=True)
    services["vllm"] = replace(services["vllm"], is_restart_pending=True)
    assert order.decisions(services, shared, None, 0.0) == [("vllm", Admitted())]


def test_an_environment_that_restarts_leaves_out_a_replica_that_has_failed_for_good() -> None:
    needs = {"vllm": READY, "vllm-2": READY}
    two = launches(
        launch("vllm"), launch("vllm-2", replica_of="vllm"), launch("env", needs=needs, needs_one_replica=True)
    )
    failed = in_states(**{"vllm": S.READY, "vllm-2": S.FAILED, "env": S.WAITING})
    assert order.decisions(failed, two, None, 0.0) == [("env", Admitted())]
    assert why("env", failed, two, 0.0) == "about to start"
    for one_only in ({"vllm": S.FAILED}, {"vllm-2": S.BACKOFF}):
        waits = {**failed, **in_states(**one_only)}
        assert order.admissible(waits, two) == [], one_only
    first = {**failed, "env": Service(name="env", state=S.WAITING)}
    assert order.admissible(first, two) == [], "a run that begins has all that it was given"


def test_a_waiting_service_names_what_it_waits_for() -> None:
    services = in_states(api=S.READY, vllm=S.STARTING, trainer=S.WAITING)
    services["vllm"] = replace(services["vllm"], answer="/health answers 503", since_s=2.0)
    words = why("trainer", services, CHAIN, 40.0)
    assert words == "waits for vllm to be ready: starting for 38 s, /health answers 503"
    assert why("vllm", services, CHAIN, 40.0) == "starting for 38 s, /health answers 503 (limit 60 s)"
    services["vllm"] = replace(services["vllm"], state=S.FAILED, reason="exit code 3")
    assert why("trainer", services, CHAIN, 40.0) == "cannot start without vllm to be ready: failed, exit code 3"
