"""What a run survives: killed keepers and supervisors, a full disk, hangs. Through the command line."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
from pathlib import Path

import httpx
import pytest
from ports import free_port
from rollout_fakes import REGISTRATION
from stage import FAMILY, HOLDER, free_ports, is_open
from workplace import IDLE, IGNORES_SIGTERM, SERVER, UP, Workplace, service, until

from grpo_engine.wire.supervisor import ProbeOutcome, RunState, ServiceState, Warning
from grpo_tui.client.api import run_status
from grpo_tui.client.local import look_at
from grpo_tui.keeper_process import all_processes, below
from grpo_tui.supervisor.keeper.client import living_keepers
from grpo_tui.supervisor.keeper.proc import identify
from grpo_tui.supervisor.state_file import read_state
from grpo_tui.view.timeline.file import TimelineFile

pytestmark = pytest.mark.slow


def keeper_pid(place: Workplace, name: str) -> int:
    (pid,) = [state.keeper.pid for state in living_keepers(place.run_folder()) if state.service == name]
    return pid


def write_ledger(place: Workplace, name: str, **changes: object) -> None:
    """Change what the supervisor recorded last about a service."""
    path = place.run_folder() / "state.json"
    document = json.loads(path.read_text())
    document["ledger"]["services"][name] |= changes
    path.write_text(json.dumps(document))


def num_in_ledger(place: Workplace, name: str) -> int:
    document = read_state(place.run_folder())
    assert document is not None
    assert document.ledger is not None
    return len(document.ledger.services[name].processes)


def last_states(timeline: TimelineFile) -> list[ServiceState]:
    timeline.read()
    assert timeline.ends is not None
    status = timeline.past(timeline.ends, None).status
    return [] if status is None else [each.state for each in status.services]


def test_what_a_killed_keeper_leaves_is_ended_before_its_service_starts_again(place: Workplace) -> None:
    place.ports = free_ports(5)
    wait = " and ".join(f"is_open({port})" for port in place.ports)
    ready = "import socket\ndef is_open(p):\n with socket.socket() as s: return s.connect_ex(('127.0.0.1', p)) == 0\n"
    probe = f"[{place.argv()[0]!r}, '-I', '-S', '-c', {ready + f'raise SystemExit(not ({wait}))'!r}]"
    place.up(
        service(
            "a", FAMILY, HOLDER, "family", *place.ports, ports=place.ports,
            restart="'on-failure'", backoff_s=0.1, stop_grace_s=0.3, ready=f"{{ command = {probe} }}",
        ),
    )  # fmt: skip
    before = place.pid()
    os.kill(keeper_pid(place, "a"), signal.SIGKILL)
    place.until_state(ServiceState.READY, attempt=2)
    assert identify(before) is None
    assert "keeper was killed" in place.log()


@pytest.mark.extended("test_what_a_killed_keeper_leaves_is_ended_before_its_service_starts_again")
def test_processes_younger_than_the_last_sample_are_ended_with_their_keeper(place: Workplace) -> None:
    place.ports = free_ports(5)
    program = f"import sys; open(sys.argv.pop(1)).read()\n{FAMILY}"  # no sample has what starts after the gate
    os.mkfifo(place.folder / "gate")
    place.up(service("a", program, place.folder / "gate", HOLDER, "family", *place.ports), service("b", IDLE))
    keeper = keeper_pid(place, "a")
    (place.folder / "gate").write_text("go")
    until(lambda: all(map(is_open, place.ports)))
    os.kill(keeper, signal.SIGKILL)
    place.until_state(ServiceState.FAILED)
    assert not any(map(is_open, place.ports))
    supervisor = place.supervisor()
    until(lambda: len(below(supervisor.pid, all_processes())) == 2)  # the keeper of b, and b: no zombie stays either


def is_unwritten(warning: Warning) -> bool:
    return "cannot write" in warning.text and "state.json" in warning.text


def test_a_full_disk_is_a_warning_and_services_keep_running(place: Workplace) -> None:
    place.up(*(service(name, IDLE, ends_run=str(name == "a").lower()) for name in "abc"))
    supervisor, a = place.supervisor(), place.pid()
    unlimited = resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE, (0, unlimited[1]))  # as when no byte can be written
    os.kill(place.pid("b"), signal.SIGKILL)
    place.until_state(ServiceState.FAILED, "b")
    until(lambda: any(map(is_unwritten, place.status().warnings)))
    place.succeed("stop", "c", "--wait")  # meanwhile lines of the timeline are lost
    assert identify(a) is not None
    resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE, unlimited)
    place.succeed("start", "c", "--wait")
    until(lambda: not any(map(is_unwritten, place.status().warnings)))  # with the next change it is written again
    timeline = TimelineFile(place.run_folder())
    until(lambda: last_states(timeline)[1:] == [ServiceState.FAILED, ServiceState.READY])  # what was not written too
    assert place.pid() == a


def test_a_service_can_be_stopped_while_it_starts_and_started_again(place: Workplace) -> None:
    place.launch(place.server(loads_s=3600), service("b", IDLE))
    (port,) = place.ports
    until(lambda: place.service().probe is ProbeOutcome.BAD_STATUS)
    why = place.service().why or ""
    assert why.startswith("starting for ")
    assert "/health answers 503" in why
    place.succeed("stop", "a", "--wait")
    assert (place.service().state, is_open(port)) == (ServiceState.STOPPED, False)
    place.succeed("start", "a")
    until(lambda: place.service().attempt == 2 and is_open(port))


def test_a_server_that_exits_with_code_0_by_a_signal_from_outside_is_started_again(place: Workplace) -> None:
    port = free_port()
    place.ports.append(port)
    place.launch(f'[services.a]\nkind = "rollout_api"\nport = {port}\nbackoff_s = 0.01\n', service("b", IDLE))
    place.until_state(ServiceState.READY)
    os.kill(place.pid(), signal.SIGTERM)
    place.until_state(ServiceState.READY, attempt=2)


def followed(place: Workplace, *more: str, **settings: object) -> None:
    """Start a run whose trainer restarts with vllm."""
    trainer = place.recorded("trainer", needs=["vllm"], restart_with=["vllm"])
    place.up(place.recorded("vllm", **settings), *more, trainer)


def until_trainer_is_back(place: Workplace) -> list[str]:
    """Wait until the trainer runs in its second attempt; the services in the order of their starts."""

    def is_back() -> bool:
        status = place.status()  # one for both: before the crash is noticed the run is running too
        (trainer,) = (each for each in status.services if each.name == "trainer")
        return status.state is RunState.RUNNING and trainer.attempt == 2

    until(is_back)
    return [name for name, _ in place.starts()]


def test_a_restart_takes_its_followers_along_in_order(place: Workplace) -> None:
    followed(place, place.recorded("env", needs=["vllm"]))
    env, trainer = place.pid("env"), place.pid("trainer")
    place.succeed("restart", "vllm", "--wait")
    assert until_trainer_is_back(place)[3:] == ["vllm", "trainer"]
    assert place.pid("env") == env
    assert identify(trainer) is None
    log = place.log()
    assert "restarting vllm, and with it trainer" in log
    assert log.index("trainer: stopping → waiting") < log.index("vllm: stopping → waiting")


@pytest.mark.extended("test_machine.py; test_a_restart_takes_its_followers_along_in_order")
def test_a_crash_takes_followers_along_too(place: Workplace) -> None:
    followed(place, restart="'on-failure'", backoff_s=0.1)
    os.kill(place.pid("vllm"), signal.SIGKILL)
    assert until_trainer_is_back(place) == ["vllm", "trainer", "vllm", "trainer"]


def test_a_service_over_its_memory_limit_is_ended_and_has_failed(place: Workplace) -> None:
    grows = "import time\nblock = bytearray(300_000_000)\nprint('up', flush=True)\nwhile True: time.sleep(60)"
    place.launch(service("a", grows, memory_limit_gb=0.1), service("b", IDLE, ends_run="true"))
    place.until_state(ServiceState.FAILED)
    assert "over its memory_limit_gb of 0.1" in (place.service().why or "")
    assert place.status().state is RunState.DEGRADED


def test_a_start_that_makes_progress_is_awaited_beyond_its_limit(place: Workplace) -> None:
    slow = """
import os, sys
with open(sys.argv[1]) as gate:
    for line in gate: print("shard", line.strip(), flush=True)
print("up", flush=True)
import signal; signal.pause()
"""
    os.mkfifo(place.folder / "gate")
    ready = "{ log = '^up$', interval_s = 0.02, within_s = 0.3, stalled_s = 60 }"
    place.launch(service("a", slow, place.folder / "gate", ready=ready))
    with (place.folder / "gate").open("w", buffering=1) as gate:
        for number in range(3):
            gate.write(f"{number}\n")
            until(lambda: f"shard {number}" in place.grpo("logs", "a").stdout)  # noqa: B023 - called at once
            assert place.service().state is ServiceState.STARTING
    place.until_state(ServiceState.READY)


def test_a_hang_after_readiness_is_unhealthy_and_restarted_where_the_policy_says_so(place: Workplace) -> None:
    (port,) = place.ports = free_ports(1)
    probe = f"http = 'http://127.0.0.1:{port}/health', interval_s = 0.1"
    place.up(
        service(
            "a", SERVER, port, ports=[port], ready=f"{{ {probe} }}", live=f"{{ {probe}, timeout_s = 1, within_s = 3 }}",
            restart="'on-failure'", restart_unhealthy="true", backoff_s=0.1, stop_grace_s=0.3,
        ),
    )  # fmt: skip
    before = place.pid()
    os.kill(before, signal.SIGSTOP)  # the port stays open, without an answer
    place.until_state(ServiceState.READY, attempt=2)
    assert identify(before) is None
    assert "no liveness for 3 s: /health: no answer in 1 s" in place.log()


def test_a_failure_writes_a_crash_report_and_then_runs_the_hooks(place: Workplace) -> None:
    note = "import os, pathlib, sys; e = os.environ; report = pathlib.Path(e['GRPO_TUI_RUN_FOLDER']) / "
    note += "f\"crash-{e['GRPO_TUI_HOOK_SERVICE']}-{e['GRPO_TUI_HOOK_ATTEMPT']}.txt\"; "
    note += "line = f\"{e['GRPO_TUI_HOOK_EVENT']} {e['GRPO_TUI_HOOK_SERVICE'] or 'run'} {report.exists()}\\n\"; "
    note += "open(sys.argv[1], 'a').write(line)"
    argv = [place.argv()[0], "-I", "-S", "-c", note, str(place.folder / "events")]
    hooks = f"[[hooks]]\non = ['ready', 'failed', 'restarted', 'finished']\nargv = {json.dumps(argv)}\n"
    crashes = "import sys; print('Traceback: boom', flush=True); sys.exit(3)"
    place.profile(
        service("idle", IDLE),
        service("trainer", crashes, needs=["idle"], restart="'on-failure'", max_restarts=1, backoff_s=0.1),
        hooks,
    )
    assert place.grpo("up", "--profile", "p", "--wait", "finished").returncode == 1
    events = (place.folder / "events").read_text().splitlines()
    assert events.count("failed trainer True") == 2
    assert any(line.startswith("ready idle") for line in events)
    assert any(line.startswith("restarted trainer") for line in events)  # ready as soon as it runs, without a probe
    assert events[-1].startswith("failed run")
    report = (place.run_folder() / "crash-trainer-2.txt").read_text()
    assert report.startswith("trainer failed: exit code 3")
    assert "Traceback: boom" in report


def test_a_service_that_ignores_sigterm_does_not_delay_a_down_with_a_time_limit(place: Workplace) -> None:
    place.up(service("a", IGNORES_SIGTERM, stop_grace_s=3600, ready=UP))
    place.succeed("down", "--timeout", 0.2)
    assert place.survivors() == []


def test_down_all_ends_every_run_of_the_folder(place: Workplace) -> None:
    for name in ("p", "q"):
        place.profile(service("a", IDLE), name=name)
        place.succeed("up", "--profile", name, "--detach", "--wait", "ready")
    assert place.succeed("down", "--all").count("no process is left") == 2
    assert place.survivors() == []


@pytest.mark.extended("test_odd_files: a supervisor that cannot listen")
def test_a_supervisor_without_file_descriptors_logs_it_and_keeps_running(place: Workplace) -> None:
    place.up(service("a", IDLE))
    supervisor, a = place.supervisor(), place.pid()
    unlimited = resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, (3, unlimited[1]))
    until(lambda: "Too many open files" in place.log())
    until(lambda: "a part of the supervisor failed and runs again in 30 s (Sampler:" in place.log())
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, unlimited)
    assert place.supervisor() == supervisor
    assert place.pid() == a


@pytest.mark.extended("test_services_without_supervisor_and_keepers_are_reported_ended_and_not_started_twice")
def test_a_start_that_its_supervisor_did_not_finish_is_repeated_and_is_no_failure(place: Workplace) -> None:
    place.up(service("a", IDLE, ready=UP), service("b", IDLE))
    a, keeper = place.pid(), keeper_pid(place, "a")
    place.kill_supervisor()
    os.kill(a, signal.SIGKILL)
    until(lambda: identify(keeper) is None)
    write_ledger(place, "a", state="starting", attempt=2, has_process=True)  # no keeper was started for it yet
    place.succeed("start", "b")  # starts a supervisor that takes over
    until(lambda: place.service().state in {ServiceState.READY, ServiceState.FAILED})
    assert (place.service().state, place.service().attempt) == (ServiceState.READY, 3)


def test_a_service_without_a_probe_is_ready_when_it_is_taken_over_in_its_start(place: Workplace) -> None:
    place.up(service("a", IDLE), service("b", IDLE))
    a = place.pid()
    place.kill_supervisor()
    write_ledger(place, "a", state="starting", was_ready=False)  # as when the supervisor is killed after the start
    place.succeed("start", "b")
    place.until_state(ServiceState.READY)
    assert place.pid() == a


def test_after_both_supervisor_and_keeper_were_killed_every_process_is_ended(place: Workplace) -> None:
    place.ports = free_ports(5)
    place.up(service("a", FAMILY, HOLDER, "family", *place.ports), service("b", IDLE))
    until(lambda: all(map(is_open, place.ports)))
    until(lambda: num_in_ledger(place, "a") == 1 + len(place.ports))  # a sample has seen them all
    keeper = keeper_pid(place, "a")
    place.kill_supervisor()
    os.kill(keeper, signal.SIGKILL)
    place.succeed("restart", "b")  # starts a supervisor that takes over
    place.until_state(ServiceState.FAILED)
    until(lambda: not any(map(is_open, place.ports)))


def test_a_supervisor_that_ends_between_the_look_at_a_run_and_the_request_is_no_silent_one(place: Workplace) -> None:
    place.up(service("a", IDLE, ready=UP))
    seen = look_at(place.run_folder())
    place.kill_supervisor()
    assert seen.has_daemon
    assert [warning.id for warning in run_status(seen).warnings] == ["no-supervisor"]


def test_services_without_supervisor_and_keepers_are_reported_ended_and_not_started_twice(place: Workplace) -> None:
    run = place.up(place.recorded(), service("b", IGNORES_SIGTERM, ready=UP))
    keepers = [keeper_pid(place, name) for name in ("a", "b")]
    place.kill_supervisor()
    for keeper in keepers:
        os.kill(keeper, signal.SIGKILL)
    status = place.status()
    assert (status.state, status.warnings[0].id) == (RunState.DEGRADED, "no-supervisor")
    assert "processes of its services are still alive" in status.warnings[0].text
    joined = place.grpo("up", "--profile", "p", "--detach", "--wait", "ready")
    assert joined.returncode == 1, joined  # it is the same run, and no service is up in it any more
    assert f"run {run} joined" in joined.stderr
    assert len(place.starts()) == 1
    place.grpo("down")
    assert place.survivors() == []


def test_a_supervisor_whose_run_has_ended_meanwhile_leaves_no_registration(place: Workplace) -> None:
    place.profile(service("a", ""))
    assert place.grpo("up", "--profile", "p", "--wait", "finished").returncode == 0
    late = "import subprocess, sys; from pathlib import Path; from grpo_tui.supervisor.registered import register; "
    late += "folder = Path(sys.argv[1]); register(folder); "
    late += "subprocess.run([sys.executable, '-P', '-m', 'grpo_tui.supervisor.daemon', str(folder)], check=True)"
    done = place.python(f"import sys; sys.argv = ['', {str(place.run_folder())!r}]; {late}")
    assert done.returncode == 0, done.stderr
    until(lambda: "is over" in place.log())
    until(lambda: list(place.temporary.rglob("*.run")) == [])


STOPS_AT_A_GATE = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1]).read(), sys.exit()))
print("up", flush=True)
while True: signal.pause()
"""
"""On SIGTERM it waits for the other end of a pipe, and exits."""


def test_down_continues_when_the_supervisor_is_killed_meanwhile(place: Workplace) -> None:
    os.mkfifo(place.folder / "gate")
    place.up(service("a", STOPS_AT_A_GATE, place.folder / "gate", stop_grace_s=3600, ready=UP))
    supervisor = place.supervisor()
    ending = place.start("down")
    place.until_state(ServiceState.STOPPING)
    assert place.status().is_ending
    os.kill(supervisor.pid, signal.SIGKILL)
    until(lambda: place.log().count(" started for run ") == 2)
    (place.folder / "gate").write_text("")
    out, err = ending.communicate(timeout=60)
    assert ending.returncode == 0, err
    assert "a new one continues it" in err
    assert "stopped in" in out
    assert place.survivors() == []


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.extended("test_down_continues_when_the_supervisor_is_killed_meanwhile")
def test_an_up_during_a_down_waits_for_its_end_and_starts_another_run(place: Workplace) -> None:
    os.mkfifo(place.folder / "gate")
    run = place.up(service("a", STOPS_AT_A_GATE, place.folder / "gate", stop_grace_s=3600, ready=UP))
    ending = place.start("down")
    until(lambda: place.status().is_ending)
    starting = place.start("up", "--profile", "p", "--detach", "--wait", "ready")
    until(lambda: is_locked(place.folder / "logs" / ".start.lock"))  # the start looks at what is live
    (place.folder / "gate").write_text("")
    started, errors = starting.communicate(timeout=60)
    assert starting.returncode == 0, errors
    assert started.strip() not in ("", run)
    ending.communicate(timeout=60)
    assert place.status().state is RunState.RUNNING
    place.succeed("down", "--timeout", 0.1)


@pytest.mark.extended("test_probes; test_after_both_supervisor_and_keeper_were_killed_every_process_is_ended")
def test_what_a_command_probe_leaves_behind_is_ended_with_its_answer(place: Workplace) -> None:
    leaves = "import os, subprocess, sys; subprocess.Popen([sys.executable, '-I', '-S', '-c', sys.argv[1]], "
    leaves += "start_new_session=True, env={}); open(sys.argv[2])"
    argv = [place.argv()[0], "-I", "-S", "-c", leaves, IGNORES_SIGTERM, str(place.folder / "go")]
    place.launch(service("a", IDLE, ready=f"{{ command = {json.dumps(argv)}, interval_s = 0.05 }}"))
    supervisor = place.supervisor()
    until(lambda: (place.service().health or "").endswith("exits 1"))
    (place.folder / "go").touch()
    place.until_state(ServiceState.READY)
    until(lambda: len(below(supervisor.pid, all_processes())) == 2)


@pytest.mark.extended("test_a_full_disk_is_a_warning_and_services_keep_running; test_view_stalls; test_reporting")
def test_a_service_that_cannot_write_says_so_in_status_and_ps_until_it_can(place: Workplace) -> None:
    port = free_port()
    place.up(f'[services.api]\nkind = "rollout_api"\nport = {port}\nallow_without_token = true\n')
    api = place.pid("api")
    unlimited = resource.prlimit(api, resource.RLIMIT_FSIZE)

    def register() -> int:
        return httpx.post(f"http://127.0.0.1:{port}/register", json=REGISTRATION, trust_env=False).status_code

    resource.prlimit(api, resource.RLIMIT_FSIZE, (0, unlimited[1]))  # the kernel refuses every byte, as on a full disk
    assert register() == 503
    until(lambda: [fault.path for fault in place.service("api").write_faults] != [])
    [warning] = place.status().warnings
    assert warning.severity == "error"
    assert "api cannot write" in warning.text
    assert "rollouts.sqlite" in warning.text
    assert "(groups and batches are refused with 503, and asked for again)" in warning.text
    assert "rollouts.sqlite" in place.grpo("ps").stderr
    [listed] = json.loads(place.succeed("ps", "--json"))
    assert [each["id"] for each in listed["warnings"]] == [warning.id]
    resource.prlimit(api, resource.RLIMIT_FSIZE, unlimited)
    assert register() == 200
    until(lambda: place.status().warnings == [])
