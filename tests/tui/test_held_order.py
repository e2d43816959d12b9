"""Held starts as pure functions: which service may prepare when, what ends one, and how the next supervisor sees it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from launches import READY_WITHIN_60_S, keeper_state, launch, launches, passed, play

from grpo_engine.wire.codec import write_json_atomically
from grpo_engine.wire.run_folder import keeper_spec_file, keeper_state_file
from grpo_engine.wire.supervisor import Refusal
from grpo_engine.wire.supervisor import ServiceState as S
from grpo_tui.services.base import NeedCondition, RestartPolicy
from grpo_tui.supervisor import order, takeover
from grpo_tui.supervisor.explanations import why
from grpo_tui.supervisor.keeper.client import Keeper, ProcessEntry
from grpo_tui.supervisor.keeper.proc import identify
from grpo_tui.supervisor.machine import (
    Admitted,
    AfterStop,
    Effect,
    Event,
    Exited,
    KillAsked,
    LimitExceeded,
    MayPrepare,
    Prepared,
    Refused,
    RestartAsked,
    RestartRequired,
    Service,
    Spawned,
    StopAsked,
    Tick,
)
from grpo_tui.supervisor.state_file import Ledger, StartTimes, boot_id, to_ledger

HELD = launch("env", prepares=True, needs={"vllm": NeedCondition.READY}, stop_grace_s=10.0)
PREPARED = ((0.0, MayPrepare()), (8.0, Prepared(1)))
STACK = launches(
    launch("api"),
    launch("vllm", prepares=True, needs={"api": NeedCondition.READY}),
    launch("env", prepares=True, needs={"vllm": NeedCondition.READY}),
    launch("trainer", prepares=True, needs={"env": NeedCondition.READY}),
)
HELD_SERVICE = Service(name="env", attempt=1, has_process=True, is_held=True)


def services(**changed: Service) -> dict[str, Service]:
    return {name: changed.get(name, Service(name=name)) for name in STACK}


def preparing(name: str) -> Service:
    return replace(HELD_SERVICE, name=name)


def prepared(name: str) -> Service:
    return replace(preparing(name), is_prepared=True)


def test_a_service_prepares_begins_in_the_same_attempt_and_its_limit_counts_from_its_turn() -> None:
    held, effects = play(HELD, *PREPARED)
    assert (held.state, held.attempt, held.has_process, held.is_running) == (S.WAITING, 1, True, False)
    assert (held.is_held, held.is_prepared, held.deadline_s, effects) == (True, True, None, [Effect.SPAWN_HELD])
    assert play(HELD, (9.0, MayPrepare()), (500.0, Tick()), service=held) == (held, [])
    assert play(HELD, (9.0, Spawned()), (9.0, passed()), service=held)[0].state is S.WAITING
    begun, effects = play(HELD, (100.0, Admitted()), service=held)
    assert (begun.state, begun.attempt, begun.is_held, effects) == (S.STARTING, 1, False, [Effect.OPEN_GATE])
    begun, _ = play(HELD, (101.0, Spawned()), service=begun)
    assert (begun.is_running, begun.deadline_s) == (True, 101.0 + READY_WITHIN_60_S.within_s)
    ready, _ = play(HELD, (102.0, passed()), service=begun)
    assert (ready.state, ready.num_starts) == (S.READY, 1)


def test_what_is_held_does_not_count_as_started() -> None:
    assert not order.is_met(NeedCondition.STARTED, prepared("env"))


def test_a_service_that_may_not_prepare_is_started_at_its_turn() -> None:
    plain = launch("env", needs={"vllm": NeedCondition.READY})
    waiting, effects = play(plain, (0.0, MayPrepare()))
    assert (waiting.has_process, effects) == (False, [])
    assert play(plain, (1.0, Admitted()), service=waiting)[1] == [Effect.SPAWN]


STOPPED, RESTARTED, FAILED = AfterStop.REST, AfterStop.RESTART, AfterStop.FAILURE


@pytest.mark.parametrize(
    ("event", "after", "effect", "reason"),
    [
        (StopAsked("stopped with the run"), STOPPED, Effect.STOP, "stopped with the run, before it began"),
        (KillAsked(), STOPPED, Effect.KILL, "killed by request, before it began"),
        (RestartRequired("its start was interrupted"), RESTARTED, Effect.STOP, "its start was interrupted"),
        (LimitExceeded("holds 9 GB"), FAILED, Effect.STOP, "holds 9 GB"),
    ],
    ids=["stop", "kill", "restart", "limit"],
)
def test_what_ends_a_held_service(event: Event, after: AfterStop, effect: Effect, reason: str) -> None:
    stopping, effects = play(HELD, *PREPARED, (9.0, event))
    assert (stopping.state, stopping.after_stop, stopping.is_held) == (S.STOPPING, after, False)
    assert (effects[1:], stopping.reason) == ([effect], reason)


def test_a_request_to_restart_a_held_service_changes_nothing_since_it_has_not_begun() -> None:
    assert play(HELD, *PREPARED, (9.0, RestartAsked())) == play(HELD, *PREPARED)


@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_of_a_held_service_is_a_failed_start(code: int) -> None:
    resting, _ = play(HELD, *PREPARED, (9.0, Exited(code=code)))
    assert (resting.state, resting.is_held, resting.has_process) == (S.BACKOFF, False, False)
    assert (resting.reason or "").startswith(f"exit code {code} before its turn to begin; restart 1 of 2")
    never = replace(HELD, restart=RestartPolicy.NEVER)
    assert play(never, *PREPARED, (9.0, Exited(code=code)))[0].state is S.FAILED


def test_a_refusal_at_its_turn_is_that_of_a_start() -> None:
    refusal = Refusal(resource="gpu", gpu=0, text="GPU 0 has 1 GB free")
    failed, _ = play(HELD, *PREPARED, (9.0, Admitted()), (9.5, Refused("GPU 0 has 1 GB free", (refusal,))))
    assert (failed.state, failed.is_refused, failed.has_process) == (S.FAILED, True, False)


@pytest.mark.parametrize(
    ("num_cores", "now", "expected"),
    [
        (16, services(), ["vllm", "env", "trainer"]),
        (1, services(), ["vllm"]),
        (2, services(), ["vllm"]),
        (4, services(), ["vllm", "env"]),
        (2, services(vllm=preparing("vllm")), []),
        (2, services(vllm=prepared("vllm")), ["env"]),
        (4, services(vllm=preparing("vllm"), env=prepared("env")), ["trainer"]),
        (16, services(api=Service(name="api", state=S.FAILED)), []),
        (16, services(api=Service(name="api", state=S.READY, is_running=True)), ["env", "trainer"]),
    ],
    ids=[
        "many cores",
        "one",
        "two",
        "four",
        "one prepares",
        "one is prepared",
        "mixed",
        "blocked",
        "its turn has come",
    ],
)
def test_which_services_prepare(num_cores: int, now: dict[str, Service], expected: list[str]) -> None:
    decided = order.decisions(now, STACK, None, 0.0, num_cores=num_cores)
    assert [name for name, event in decided if isinstance(event, MayPrepare)] == expected


def test_nothing_prepares_once_the_run_is_ending_and_what_is_held_is_stopped_at_once() -> None:
    now = services(vllm=Service(name="vllm", state=S.READY, has_process=True), env=prepared("env"))
    ending = order.Ending(state=order.RunState.STOPPED, since_s=0.0, budget_s=30.0)
    decided = dict(order.decisions(now, STACK, ending, 0.0, num_cores=16))
    assert isinstance(decided["env"], StopAsked)
    assert not any(isinstance(event, MayPrepare) for event in decided.values())
    assert "vllm" not in decided, "what needs it ends first"


def test_a_held_follower_does_not_delay_the_restart_that_it_waits_for() -> None:
    both = launches(
        launch("vllm", followers=("trainer",)),
        launch("trainer", prepares=True, needs={"vllm": NeedCondition.READY}),
    )
    asked = Service(name="vllm", state=S.READY, has_process=True, is_running=True, is_restart_pending=True)
    now = {"vllm": asked, "trainer": replace(prepared("trainer"), attempt=2)}
    assert order.decisions(now, both, None, 0.0) == [("vllm", Admitted())]


def test_a_held_first_start_still_waits_for_every_replica() -> None:
    replicas = launches(
        launch("vllm"),
        launch("vllm-2", replica_of="vllm"),
        launch(
            "env", prepares=True, needs_one_replica=True, needs=dict.fromkeys(("vllm", "vllm-2"), NeedCondition.READY)
        ),
    )
    up, lost = Service(name="vllm", state=S.READY, is_running=True), Service(name="vllm-2", state=S.FAILED)
    now = {"vllm": up, "vllm-2": lost, "env": HELD_SERVICE}
    assert order.unmet_needs("env", now, replicas) == [("vllm-2", NeedCondition.READY)]
    now["env"] = replace(HELD_SERVICE, attempt=2)
    assert order.unmet_needs("env", now, replicas) == []


def test_what_a_held_service_waits_for_is_told_with_how_far_it_is() -> None:
    now = services(env=prepared("env"), trainer=preparing("trainer"))
    assert why("env", now, STACK, 1.0) == "prepared, waits for vllm to be ready: it is waiting too"
    assert why("trainer", now, STACK, 1.0) == "preparing, waits for env to be ready: it is waiting too"


# --- taken over by the next supervisor -------------------------------------------------------------------------------


def found(folder: Path, service: Service, keeper: str | None, *, has_spec: bool = True) -> takeover.Found:
    """What the next supervisor makes of a service with this ledger entry, and a living keeper that wrote this state."""
    if has_spec:
        keeper_spec_file(folder, "env", 1).parent.mkdir(exist_ok=True)
        keeper_spec_file(folder, "env", 1).touch()
    if keeper is not None:
        own = identify(os.getpid())
        assert own is not None
        entry = ProcessEntry(pid=own.pid, start_ticks=own.start_ticks)
        write_json_atomically(keeper_state_file(folder, "env", 1), keeper_state("env", state=keeper, keeper=entry))
    entries = {"env": to_ledger(service, started_at=None, begins_at=None, times=StartTimes(), processes=())}
    ledger = Ledger(boot_id=boot_id(), ending=None, has_been_up=False, services=entries)
    return takeover.find(HELD, ledger, folder, 50.0)


HELD_IN_LEDGER = replace(HELD_SERVICE, is_prepared=True)
BEGUN_IN_LEDGER = replace(HELD_SERVICE, state=S.STARTING, is_held=False, deadline_s=60.0)
STOPPING_IN_LEDGER = replace(HELD_SERVICE, state=S.STOPPING, is_held=False, deadline_s=60.0)
UNSTARTED_IN_LEDGER = Service(name="env")


@pytest.mark.parametrize(
    ("ledger", "keeper", "state", "is_held", "effects"),
    [
        (HELD_IN_LEDGER, "held", S.WAITING, True, ()),
        (BEGUN_IN_LEDGER, "held", S.WAITING, True, ()),
        (UNSTARTED_IN_LEDGER, "held", S.WAITING, True, ()),
        (HELD_IN_LEDGER, "running", S.STARTING, False, ()),
        (BEGUN_IN_LEDGER, "running", S.STARTING, False, ()),
        (STOPPING_IN_LEDGER, "held", S.STOPPING, False, (Effect.STOP,)),
    ],
    ids=["held", "admitted, gate closed", "not in the ledger", "gate open", "begun", "being stopped"],
)
def test_the_keeper_knows_whether_a_service_that_is_taken_over_has_begun(
    tmp_path: Path, ledger: Service, keeper: str, state: S, is_held: bool, effects: tuple[Effect, ...]
) -> None:
    taken = found(tmp_path, ledger, keeper)
    assert isinstance(taken.process, Keeper)
    assert (taken.service.state, taken.service.is_held, taken.service.attempt) == (state, is_held, 1)
    assert (taken.process.is_held, taken.effects) == (keeper == "held", effects)
    if state is not S.STOPPING:
        assert taken.service.is_running is (keeper == "running")


def test_a_held_start_that_was_interrupted_before_its_keeper_is_made_again(tmp_path: Path) -> None:
    taken = found(tmp_path, replace(HELD_SERVICE), None, has_spec=False).service
    assert (taken.state, taken.after_stop) == (S.STOPPING, RESTARTED)
    again, _ = play(HELD, (51.0, Exited(code=None)), service=taken)
    assert (again.state, again.has_process) == (S.WAITING, False)


def test_a_held_service_that_exited_without_a_supervisor_is_a_failed_start(tmp_path: Path) -> None:
    taken = found(tmp_path, HELD_IN_LEDGER, "gone").service
    assert (taken.state, taken.is_held) == (S.WAITING, True)
    resting, _ = play(HELD, (51.0, Exited(code=1)), service=taken)
    assert resting.state is S.BACKOFF
