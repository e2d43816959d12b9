"""When `up` stops waiting, and with which exit code: pure, from messages that a daemon would send."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_engine.wire.supervisor import Bye, RunChanged, RunState, ServiceChanged, ServiceState, ServiceStatus
from grpo_tui.cli.waiting import Goal, Watch
from grpo_tui.exit_codes import ExitCode


def changed(name: str, state: ServiceState, **more: Any) -> ServiceChanged:
    service = ServiceStatus(name=name, kind="command", state=state, log=f"/logs/{name}.log", **more)
    return ServiceChanged(number=1, time=0.0, service=service)


def run(state: RunState) -> RunChanged:
    return RunChanged(number=1, time=0.0, state=state)


def watch(goal: Goal | None) -> Watch:
    return Watch(goal=goal, stops_on_failure=goal is not None)


@pytest.mark.parametrize(
    ("goal", "state", "code"),
    [
        ("ready", RunState.STARTING, None),
        ("ready", RunState.DEGRADED, None),
        ("ready", RunState.RUNNING, ExitCode.OK),
        ("ready", RunState.FINISHED, ExitCode.OK),
        ("ready", RunState.STOPPED, ExitCode.NOT_IN_TIME),
        ("finished", RunState.RUNNING, None),
        ("finished", RunState.FINISHED, ExitCode.OK),
        ("finished", RunState.FAILED, ExitCode.FAILED),
        ("finished", RunState.STOPPED, ExitCode.NOT_IN_TIME),
        (None, RunState.RUNNING, None),
        (None, RunState.DEGRADED, None),
        (None, RunState.FINISHED, ExitCode.OK),
        (None, RunState.STOPPED, ExitCode.OK),
        (None, RunState.FAILED, ExitCode.FAILED),
    ],
)
def test_each_goal_ends_the_waiting_where_it_says(goal: Goal | None, state: RunState, code: ExitCode | None) -> None:
    assert watch(goal).receive(run(state)) == code


def test_a_failed_service_ends_the_waiting_only_where_there_is_a_goal() -> None:
    failure = changed("vllm", ServiceState.FAILED)
    assert watch("ready").receive(failure) == ExitCode.FAILED
    assert watch("finished").receive(failure) == ExitCode.FAILED
    assert watch(None).receive(failure) is None


def test_a_service_that_a_foreign_process_kept_from_starting_has_its_own_exit_code() -> None:
    assert watch("ready").receive(changed("vllm", ServiceState.FAILED, is_refused=True)) == ExitCode.REFUSED


def test_a_service_that_was_restarted_by_hand_is_no_failure_any_more() -> None:
    foreground = watch(None)
    foreground.receive(changed("vllm", ServiceState.FAILED))
    foreground.receive(changed("vllm", ServiceState.READY))
    assert foreground.receive(Bye(state=RunState.STOPPED)) == ExitCode.OK


def test_a_run_that_is_stopped_after_a_failure_exits_as_failed() -> None:
    foreground = watch(None)
    foreground.receive(changed("vllm", ServiceState.FAILED))
    assert foreground.receive(Bye(state=RunState.STOPPED)) == ExitCode.FAILED
