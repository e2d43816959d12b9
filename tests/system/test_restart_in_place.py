"""Services that restart in place: on a signal, ready when the new server answers, stopped if they do not react."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence

import pytest
from stage import free_ports, is_open
from workplace import IDLE, UP, Workplace, service, until

from grpo_engine.wire.supervisor import ServiceState
from grpo_tui.supervisor.keeper.proc import identify

pytestmark = pytest.mark.slow

RENEWABLE = """
import os, signal, socket, sys
port, gate = int(sys.argv[1]), sys.argv[2]
def pass_gate(name):
    path = f"{gate}-{name}"
    if os.path.exists(path):
        open(path).read()
        os.unlink(path)
def listen():
    server = socket.create_server(("127.0.0.1", port), backlog=4096)  # for every probe: connections are not accepted
    print("serving", flush=True)
    return server
received, write_end = os.pipe()
signal.signal(signal.SIGHUP, lambda *_: os.write(write_end, b"x"))
server = listen()
while os.read(received, 1):
    print("SIGHUP", flush=True)
    pass_gate("old")
    server.close()
    print("server closed", flush=True)
    open(f"{gate}-restarts", "a").write("x")
    pass_gate("new")
    server = listen()
"""
"""Listens on a port; on SIGHUP it closes it and opens it again. It waits for the pipe GATE-old before it closes it, and
for GATE-new before it opens it, if they exist."""
IN_PLACE = "{ signal = 'SIGHUP', log = '^server closed$' }"


def up(place: Workplace, *others: str, gates: Sequence[str] = (), **settings: object) -> None:
    """Start a run with a service `a` that restarts in place and waits at these gates."""
    for gate in gates:
        os.mkfifo(place.folder / f"gate-{gate}")
    (port,) = place.ports = free_ports(1)
    probe = f"{{ tcp = '127.0.0.1:{port}', interval_s = 0.02 }}"
    settings = {"ports": [port], "ready": probe, "restart_in_place": IN_PLACE, **settings}
    place.up(service("a", RENEWABLE, port, place.folder / "gate", **settings), *others)


def open_gate(place: Workplace, gate: str) -> None:
    (place.folder / f"gate-{gate}").write_text("go")


FORK_SERVER = """
import json, os, signal, socket, sys
port, file = int(sys.argv[1]), sys.argv[2]
listener = socket.create_server(("127.0.0.1", port), backlog=4096)
received, write_end = os.pipe()
signal.signal(signal.SIGHUP, lambda *_: os.write(write_end, b"x"))
def report(num_restarts, killed_by):
    with open(file + ".new", "w") as draft:
        json.dump({"pid": os.getpid(), "num_restarts": num_restarts, "killed_by": killed_by}, draft)
    os.replace(file + ".new", file)
for num_restarts in range(9):
    if num_restarts:
        report(num_restarts, None)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        print("serves", os.getpid(), flush=True)
        signal.pause()
    os.waitpid(pid, 0)
    report(num_restarts, "SIGKILL")
    os.read(received, 1)
"""
"""Forks a child that serves. When that is killed it says so in FILE, and forks another on SIGHUP."""


def test_a_killed_server_is_started_again_in_place_with_a_crash_report_and_its_followers(place: Workplace) -> None:
    (port,) = place.ports = free_ports(1)
    file = place.folder / "restarts"
    in_place = f"{{ signal = 'SIGHUP', file = '{file}' }}"
    probe = f"{{ tcp = '127.0.0.1:{port}', interval_s = 0.02 }}"
    settings = {"ports": [port], "ready": probe, "restart_in_place": in_place, "backoff_s": 0.1}
    settings["restart"] = '"on-failure"'
    place.up(
        service("a", FORK_SERVER, port, file, **settings),
        service("follower", IDLE, needs=["a"], restart_with=["a"], ready=UP),
    )

    def servers() -> list[int]:
        return [int(pid) for pid in re.findall(r"^serves (\d+)$", place.log("a"), re.MULTILINE)]

    def kill_server(number: int) -> None:
        until(lambda: len(servers()) == number)
        place.until_state(ServiceState.READY)
        os.kill(servers()[-1], signal.SIGKILL)

    first = place.service()
    kill_server(1)
    until(lambda: place.service().restarts == 1 and place.service().state is ServiceState.READY)
    assert (place.service().pid, place.service().attempt) == (first.pid, 1)
    place.until_state(ServiceState.READY, "follower", attempt=2)
    assert "a: its server was killed by SIGKILL" in place.log()
    until(lambda: (place.run_folder() / "crash-a-1.txt").exists())
    kill_server(2)
    place.until_state(ServiceState.READY, attempt=2)
    assert "its server was killed by SIGKILL; restart 2 of " in place.log()
    assert identify(first.pid or 0) is None


@pytest.mark.parametrize("reports_by", ["log", "file"])
def test_a_restart_in_place_keeps_the_process_and_its_attempt_and_counts(place: Workplace, reports_by: str) -> None:
    by_file = f"{{ signal = 'SIGHUP', file = '{place.folder}/gate-restarts' }}"
    up(place, restart_in_place=IN_PLACE if reports_by == "log" else by_file)
    before = place.service()
    for count in (1, 2, 3):
        place.succeed("restart", "a", "--wait")
        now = place.service()
        assert (now.state, now.pid, now.attempt, now.restarts) == (ServiceState.READY, before.pid, 1, count)
    until(lambda: place.log("a").count("serving\n") >= 4)  # printed after the port is open, by which it is ready
    assert place.log("a").count("serving\n") == 4
    assert now.started_at is not None
    assert before.started_at is not None
    assert now.started_at > before.started_at


@pytest.mark.extended("test_machine.py has both orders of events; the other tests here restart in place for real")
def test_the_old_server_that_still_answers_does_not_make_the_service_ready(place: Workplace) -> None:
    up(place, gates=["old", "new"], stop_grace_s=60)
    place.succeed("restart", "a")
    until(lambda: "SIGHUP\n" in place.log("a"))
    assert is_open(place.ports[0])  # every probe of it passes
    now = place.service()
    assert (now.state, now.restarts, now.ready_at) == (ServiceState.STARTING, 1, None)
    assert "ending the previous start" in (now.why or "")
    open_gate(place, "old")
    until(lambda: "server closed\n" in place.log("a"))
    until(lambda: "is closed" in (place.service().health or ""))
    assert place.service().state is ServiceState.STARTING
    open_gate(place, "new")
    place.until_state(ServiceState.READY)


def test_a_service_that_does_not_react_in_its_grace_period_is_stopped_and_started(place: Workplace) -> None:
    up(place, gates=["old"], stop_grace_s=1)
    before = place.pid()
    place.succeed("restart", "a", "--wait")
    now = place.service()
    assert (now.state, now.attempt, now.restarts) == (ServiceState.READY, 2, 2)
    assert identify(before) is None
    assert "did not restart in place within 1 s" in place.log()


def test_a_service_that_the_signal_kills_is_started_again(place: Workplace) -> None:
    place.up(service("a", IDLE, restart_in_place=IN_PLACE), service("b", IDLE))
    place.succeed("restart", "a", "--wait")
    assert (place.service().attempt, place.service().state) == (2, ServiceState.READY)


def test_followers_stop_before_a_restart_in_place_and_start_after_it(place: Workplace) -> None:
    follower = service("b", IDLE, needs=["a"], restart_with=["a"], restart_in_place=IN_PLACE)
    up(place, follower)
    first = place.pid("b")
    place.succeed("restart", "a", "--wait")
    place.until_state(ServiceState.READY, "b")
    assert (place.service().attempt, place.service("b").attempt) == (1, 2)
    assert identify(first) is None
    log = place.log()
    assert log.index("b: stopping → waiting") < log.index("a: ready → starting")


@pytest.mark.parametrize(
    "moment", [pytest.param("old", marks=pytest.mark.extended("the same once the new server loads")), "new"]
)
def test_a_restart_in_place_completes_although_the_supervisor_is_killed(place: Workplace, moment: str) -> None:
    up(place, gates=[moment], stop_grace_s=60)
    before = place.pid()
    place.succeed("restart", "a")
    until(lambda: {"old": "SIGHUP\n", "new": "server closed\n"}[moment] in place.log("a"))
    until(lambda: moment == "old" or "is closed" in (place.service().health or ""))
    place.kill_supervisor()
    place.succeed("start", "a")  # starts a supervisor that takes over
    assert place.service().state is ServiceState.STARTING
    open_gate(place, moment)
    place.until_state(ServiceState.READY)
    now = place.service()
    assert (now.pid, now.attempt, now.restarts) == (before, 1, 1)


def test_an_unhealthy_service_restarts_in_place(place: Workplace) -> None:
    live = f"{{ file = '{place.folder}/fine', interval_s = 0.05, within_s = 2 }}"
    (place.folder / "fine").touch()
    up(place, service("b", IDLE), live=live)
    (place.folder / "fine").unlink()
    place.until_state(ServiceState.UNHEALTHY)
    (place.folder / "fine").touch()
    before = place.pid()
    place.succeed("restart", "a", "--wait")
    assert (place.pid(), place.service().restarts) == (before, 1)
    os.kill(before, signal.SIGKILL)
    place.until_state(ServiceState.FAILED)
