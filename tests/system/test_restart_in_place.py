"""Services that restart in place: told by a signal, ready when the new start answers, stopped when they do not hear."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import free_ports, is_open
from workplace import POLITE, Workplace, open_workplace, service, until

from grpo_engine.wire.supervisor import ServiceState, ServiceStatus
from grpo_tui.supervisor.keeper.proc import identify

pytestmark = pytest.mark.slow

RENEWABLE = """
import http.server, os, select, signal, socketserver, sys, threading
port, gate = int(sys.argv[1]), sys.argv[2]
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    def server_bind(self):
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", port
def pass_gate(what):
    path = f"{gate}-{what}"
    if os.path.exists(path):
        open(path).read()
        os.unlink(path)
def serve():
    server = Server(("127.0.0.1", port), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("serving", flush=True)
    return server
heard, told = os.pipe()
signal.signal(signal.SIGHUP, lambda *_: os.write(told, b"x"))
server = serve()
while os.read(heard, 1):
    print("heard", flush=True)
    pass_gate("old")
    server.shutdown(); server.server_close()
    print("nothing is left of it", flush=True)
    open(f"{gate}-restarts", "a").write("x")
    pass_gate("new")
    server = serve()
"""
"""Answers 200 until it is told to begin anew, and again when it has. Once each, where there are such pipes: it waits at
`old` before the last server ends, and at `new` before the next one answers."""
IN_PLACE = "{ signal = 'SIGHUP', log = '^nothing is left of it$' }"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path) as workplace:
        yield workplace


def renewable(place: Workplace, name: str = "a", **settings: object) -> str:
    """A service that restarts in place, healthy as long as it answers."""
    (port,) = free_ports(1)
    place.ports.append(port)
    probe = f"{{ http = 'http://127.0.0.1:{port}/', interval_s = 0.02 }}"
    how = {"ports": [port], "ready": probe, "restart_in_place": IN_PLACE, **settings}
    return service(name, RENEWABLE, port, place.folder / f"gate-{name}", **how)


def status_of(place: Workplace, name: str = "a") -> ServiceStatus:
    return next(each for each in place.status().services if each.name == name)


def log_of(place: Workplace, name: str = "a") -> list[str]:
    return (place.run_folder() / f"{name}.log").read_text(errors="replace").splitlines()


def open_gate(place: Workplace, which: str) -> None:
    (place.folder / f"gate-a-{which}").write_text("go")


@pytest.mark.parametrize("reports_by", ["log", "file"])
def test_a_restart_in_place_keeps_the_process_and_its_attempt_and_counts(place: Workplace, reports_by: str) -> None:
    by_file = f"{{ signal = 'SIGHUP', file = '{place.folder}/gate-a-restarts' }}"
    place.profile(renewable(place, restart_in_place=IN_PLACE if reports_by == "log" else by_file))
    place.up()
    before = status_of(place)
    for count in (1, 2, 3):
        done = place.grpo("restart", "a", "--wait")
        assert done.returncode == 0, done.stderr
        now = status_of(place)
        assert (now.state, now.pid, now.attempt, now.restarts) == (ServiceState.READY, before.pid, 1, count)
    assert log_of(place).count("serving") == 4
    assert now.started_at is not None
    assert before.started_at is not None
    assert now.started_at > before.started_at
    assert place.grpo("down").returncode == 0


@pytest.mark.extended("test_machine.py has both orders of events; the other tests here restart in place for real")
def test_the_last_server_that_still_answers_makes_nobody_ready(place: Workplace) -> None:
    for which in ("old", "new"):
        os.mkfifo(place.folder / f"gate-a-{which}")
    place.profile(renewable(place, stop_grace_s=60))
    place.up()
    assert place.grpo("restart", "a").returncode == 0
    until(lambda: "heard" in log_of(place))
    assert is_open(place.ports[0])  # it answers all its questions with 200
    told = status_of(place)
    assert (told.state, told.restarts, told.ready_at) == (ServiceState.STARTING, 1, None)
    assert "ending the previous start" in (told.why or "")
    open_gate(place, "old")
    until(lambda: "nothing is left of it" in log_of(place))
    until(lambda: "is closed" in (status_of(place).health or ""))
    assert status_of(place).state is ServiceState.STARTING
    open_gate(place, "new")
    until(lambda: status_of(place).state is ServiceState.READY)
    assert place.grpo("down").returncode == 0


@pytest.mark.extended("test_machine.py has both orders of events; the other tests here restart in place for real")
def test_asked_twice_it_begins_anew_and_is_ready_once_more(place: Workplace) -> None:
    os.mkfifo(place.folder / "gate-a-old")
    place.profile(renewable(place, stop_grace_s=60))
    place.up()
    waiting = [place.start("restart", "a", "--wait") for _ in range(2)]
    until(lambda: status_of(place).restarts == 2)
    open_gate(place, "old")
    for each in waiting:
        each.communicate()
        assert each.returncode == 0
    now = status_of(place)
    assert (now.state, now.attempt) == (ServiceState.READY, 1)
    assert place.grpo("down").returncode == 0


def test_what_does_not_react_within_its_grace_is_stopped_and_started(place: Workplace) -> None:
    os.mkfifo(place.folder / "gate-a-old")
    place.profile(renewable(place, stop_grace_s=1))
    place.up()
    before = place.pid("a")
    done = place.grpo("restart", "a", "--wait")
    assert done.returncode == 0, done.stderr
    now = status_of(place)
    assert (now.state, now.attempt, now.restarts) == (ServiceState.READY, 2, 2)
    assert identify(before) is None
    assert "did not restart in place within 1 s" in (place.run_folder() / "supervisor.log").read_text()
    assert place.grpo("down").returncode == 0


def test_what_dies_of_the_signal_is_started_again(place: Workplace) -> None:
    place.profile(service("a", POLITE, restart_in_place=IN_PLACE), service("b", POLITE))
    place.up()
    done = place.grpo("restart", "a", "--wait")
    assert done.returncode == 0, done.stderr
    assert (status_of(place).attempt, status_of(place).state) == (2, ServiceState.READY)
    assert place.grpo("down").returncode == 0


def test_followers_end_before_it_begins_anew_and_come_back_after_it(place: Workplace) -> None:
    follower = service("b", POLITE, needs=["a"], restart_with=["a"], restart_in_place=IN_PLACE)
    place.profile(renewable(place), follower)
    place.up()
    first = place.pid("b")
    assert place.grpo("restart", "a", "--wait").returncode == 0
    until(lambda: status_of(place, "b").state is ServiceState.READY)
    assert (status_of(place, "a").attempt, status_of(place, "b").attempt) == (1, 2)
    assert identify(first) is None
    told = (place.run_folder() / "supervisor.log").read_text()
    assert told.index("b: stopping → waiting") < told.index("a: ready → starting")
    assert place.grpo("down").returncode == 0


@pytest.mark.parametrize(
    "moment", [pytest.param("old", marks=pytest.mark.extended("the same once the new server loads")), "new"]
)
def test_a_daemon_killed_in_the_middle_is_succeeded_by_one_that_brings_it_to_its_end(
    place: Workplace, moment: str
) -> None:
    os.mkfifo(place.folder / f"gate-a-{moment}")
    place.profile(renewable(place, stop_grace_s=60))
    place.up()
    before = place.pid("a")
    assert place.grpo("restart", "a").returncode == 0
    seen = {"old": "heard", "new": "nothing is left of it"}[moment]
    until(lambda: seen in log_of(place))
    until(lambda: moment == "old" or "is closed" in (status_of(place).health or ""))
    place.lose_daemon()
    assert place.grpo("start", "a").returncode == 0  # whoever speaks to the run brings its daemon back
    assert status_of(place).state is ServiceState.STARTING
    open_gate(place, moment)
    until(lambda: status_of(place).state is ServiceState.READY)
    now = status_of(place)
    assert (now.pid, now.attempt, now.restarts) == (before, 1, 1)
    assert place.grpo("down").returncode == 0


def test_an_unhealthy_service_restarts_in_place(place: Workplace) -> None:
    live = f"{{ file = '{place.folder}/fine', interval_s = 0.05, within_s = 0.2 }}"
    (place.folder / "fine").touch()
    place.profile(renewable(place, live=live), service("b", POLITE))
    place.up()
    (place.folder / "fine").unlink()
    until(lambda: status_of(place).state is ServiceState.UNHEALTHY)
    (place.folder / "fine").touch()
    before = place.pid("a")
    assert place.grpo("restart", "a", "--wait").returncode == 0
    assert (place.pid("a"), status_of(place).restarts) == (before, 1)
    os.kill(before, signal.SIGKILL)
    until(lambda: status_of(place).state is ServiceState.FAILED)
    assert place.grpo("down").returncode == 0
