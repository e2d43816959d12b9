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


FAILED, READY = changed("vllm", ServiceState.FAILED), changed("vllm", ServiceState.READY)
REFUSED = changed("vllm", ServiceState.FAILED, is_refused=True)
STOPPED = Bye(state=RunState.STOPPED)


@pytest.mark.parametrize(
    ("goal", "messages", "code"),
    [
        ("ready", [run(RunState.STARTING)], None),
        ("ready", [run(RunState.DEGRADED)], None),
        ("ready", [run(RunState.RUNNING)], ExitCode.OK),
        ("ready", [run(RunState.FINISHED)], ExitCode.OK),
        ("ready", [run(RunState.STOPPED)], ExitCode.NOT_IN_TIME),
        ("ready", [FAILED], ExitCode.FAILED),
        ("ready", [REFUSED], ExitCode.REFUSED),  # a foreign process kept it from starting
        ("finished", [run(RunState.RUNNING)], None),
        ("finished", [run(RunState.FINISHED)], ExitCode.OK),
        ("finished", [run(RunState.FAILED)], ExitCode.FAILED),
        ("finished", [run(RunState.STOPPED)], ExitCode.NOT_IN_TIME),
        ("finished", [FAILED], ExitCode.FAILED),
        (None, [run(RunState.RUNNING)], None),
        (None, [run(RunState.DEGRADED)], None),
        (None, [run(RunState.FINISHED)], ExitCode.OK),
        (None, [run(RunState.STOPPED)], ExitCode.OK),
        (None, [run(RunState.FAILED)], ExitCode.FAILED),
        (None, [FAILED], None),
        (None, [FAILED, STOPPED], ExitCode.FAILED),
        (None, [FAILED, READY, STOPPED], ExitCode.OK),  # restarted by hand: no failure any more
    ],
)
def test_each_goal_ends_the_waiting_with_its_exit_code(
    goal: Goal | None, messages: list[RunChanged | ServiceChanged | Bye], code: ExitCode | None
) -> None:
    watch = Watch(goal=goal, stops_on_failure=goal is not None)
    assert [watch.receive(message) for message in messages][-1] == code


def test_what_a_run_goes_on_without_is_named_with_what_starts_it_again() -> None:
    watch = Watch(goal=None, stops_on_failure=False)
    watch.receive(FAILED)
    assert watch.how_to_go_on("run-1").startswith("the run goes on without vllm: `grpo-tui start run-1 vllm` starts it")
