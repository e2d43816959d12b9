"""Whole runs with real processes, through the command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer

import pytest
from stage import HOLDER, free_ports, is_open
from workplace import DEADLINE_S, IDLE, IGNORES_SIGTERM, PYTHON, UP, Workplace, service, until

from grpo_engine.wire.run_folder import LOCK_FILE, TOKEN_FILE
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, RunState, ServiceState
from grpo_tui.supervisor.keeper.proc import identify
from grpo_tui.supervisor.lock import has_daemon

pytestmark = pytest.mark.slow


@contextmanager
def refusing_server() -> Iterator[str]:
    """The URL of a server in this process that answers each request with 503."""

    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingTCPServer(("127.0.0.1", 0), Refusal) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


READS_NUMBERS = """
items = [("1 + 1", "2")] * 32
def score(completion): return float(completion)
"""


def test_a_service_starts_once_what_it_needs_answers_200_and_the_run_ends_with_the_last(place: Workplace) -> None:
    place.profile(service("b", "print('hi')", needs="{ a = 'ready' }"), place.server(loads_s=0.5))
    shown = place.succeed("up", "--profile", "p", "--wait", "finished", "--json")
    lines = [json.loads(line) for line in shown.splitlines()]
    states = [(line["service"], line["state"]) for line in lines if line["event"] == "service"]
    assert states.index(("a", "ready")) < states.index(("b", "starting"))
    assert (lines[-1]["event"], lines[-1]["state"], lines[-1]["exit_code"]) == ("end", "finished", 0)
    assert place.status().state is RunState.FINISHED
    a, b = place.service("a"), place.service("b")
    assert a.ready_at is not None
    assert b.started_at is not None
    assert b.started_at >= a.ready_at
    assert (a.state, b.state, b.exit_code) == (ServiceState.STOPPED, ServiceState.FINISHED, 0)
    assert place.survivors() == []


@pytest.mark.parametrize(
    ("failing", "words"),
    [
        (
            service("a", "import sys; print('loss is NaN', flush=True); sys.exit(3)", needs=["idle"]),
            ["a failed: exit code 3; last lines:\n  loss is NaN"],
        ),
        (
            '[services.a]\nkind = "command"\nargv = ["no-such-program"]\n',
            ["a failed: cannot start no-such-program: not found in PATH"],
        ),
        (
            '[services.a]\nkind = "environment"\nmodel_name = "local/tiny"\ntask = "python:reads_numbers:score"\n',
            ["a failed: exit code 2: grpo-engine env: task.functions: reads_numbers:score failed: ValueError"],
        ),
    ],
    ids=["exit code", "missing program", "failing reward"],
)
def test_a_failing_service_ends_the_run_at_once_and_its_reason_is_printed(
    place: Workplace, failing: str, words: list[str]
) -> None:
    place.profile(service("idle", IDLE), failing)
    (place.folder / "profiles" / "reads_numbers.py").write_text(READS_NUMBERS)
    done = place.grpo("up", "--profile", "p", "--wait", "finished")
    assert done.returncode == 1
    assert all(each in done.stderr for each in words), done.stderr
    *_, last = done.stderr.splitlines()
    assert words[0].partition(";")[0] in last, "the last line has the reason"
    assert (place.service().state, place.service().attempt) == (ServiceState.FAILED, 1)
    assert place.status().state in ENDED_RUN_STATES
    assert place.survivors() == []


def test_a_crash_is_followed_by_restarts_until_the_limit(place: Workplace) -> None:
    crash = "import sys; open(sys.argv[1], 'a').write('a 1\\n'); sys.exit(7)"
    place.profile(service("a", crash, place.folder / "starts", restart='"on-failure"', max_restarts=2, backoff_s=0.05))
    assert place.grpo("up", "--profile", "p", "--wait", "finished").returncode == 1
    assert len(place.starts()) == 3
    status = place.service()
    assert (status.restarts, status.failures, status.exit_code) == (2, 2, 7)
    assert (status.why or "").startswith("exit code 7; given up after 2 restarts")


def test_restart_stop_and_start_change_the_process(place: Workplace) -> None:
    place.up(place.recorded())
    before = place.pid()
    place.succeed("restart", "a", "--wait")
    assert place.pid() != before
    assert identify(before) is None
    place.succeed("stop", "a", "--wait")
    status = place.service()
    assert (status.state, status.pid, status.why) == (ServiceState.STOPPED, None, "stopped by request")
    place.succeed("start", "a", "--wait")
    assert len(place.starts()) == 3
    assert place.grpo("stop", "b").returncode == 2


def test_a_command_prints_the_state_that_follows_from_it(place: Workplace) -> None:
    place.up(service("a", IDLE), service("slow", IGNORES_SIGTERM, ready=UP, stop_grace_s=3600))
    assert place.grpo("restart", "slow").stderr == "slow: restart requested; it is stopping\n"
    assert place.grpo("stop", "slow").stderr == "slow: stop requested; it is stopping\n"
    place.succeed("stop", "a", "--wait")
    shown = place.grpo("start", "a").stderr
    assert shown in {"a: start requested; it is starting\n", "a: start requested; it is ready\n"}
    place.succeed("down", "--timeout", "0")


def test_a_service_is_not_restarted_while_one_that_it_needs_has_failed(place: Workplace) -> None:
    place.up(service("a", IDLE), service("b", IDLE, needs="{ a = 'ready' }"))
    os.kill(place.pid("a"), signal.SIGKILL)
    place.until_state(ServiceState.FAILED)
    refused = place.grpo("restart", "b", "--wait")
    assert refused.returncode == 4
    assert "b needs a, which has failed: start a first" in refused.stderr
    assert place.status().state is RunState.DEGRADED
    place.succeed("start", "a", "--wait")
    place.succeed("restart", "b", "--wait")
    assert place.status().state is RunState.RUNNING


def test_down_stops_services_from_the_top_and_prints_how_long_each_took(place: Workplace) -> None:
    chain = [service("s0", IDLE)] + [service(f"s{i}", IDLE, needs=f"{{ s{i - 1} = 'started' }}") for i in (1, 2, 3)]
    run = place.up(*chain)
    shown = place.succeed("down")
    assert [line.split()[2] for line in shown.splitlines() if " ended in " in line] == ["s3", "s2", "s1", "s0"]
    assert f"{run}: stopped in" in shown
    assert place.survivors() == []
    assert place.grpo("down").returncode == 5


def test_down_kills_services_that_ignore_sigterm_after_one_grace_period_for_all(place: Workplace) -> None:
    settings = {"stop_grace_s": 1, "ready": UP}
    chain = [service("s0", IGNORES_SIGTERM, **settings)]
    chain += [service(f"s{i}", IGNORES_SIGTERM, needs=f"{{ s{i - 1} = 'ready' }}", **settings) for i in (1, 2, 3)]
    place.up(*chain)
    place.succeed("down")
    log = place.log()
    assert "all services together have 1.0 s to stop" in log
    assert log.rindex("→ stopping") < log.index("→ stopped"), "one service was awaited before the next got SIGTERM"
    assert place.survivors() == []


def test_a_killed_supervisor_is_replaced_by_a_command_that_acts_and_services_keep_running(place: Workplace) -> None:
    gate = place.folder / "gate"
    os.mkfifo(gate)
    ends = service("ends", "import sys; open(sys.argv[1]).read(); sys.exit(9)", gate, ends_run="false")
    place.up(place.recorded("keeps"), ends)
    before = place.pid("keeps")
    place.kill_supervisor()
    gate.write_text("go")
    until(lambda: place.service("ends").exit_code == 9)
    status = place.status()
    assert status.supervisor is None
    assert status.warnings[0].id == "no-supervisor"
    for words in (("ps",), ("metrics",), ("logs", "keeps")):
        said = place.grpo(*words)
        assert said.returncode == 0
        assert "has no supervisor; its services keep running, and `grpo-tui upgrade p-" in said.stderr
    assert not has_daemon(place.run_folder()), "a command that only reads has started one"
    place.succeed("upgrade")
    assert place.status().supervisor is not None
    place.succeed("restart", "ends")
    assert place.pid("keeps") == before
    assert place.starts() == [("keeps", before)]
    assert place.service("ends").attempt == 2
    assert "keeps: taken over in attempt 1: ready" in place.log()
    assert "ends: ready → failed (exit code 9)" in place.log()
    gate.write_text("go")


def test_down_works_on_a_run_whose_supervisor_was_killed(place: Workplace) -> None:
    place.up(service("a", IDLE), service("b", IGNORES_SIGTERM, stop_grace_s=0.2))
    place.kill_supervisor()
    place.succeed("down")
    assert place.survivors() == []


@pytest.mark.parametrize(
    ("is_damaged", "message"),
    [
        (True, "taken over in attempt 1"),
        pytest.param(
            *(False, "its ledger is of version 1, this program reads 2"),
            marks=pytest.mark.extended("the same with a damaged file"),
        ),
    ],
    ids=["damaged", "of another version"],
)
def test_a_state_file_that_cannot_be_read_loses_no_service(place: Workplace, is_damaged: bool, message: str) -> None:
    place.up(place.recorded())
    before = place.pid()
    place.kill_supervisor()
    path = place.run_folder() / "state.json"
    document = json.loads(path.read_text())
    document["ledger"] = {"version": 1, "ending": None, "services": "in another format"}
    path.write_text('{"run": "x", "sta' if is_damaged else json.dumps(document))
    assert is_damaged or place.grpo("status").returncode == 0
    place.up()
    assert (place.pid(), place.starts()) == (before, [("a", before)])
    assert message in place.log()


def test_sigterm_to_the_supervisor_leaves_services_running(place: Workplace) -> None:
    place.up(service("a", IDLE))
    pid, supervisor = place.pid(), place.supervisor()
    os.kill(supervisor.pid, signal.SIGTERM)
    until(lambda: identify(supervisor.pid) is None)
    assert identify(pid) is not None


def test_two_starts_at_once_make_one_run(place: Workplace) -> None:
    place.profile(place.recorded())
    both = [place.start("up", "--profile", "p", "--detach", "--wait", "ready") for _ in range(2)]
    answers = [each.communicate(timeout=60) for each in both]
    assert [each.returncode for each in both] == [0, 0], answers
    assert len({out for out, _ in answers}) == 1
    assert sorted("joined" in err for _, err in answers) == [False, True]
    assert len(place.starts()) == 1


def test_a_foreign_process_on_the_port_is_named_and_killed_only_with_take_ports(place: Workplace) -> None:
    place.profile(place.server())
    (port,) = place.ports
    holder = subprocess.Popen([PYTHON, "-I", "-S", "-c", HOLDER, str(port)])
    try:
        until(lambda: is_open(port))
        refused = place.grpo("up", "--profile", "p", "--wait", "ready")
        assert refused.returncode == 4, refused.stderr
        assert refused.stderr.count(f"port {port} is held by pid {holder.pid}") == 1
        assert "--new starts the run on free ports; --take-ports ends what holds them" in refused.stderr
        assert not list((place.folder / "logs").glob("*/"))
        assert place.survivors() == []
        assert is_open(port)
        place.up(flags=["--take-ports"])
        assert holder.wait(timeout=60) == -signal.SIGKILL
    finally:
        holder.kill()
        holder.wait()


def test_a_time_out_takes_an_attached_run_down_and_leaves_a_detached_one(place: Workplace) -> None:
    place.profile(service("a", IDLE, ready="{ file = 'never', interval_s = 0.05 }"))
    waiting = ("up", "--profile", "p", "--wait", "ready", "--timeout", 0.5)
    attached = place.grpo(*waiting)
    assert attached.returncode == 3, attached.stderr
    assert place.survivors() == []
    detached = place.grpo(*waiting, "--detach")
    assert detached.returncode == 3, detached.stderr
    assert "grpo-tui down" in detached.stderr
    assert place.status().state is RunState.STARTING


def test_a_service_that_is_never_ready_fails_after_its_limit_with_the_answer_of_its_probe(place: Workplace) -> None:
    with refusing_server() as url:  # answers already when the limit begins
        place.profile(service("a", IDLE, ready=f"{{ http = '{url}/health', interval_s = 0.05, within_s = 1 }}"))
        done = place.grpo("up", "--profile", "p", "--wait", "ready", "--detach")
    assert done.returncode == 1
    assert "not ready within 1 s: /health answers 503" in done.stderr
    assert "the run goes on" not in done.stderr


def test_ctrl_c_ends_a_run_in_the_foreground(place: Workplace) -> None:
    place.profile(service("a", IDLE))
    foreground = place.start("up", "--profile", "p")
    until(lambda: place.grpo("ps").stdout.count("running") == 1)
    foreground.send_signal(signal.SIGINT)
    _, errors = foreground.communicate(timeout=60)
    assert foreground.returncode == 130
    assert "Traceback" not in errors
    assert place.status().state is RunState.STOPPED


@pytest.mark.parametrize("command", ["up --profile p", "up --profile p --wait ready --detach"])
def test_ctrl_c_before_a_command_watches_its_run_is_obeyed_as_soon_as_it_does(place: Workplace, command: str) -> None:
    """The command ended and the run, which it would have ended a moment later, went on."""
    place.profile(service("a", IDLE))
    done = place.python(
        "import os, signal, sys; from grpo_tui.cli import main, up; watch = up.wait_for\n"
        "def interrupted(*words, **named): os.kill(os.getpid(), signal.SIGINT); watch(*words, **named)\n"
        f"up.wait_for = interrupted; sys.argv[1:] = {command.split()}; main()"
    )
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    is_left = "--detach" in command
    assert ("the run goes on: `grpo-tui status" in done.stderr) is is_left
    assert (place.status().state is RunState.STOPPED) is not is_left


@pytest.mark.parametrize("command", ["status", "status nix", "down", "logs a", "metrics", "restart a", "attach"])
def test_a_command_exits_with_5_where_there_is_no_run(place: Workplace, command: str) -> None:
    done = place.grpo(*command.split())
    assert (done.returncode, done.stdout) == (5, ""), done
    assert "Traceback" not in done.stderr


def test_a_wrong_profile_starts_nothing(place: Workplace) -> None:
    place.profile(service("a", IDLE, needs="{ vlm = 'ready' }"))
    done = place.grpo("up", "--profile", "p", "--detach")
    assert done.returncode == 2
    assert "services.a.needs: 'vlm' is not a service here" in done.stderr
    assert not list(place.folder.glob("logs/p-*"))


def test_the_status_document_has_every_documented_key_and_null_for_the_unknown(place: Workplace) -> None:
    place.launch(service("a", IDLE, ports=free_ports(1)), service("b", IDLE, needs="{ a = 'finished' }"))
    until(lambda: "waits for a to finish" in place.grpo("status").stdout)
    until(lambda: (place.service("a").rss_bytes or 0) > 1_000_000)  # a sample after the interpreter has started
    metrics = {"time": 1.0, "step": 7, "policy_version": 7, "metrics": {"train/loss": 0.5}}
    (place.run_folder() / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    document = json.loads(place.succeed("status", "--json"))
    assert set(document) >= {"run", "profile", "state", "supervisor", "services", "gpus", "metrics", "warnings"}
    assert document["metrics"] == {"train/loss": 0.5, "step": 7}
    a, b = document["services"]
    keys = {"name", "kind", "state", "health", "pid", "pgid", "started_at", "ready_at", "restarts", "exit_code"}
    keys |= {"ports", "gpus", "cpu_percent", "rss_bytes", "gpu_memory_bytes", "log", "why"}
    assert set(a) >= keys
    assert a["pid"] == a["pgid"]
    assert a["rss_bytes"] > 1_000_000
    assert (b["state"], b["pid"], b["rss_bytes"], b["exit_code"]) == ("waiting", None, None, None)
    assert b["why"].startswith("waits for a to finish: ready for")
    stored = json.loads((place.run_folder() / "state.json").read_text())
    assert {key: stored[key] for key in ("run", "state", "supervisor")}.items() <= document.items()


def test_logs_are_shown_filtered_and_followed_to_the_end_of_the_run(place: Workplace) -> None:
    steps = """
import sys
for i in range(5): print("step", i, flush=True)
open(sys.argv[1]).read()
print("late step", flush=True)
"""
    gate = place.folder / "gate"
    os.mkfifo(gate)
    place.launch(service("a", steps, gate))
    until(lambda: "step 4" in place.grpo("logs", "a").stdout)
    following = place.start("logs", "a", "-f", "--grep", "step [34]|late", "-n", "1")
    assert following.stdout is not None
    assert following.stdout.readline() == "step 4\n"
    gate.write_text("go")
    rest, _ = following.communicate(timeout=60)
    assert rest == "late step\n"
    assert place.grpo("logs", "a", "-n", "2").stdout.splitlines() == ["step 4", "late step"]
    assert place.grpo("logs", "nobody").returncode == 2
    assert place.grpo("logs", "a", "--grep", "(").returncode == 2


def test_a_client_that_stops_reading_does_not_delay_other_commands(place: Workplace) -> None:
    place.up(service("a", IDLE))
    address = json.loads((place.run_folder() / "daemon.json").read_text())["socket"]
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(address)
        silent.sendall(b'{"type": "subscribe"}\n')
        for _ in range(3):
            place.succeed("restart", "a", "--wait")
        place.succeed("down")


def test_an_upgrade_replaces_the_supervisor_and_services_keep_running(place: Workplace) -> None:
    run = place.up(place.recorded())
    before, old = place.pid(), place.supervisor()
    shown = place.succeed("upgrade")
    new = place.supervisor()
    assert new.pid != old.pid
    assert identify(old.pid) is None
    assert shown.startswith(f"{run}: supervised by ")
    assert f"(pid {new.pid}) instead of" in shown
    assert place.pid() == before
    assert place.starts() == [("a", before)]


def test_a_deleted_run_folder_is_made_again_and_no_service_is_started_twice(place: Workplace) -> None:
    run = place.up(place.recorded())
    before = place.pid()
    place.delete_run_folder()
    until((place.folder / "logs" / run / "state.json").exists)
    assert place.up() == run
    assert "was deleted during its run and was made again" in place.log()
    place.kill_supervisor()  # its successor finds everything in the new folder
    place.succeed("restart", "a", "--wait")
    assert identify(before) is None
    assert len(place.starts()) == 2


def test_files_that_a_deletion_takes_after_the_folder_was_made_again_are_written_again(place: Workplace) -> None:
    """`rm -r` goes on with the names that it has read: without the lock of the run a second supervisor was started."""
    run = place.up(place.recorded())
    folder = place.run_folder()
    for name in (LOCK_FILE, TOKEN_FILE):
        (folder / name).unlink()
    until(lambda: has_daemon(folder) and (folder / TOKEN_FILE).exists())
    assert place.up() == run
    assert place.log().count(" started for run ") == 1
    assert len(place.starts()) == 1


def test_down_right_after_the_run_folder_was_deleted_ends_the_run(place: Workplace) -> None:
    """It said that no run was started here, and a second later the supervisor had made the folder again."""
    place.up(service("a", IDLE, ready=UP))
    with place.suspended(), suppress(subprocess.TimeoutExpired):
        place.delete_run_folder()
        ending = place.start("down")
        ending.wait(1)
    told, error = ending.communicate(timeout=DEADLINE_S)
    assert (ending.returncode, error) == (0, "")
    assert "stopped in" in told
    until(lambda: not place.supervisors())


def test_a_jump_of_the_clock_moves_no_timer_of_an_adopted_service(place: Workplace) -> None:
    gate = place.folder / "gate"
    failing = service("a", "import sys; sys.exit(3)", needs=["b"], restart='"on-failure"', backoff_s=3, max_restarts=1)
    opens = f"{{ file = '{gate}', interval_s = 0.02 }}"
    place.launch(failing, service("b", IDLE, ends_run="true", ready=opens))
    supervisor = place.supervisor()
    path = place.run_folder() / "state.json"
    gate.touch()
    until(
        lambda: (
            path.exists() and json.loads(path.read_text())["ledger"]["services"]["a"]["state"] == ServiceState.BACKOFF
        )
    )
    os.kill(supervisor.pid, signal.SIGKILL)  # at once: the pause lasts three seconds
    until(lambda: not has_daemon(path.parent))  # its main thread may end before others, which write
    document = json.loads(path.read_text())  # as a supervisor would have left it before the clock went back by a year
    for name in ("started_at", "ended_at"):
        document[name] = None if document[name] is None else document[name] + 31e6
    for each in document["services"]:
        each["started_at"] = each["started_at"] and each["started_at"] + 31e6
    path.write_text(json.dumps(document))
    place.succeed("start", "b")  # starts a supervisor that takes over
    place.until_state(ServiceState.FAILED)
    assert "; given up after 1 restart" in (place.service().why or "")


def test_a_run_without_folder_and_supervisor_is_not_started_twice_and_is_ended_by_its_name(place: Workplace) -> None:
    run = place.up(service("a", IGNORES_SIGTERM, ready=UP, stop_grace_s=0.5))
    pid = place.pid()
    place.kill_supervisor()
    place.delete_run_folder()
    refused = place.grpo("up", "--profile", "p", "--detach")
    assert refused.returncode == 1
    assert f"run {run} is live and its folder was deleted: end it with `grpo-tui down {run}` first" in refused.stderr
    assert f"pid {pid}" in place.succeed("down", run)
    assert place.survivors() == []
    assert place.grpo("down", run).returncode == 5
