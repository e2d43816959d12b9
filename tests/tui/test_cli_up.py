"""When `up` stops waiting, with which exit code, and what it prints: pure, from messages that a daemon would send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_engine.diagnosis.evidence import RunSettings
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.run_folder import CHECKPOINT_MARKER, CHECKPOINTS, checkpoint_folder
from grpo_engine.wire.supervisor import (
    Bye,
    RunChanged,
    RunState,
    RunStatus,
    ServiceChanged,
    ServiceState,
    ServiceStatus,
    Snapshot,
)
from grpo_tui.cli.training import Training
from grpo_tui.cli.waiting import Goal, Watch
from grpo_tui.exit_codes import ExitCode
from grpo_tui.run_files.metrics import MetricsChunk


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


# --- what it prints of the training ----------------------------------------------------------------------------------


def services(**states: ServiceState) -> Snapshot:
    kinds = {"env": "environment", "trainer": "trainer"}
    found = [ServiceStatus(name=name, kind=kinds[name], state=state, log="x") for name, state in states.items()]
    status = RunStatus(run="r", profile="p", state=RunState.RUNNING, supervisor=None, services=found, started_at=100.0)
    return Snapshot(number=0, status=status)


def steps(*numbers: int, **metrics: float) -> MetricsChunk:
    lines = [
        MetricsLine(step=step, time=100.0 + 3 * step, policy_version=step, metrics={"reward/mean": 0.5, **metrics})
        for step in numbers
    ]
    return MetricsChunk(lines=tuple(lines))


def due(training: Training, at: float) -> list[str]:
    return list(training.due(now=100.0 + at, at=at))


def test_a_line_of_progress_comes_after_the_first_step_and_then_every_30_s_while_something_moves() -> None:
    training = Training(settings=RunSettings(training_steps=100))
    training.receive(services(env=ServiceState.READY, trainer=ServiceState.READY))
    assert due(training, 1.0) == []
    training.extend(steps(1), 3.0)
    assert due(training, 3.0) == ["step 1/100  reward 0.500"]
    training.extend(steps(2, 3, 4, 5), 15.0)
    assert due(training, 15.0) == []
    assert due(training, 33.0) == ["step 5/100  reward 0.500  3.0s a step  4m left"]
    assert due(training, 63.0) == []  # no step since


def test_steps_of_an_earlier_life_are_no_progress_of_a_run_that_was_resumed(tmp_path: Path) -> None:
    training = Training(settings=RunSettings())
    training.receive(services(env=ServiceState.READY, trainer=ServiceState.READY))
    training.extend(steps(-5), 1.0)  # 85 s: before the run was started again
    assert due(training, 2.0) == list(training.result(tmp_path)) == []


def test_a_warning_is_printed_once_and_again_after_five_minutes_only_while_the_run_cannot_go_on() -> None:
    training = Training(settings=RunSettings())
    training.receive(services(env=ServiceState.FAILED, trainer=ServiceState.READY))
    first = due(training, 2.0)
    assert any(
        line.startswith("warning: no environment is running") and "\n  → `grpo-tui start env`" in line for line in first
    )
    assert due(training, 4.0) == []
    training.receive(services(env=ServiceState.READY, trainer=ServiceState.READY))
    assert due(training, 6.0) == []
    training.receive(services(env=ServiceState.FAILED, trainer=ServiceState.READY))
    assert due(training, 8.0) == []  # it flaps
    training.extend(steps(1), 200.0)
    assert [line[:6] for line in due(training, 200.0)] == ["step 1"]
    assert due(training, 303.0) == []  # something moved
    assert "no environment is running" in "".join(due(training, 501.0))


def test_a_run_that_has_finished_is_summed_up_with_what_comes_next(tmp_path: Path) -> None:
    training = Training(settings=RunSettings(training_steps=2))
    training.receive(services(env=ServiceState.READY, trainer=ServiceState.READY))
    training.extend(steps(1, 2, **{"eval/avg@4": 0.75, "eval/avg@4_se": 0.01}), 9.0)
    training.receive(Bye(state=RunState.FINISHED))
    (checkpoint := checkpoint_folder(tmp_path / CHECKPOINTS, 2)).mkdir(parents=True)
    (checkpoint / CHECKPOINT_MARKER).touch()
    result, following = training.result(tmp_path)
    assert result == "step 2/2  reward 0.500  eval/avg@4 0.750 ± 0.010  3.0s a step"
    assert f"`grpo-tui compare {tmp_path.name} RUN`" in following
    assert f"`grpo-tui export {tmp_path.name} FOLDER`" in following
