"""Services that are started before their turn: they prepare, and begin once what they need is ready."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from stage import HOLDER, free_ports, is_open, python
from workplace import Workplace, service, until

from grpo_engine.wire.supervisor import ENDED_RUN_STATES, ServiceState
from grpo_tui.supervisor.keeper.client import Keeper, adopt_keeper
from grpo_tui.supervisor.keeper.proc import identify

pytestmark = pytest.mark.slow

HELD = """
import os, signal, sys
gate = os.environ.get("GRPO_TUI_GATE")
if gate is not None:
    print("prepared in 0.0 s", flush=True)
    if not os.read(int(gate), 1):
        print("no turn", flush=True)
        sys.exit(1)
print("begun", flush=True)
signal.pause()
"""
DIES = "import sys; print('no such module', flush=True); sys.exit(int(sys.argv[1]))"
IDLE_UNTIL_FILE = "import signal; signal.pause()"
BEGUN = "{ log = '^begun$', interval_s = 0.02 }"


def slow_service(place: Workplace) -> str:
    """A service `a` that is ready once a file exists."""
    ready = f"{{ file = '{place.folder}/is-ready', interval_s = 0.02 }}"
    return service("a", IDLE_UNTIL_FILE, ready=ready)


def let_ready(place: Workplace) -> None:
    (place.folder / "is-ready").touch()


def held_service(**settings: object) -> str:
    return service("b", HELD, **{"needs": ["a"], "ready": BEGUN, "prepare": True, **settings})


def num_lines(place: Workplace, line: str) -> int:
    """How often `b` has logged this line."""
    return place.log("b").splitlines().count(line)


def launch_held(place: Workplace, **settings: object) -> int:
    """Start a run whose service `b` is prepared and waits for `a`; the pid of `b`."""
    place.launch(slow_service(place), held_service(**settings))
    until(lambda: place.service("b").prepared_at is not None)
    return place.pid("b")


def test_a_held_service_begins_in_its_process_once_what_it_needs_is_ready(place: Workplace) -> None:
    pid = launch_held(place)
    held = place.service("b")
    assert (held.state, held.attempt, held.begun_at) == (ServiceState.WAITING, 1, None)
    assert (held.why or "").startswith("prepared, waits for a to be ready: starting for")
    assert num_lines(place, "begun") == 0
    let_ready(place)
    place.until_state(ServiceState.READY, "b")
    a, b = place.service("a"), place.service("b")
    assert (b.pid, b.attempt, b.restarts) == (pid, 1, 0)
    times = [b.started_at, b.prepared_at, a.ready_at, b.begun_at, b.ready_at]
    assert times == sorted(times, key=lambda at: at or 0.0)
    place.succeed("restart", "b", "--wait")  # what it needs is ready: it is started plainly
    again = place.service("b")
    assert (again.state, again.attempt, again.prepared_at) == (ServiceState.READY, 2, None)
    assert num_lines(place, "prepared in 0.0 s") == 1
    assert num_lines(place, "begun") == 2


@pytest.mark.extended("test_held_order.py has it, and so does every run of commands")
def test_a_service_with_prepare_off_is_started_at_its_turn(place: Workplace) -> None:
    place.launch(slow_service(place), held_service(prepare=False))
    place.until_state(ServiceState.STARTING)
    assert (place.service("b").state, place.service("b").pid) == (ServiceState.WAITING, None)
    let_ready(place)
    place.until_state(ServiceState.READY, "b")
    assert num_lines(place, "prepared in 0.0 s") == 0


def test_a_held_service_waits_on_under_the_next_supervisor_and_begins_once(place: Workplace) -> None:
    pid = launch_held(place)
    place.kill_supervisor()
    place.succeed("upgrade")
    held = place.service("b")
    assert (held.state, held.pid, held.attempt) == (ServiceState.WAITING, pid, 1)
    assert held.prepared_at is not None
    let_ready(place)
    place.until_state(ServiceState.READY, "b")
    assert (place.pid("b"), num_lines(place, "begun")) == (pid, 1)


def test_down_ends_a_held_service_at_once_and_it_never_begins(place: Workplace) -> None:
    pid = launch_held(place, stop_grace_s=60)
    place.succeed("down")
    assert identify(pid) is None
    assert num_lines(place, "begun") == 0
    assert place.service("b").state is ServiceState.STOPPED
    assert place.survivors() == []


@pytest.mark.parametrize(
    "exit_code", [7, pytest.param(0, marks=pytest.mark.extended("the same with 7; the life cycle has both"))]
)
def test_a_held_service_that_exits_before_its_turn_has_failed_with_its_reason(place: Workplace, exit_code: int) -> None:
    dies = service("b", DIES, exit_code, needs=["a"], ready=BEGUN, prepare=True)
    place.launch(slow_service(place), dies)
    until(lambda: place.status().state in ENDED_RUN_STATES)
    b = place.service("b")
    assert (b.state, b.attempt, b.exit_code) == (ServiceState.FAILED, 1, exit_code)
    assert (b.why or "").startswith(f"exit code {exit_code} before its turn to begin; last lines:\n  no such module")


@pytest.mark.extended("test_machine_histories.py restarts held services by every policy; the exit of one is above")
def test_a_held_service_is_killed_and_restarted_by_its_policy_while_it_waits(place: Workplace) -> None:
    pid = launch_held(place, restart="'on-failure'", backoff_s=0.05)
    os.kill(pid, signal.SIGKILL)
    until(lambda: place.service("b").attempt == 2 and place.service("b").prepared_at is not None)
    assert place.service("b").state is ServiceState.WAITING
    let_ready(place)
    place.until_state(ServiceState.READY, "b", attempt=2)


def test_a_held_service_whose_port_is_taken_at_its_turn_is_refused_and_ended(place: Workplace) -> None:
    (port,) = free_ports(1)
    pid = launch_held(place, ports=[port])
    with subprocess.Popen(python(HOLDER, port, place.folder)) as foreign:
        until(lambda: is_open(port))
        let_ready(place)
        until(lambda: place.service("b").state is ServiceState.FAILED)
        b = place.service("b")
        foreign.kill()
    assert (b.is_refused, b.pid, [each.port for each in b.refusals]) == (True, None, [port])
    assert identify(pid) is None
    assert num_lines(place, "begun") == 0


def test_the_end_of_its_keeper_ends_a_held_service_and_does_not_let_it_begin(place: Workplace) -> None:
    pid = launch_held(place)
    keeper = adopt_keeper(place.run_folder(), "b", 1)
    assert isinstance(keeper, Keeper)
    assert keeper.is_held
    supervisor = place.supervisor().pid
    os.kill(supervisor, signal.SIGSTOP)  # so that it does not end what the keeper leaves
    os.kill(keeper.identity.pid, signal.SIGKILL)
    until(lambda: identify(pid) is None)
    os.kill(supervisor, signal.SIGCONT)
    assert (num_lines(place, "no turn"), num_lines(place, "begun")) == (1, 0)
    place.until_state(ServiceState.FAILED, "b")
