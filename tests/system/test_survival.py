"""What a run survives: lost keepers, a full disk, hangs, hunger, restarts in a group. Through the command line."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import FAMILY, HOLDER, free_ports, is_open
from workplace import DEAF, POLITE, SERVER, Workplace, open_workplace, service, until

from grpo_engine.wire.run_folder import ADDRESS_FILE, TIMELINE_FILE
from grpo_engine.wire.supervisor import ProbeOutcome, RunState, ServiceState, ServiceStatus
from grpo_tui.keeper_process import all_processes, below
from grpo_tui.supervisor.keeper.client import living_keepers
from grpo_tui.supervisor.keeper.proc import identify
from grpo_tui.supervisor.state_file import read_state

pytestmark = pytest.mark.slow

NOTES_START = """
import os, signal, sys, time
with open(sys.argv[1], "a") as file: file.write(f"{sys.argv[2]} {os.getpid()} {time.monotonic()}\\n")
print("up", flush=True)
signal.pause()
"""
"""Leaves a line for every process of it that was ever started: its name, its pid, when."""
UP = "{ log = '^up$', interval_s = 0.02 }"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path) as workplace:
        yield workplace


def status_of(place: Workplace, name: str) -> ServiceStatus:
    return next(each for each in place.status().services if each.name == name)


def keeper_pid(place: Workplace, name: str) -> int:
    (pid,) = [state.keeper.pid for state in living_keepers(place.run_folder()) if state.service == name]
    return pid


def write_ledger(place: Workplace, name: str, **changes: object) -> None:
    """Have the daemon's last words on a service be others."""
    path = place.run_folder() / "state.json"
    document = json.loads(path.read_text())
    document["ledger"]["services"][name] |= changes
    path.write_text(json.dumps(document))


def num_in_ledger(place: Workplace, name: str) -> int:
    document = read_state(place.run_folder())
    assert document is not None
    assert document.ledger is not None
    return len(document.ledger.services[name].processes)


def test_what_a_killed_keeper_leaves_is_ended_before_its_service_starts_again(place: Workplace) -> None:
    place.ports = free_ports(5)
    wait = " and ".join(f"is_open({port})" for port in place.ports)
    ready = "import socket\ndef is_open(p):\n with socket.socket() as s: return s.connect_ex(('127.0.0.1', p)) == 0\n"
    probe = f"[{place.argv()[0]!r}, '-I', '-S', '-c', {ready + f'raise SystemExit(not ({wait}))'!r}]"
    place.profile(
        service(
            "a", FAMILY, HOLDER, "family", *place.ports,
            ports=place.ports, restart="'on-failure'", backoff_s=0.1, ready=f"{{ command = {probe} }}",
        ),
    )  # fmt: skip
    place.up()
    before = place.pid("a")
    os.kill(keeper_pid(place, "a"), signal.SIGKILL)
    until(lambda: status_of(place, "a").attempt == 2 and status_of(place, "a").state is ServiceState.READY)
    assert identify(before) is None
    assert "keeper was killed" in (place.run_folder() / "supervisor.log").read_text()
    assert place.grpo("down").returncode == 0


@pytest.mark.extended("test_what_a_killed_keeper_leaves_is_ended_before_its_service_starts_again")
def test_orphans_that_nobody_has_seen_yet_are_ended_with_their_keeper(place: Workplace) -> None:
    place.ports = free_ports(5)
    program = f"import sys; open(sys.argv.pop(1)).read()\n{FAMILY}"  # no sample can know who is born after the gate
    os.mkfifo(place.folder / "gate")
    place.profile(service("a", program, place.folder / "gate", HOLDER, "family", *place.ports), service("b", POLITE))
    place.up()
    keeper = keeper_pid(place, "a")
    (place.folder / "gate").write_text("go")
    until(lambda: all(map(is_open, place.ports)))
    os.kill(keeper, signal.SIGKILL)
    until(lambda: status_of(place, "a").state is ServiceState.FAILED)
    assert not any(map(is_open, place.ports))
    supervisor = place.status().supervisor
    assert supervisor is not None
    until(lambda: len(below(supervisor.pid, all_processes())) == 2)  # the keeper of b, and b: no zombie stays either
    assert place.grpo("down").returncode == 0


def test_a_full_disk_is_told_and_services_go_on(place: Workplace) -> None:
    place.profile(service("a", POLITE), service("b", POLITE, ends_run="false"))
    place.up()
    supervisor, a = place.status().supervisor, place.pid("a")
    assert supervisor is not None
    unlimited = resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE, (0, unlimited[1]))  # as when no byte can be written
    os.kill(place.pid("b"), signal.SIGKILL)
    until(lambda: status_of(place, "b").state is ServiceState.FAILED)
    until(lambda: any("state.json cannot be written" in each.text for each in place.status().warnings))
    assert identify(a) is not None
    resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE, unlimited)
    assert place.grpo("start", "b", "--wait").returncode == 0
    until(lambda: place.status().warnings == [])  # with the next change it is written again
    timeline = place.run_folder() / TIMELINE_FILE
    until(lambda: timeline.read_bytes().count(b'{"type":"snapshot"') == 2)  # what it missed meanwhile is in the second
    assert place.pid("a") == a
    assert place.grpo("down").returncode == 0


def test_a_stop_during_a_start_is_obeyed_and_a_start_after_it_too(place: Workplace) -> None:
    (port,) = place.ports = free_ports(1)
    ready = f"{{ http = 'http://127.0.0.1:{port}/', interval_s = 0.05 }}"
    place.profile(service("a", SERVER, port, 3600, ports=[port], ready=ready), service("b", POLITE))
    assert place.grpo("up", "--profile", "p", "--detach").returncode == 0
    until(lambda: status_of(place, "a").probe is ProbeOutcome.BAD_STATUS)
    why = status_of(place, "a").why or ""
    assert why.startswith("starting for ")
    assert "/ answers 503" in why
    assert place.grpo("stop", "a", "--wait").returncode == 0
    assert (status_of(place, "a").state, is_open(port)) == (ServiceState.STOPPED, False)
    assert place.grpo("start", "a").returncode == 0
    until(lambda: status_of(place, "a").attempt == 2 and is_open(port))
    assert place.grpo("down").returncode == 0


def test_a_restart_takes_its_followers_along_in_order(place: Workplace) -> None:
    notes = place.folder / "notes"
    place.profile(
        service("vllm", NOTES_START, notes, "vllm", ready=UP),
        service("env", NOTES_START, notes, "env", ready=UP, needs=["vllm"]),
        service("trainer", NOTES_START, notes, "trainer", ready=UP, needs=["vllm"], restart_with=["vllm"]),
    )
    place.up()
    pids = {name: place.pid(name) for name in ("vllm", "env", "trainer")}
    assert place.grpo("restart", "vllm", "--wait").returncode == 0
    until(lambda: place.status().state is RunState.RUNNING and status_of(place, "trainer").attempt == 2)
    assert place.pid("env") == pids["env"]
    assert identify(pids["trainer"]) is None
    names = [line.split()[0] for line in notes.read_text().splitlines()]
    assert names[-2:] == ["vllm", "trainer"]
    assert len(names) == 5
    log = (place.run_folder() / "supervisor.log").read_text()
    assert "restarting vllm, and with it trainer" in log
    assert log.index("trainer: stopping → waiting") < log.index("vllm: stopping → waiting")
    assert place.grpo("down").returncode == 0


@pytest.mark.extended("test_machine.py; test_a_restart_takes_its_followers_along_in_order")
def test_a_restart_of_a_service_that_has_ended_starts_it_though_nothing_else_happens(place: Workplace) -> None:
    place.profile(service("a", "raise SystemExit(3)", ends_run="false"), service("b", POLITE))
    assert place.grpo("up", "--profile", "p", "--detach").returncode == 0  # it may fail before all are up
    until(lambda: status_of(place, "a").state is ServiceState.FAILED)
    assert place.grpo("restart", "a").returncode == 0
    until(lambda: status_of(place, "a").attempt == 2)
    assert place.grpo("down").returncode == 0


@pytest.mark.extended("test_machine.py; test_a_restart_takes_its_followers_along_in_order")
def test_a_crash_takes_followers_along_too(place: Workplace) -> None:
    notes = place.folder / "notes"
    place.profile(
        service("vllm", NOTES_START, notes, "vllm", ready=UP, restart="'on-failure'", backoff_s=0.1),
        service("trainer", NOTES_START, notes, "trainer", ready=UP, needs=["vllm"], restart_with=["vllm"]),
    )
    place.up()
    os.kill(place.pid("vllm"), signal.SIGKILL)
    until(lambda: place.status().state is RunState.RUNNING and status_of(place, "trainer").attempt == 2)
    names = [line.split()[0] for line in notes.read_text().splitlines()]
    assert names == ["vllm", "trainer", "vllm", "trainer"]
    assert place.grpo("down").returncode == 0


def test_a_service_that_takes_too_much_memory_is_ended_as_failed_in_words(place: Workplace) -> None:
    hungry = "import time\nblock = bytearray(300_000_000)\nprint('up', flush=True)\nwhile True: time.sleep(60)"
    place.profile(service("a", hungry, memory_limit_gb=0.1), service("b", POLITE, ends_run="true"))
    assert place.grpo("up", "--profile", "p", "--detach").returncode == 0
    until(lambda: status_of(place, "a").state is ServiceState.FAILED)
    assert "over its memory_limit_gb of 0.1" in (status_of(place, "a").why or "")
    assert place.status().state is RunState.DEGRADED
    assert place.grpo("down").returncode == 0


def test_a_start_that_moves_is_waited_for_past_its_limit(place: Workplace) -> None:
    slow = """
import os, sys
with open(sys.argv[1]) as gate:
    for line in gate: print("shard", line.strip(), flush=True)
print("up", flush=True)
import signal; signal.pause()
"""
    os.mkfifo(place.folder / "gate")
    ready = "{ log = '^up$', interval_s = 0.02, within_s = 0.3, stalled_s = 3 }"
    place.profile(service("a", slow, place.folder / "gate", ready=ready))
    assert place.grpo("up", "--profile", "p", "--detach").returncode == 0
    with (place.folder / "gate").open("w", buffering=1) as gate:
        for number in range(3):
            gate.write(f"{number}\n")
            until(lambda: f"shard {number}" in place.grpo("logs", "a").stdout)  # noqa: B023 - called at once
            assert status_of(place, "a").state is ServiceState.STARTING
    until(lambda: status_of(place, "a").state is ServiceState.READY)
    assert place.grpo("down").returncode == 0


def test_a_hang_after_readiness_is_unhealthy_and_restarted_where_the_policy_says_so(place: Workplace) -> None:
    (port,) = place.ports = free_ports(1)
    probe = f"http = 'http://127.0.0.1:{port}/health', interval_s = 0.1, timeout_s = 0.5"
    place.profile(
        service(
            "a", SERVER, port, ports=[port], ready=f"{{ {probe} }}", live=f"{{ {probe}, within_s = 1 }}",
            restart="'on-failure'", restart_unhealthy="true", backoff_s=0.1, stop_grace_s=0.3,
        ),
    )  # fmt: skip
    place.up()
    before = place.pid("a")
    os.kill(before, signal.SIGSTOP)  # the port stays open, and nobody answers
    until(lambda: status_of(place, "a").attempt == 2 and status_of(place, "a").state is ServiceState.READY)
    assert identify(before) is None
    log = (place.run_folder() / "supervisor.log").read_text()
    assert "no liveness for 1 s: /health: no answer in 0.5 s" in log
    assert place.grpo("down").returncode == 0


def test_a_failure_leaves_a_crash_report_and_tells_the_hooks_in_that_order(place: Workplace) -> None:
    note = "import os, pathlib, sys; e = os.environ; report = pathlib.Path(e['GRPO_TUI_RUN_FOLDER']) / "
    note += "f\"crash-{e['GRPO_TUI_HOOK_SERVICE']}-{e['GRPO_TUI_HOOK_ATTEMPT']}.txt\"; "
    note += "line = f\"{e['GRPO_TUI_HOOK_EVENT']} {e['GRPO_TUI_HOOK_SERVICE'] or 'run'} {report.exists()}\\n\"; "
    note += "open(sys.argv[1], 'a').write(line)"
    argv = [place.argv()[0], "-I", "-S", "-c", note, str(place.folder / "told")]
    hooks = f"[[hooks]]\non = ['ready', 'failed', 'restarted', 'finished']\nargv = {json.dumps(argv)}\n"
    crashes = "import sys; print('Traceback: boom', flush=True); sys.exit(3)"
    place.profile(
        service("idle", POLITE),
        service("trainer", crashes, needs=["idle"], restart="'on-failure'", max_restarts=1, backoff_s=0.1),
        hooks,
    )
    assert place.grpo("up", "--profile", "p", "--wait", "finished").returncode == 1
    told = (place.folder / "told").read_text().splitlines()
    assert told.count("failed trainer True") == 2
    assert any(line.startswith("ready idle") for line in told)
    assert any(line.startswith("restarted trainer") for line in told)  # ready as soon as it runs, without a probe
    assert told[-1].startswith("failed run")
    report = (place.run_folder() / "crash-trainer-2.txt").read_text()
    assert report.startswith("trainer failed: exit code 3")
    assert "Traceback: boom" in report


def test_a_deaf_service_does_not_hold_up_a_down_with_a_time_limit(place: Workplace) -> None:
    place.profile(service("a", DEAF, stop_grace_s=3600, ready="{ log = 'deaf', interval_s = 0.02 }"))
    place.up()
    done = place.grpo("down", "--timeout", 0.2, limit_s=30)
    assert done.returncode == 0, done.stderr
    assert place.survivors() == []


def test_down_all_ends_every_run_of_the_folder(place: Workplace) -> None:
    for name in ("p", "q"):
        place.profile(service("a", POLITE), name=name)
        assert place.grpo("up", "--profile", name, "--detach", "--wait", "ready").returncode == 0
    done = place.grpo("down", "--all")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no process is left") == 2
    assert place.survivors() == []


def test_a_socket_that_somebody_removed_is_put_back(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    supervisor = place.status().supervisor
    (socket,) = place.runtime.rglob("*.sock")
    socket.unlink()
    until(socket.exists)
    assert place.status().supervisor == supervisor
    assert place.grpo("down").returncode == 0


@pytest.mark.extended("test_a_socket_that_somebody_removed_is_put_back")
def test_a_socket_that_cannot_be_put_back_yet_ends_no_supervisor(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    supervisor = place.status().supervisor
    assert supervisor is not None
    (socket,), address = place.runtime.rglob("*.sock"), place.run_folder() / ADDRESS_FILE
    unlimited = resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE, (0, unlimited[1]))  # as on a full disk
    address.unlink()
    socket.unlink()
    until(socket.exists)
    before = socket.stat().st_ino
    until(lambda: socket.exists() and socket.stat().st_ino != before)  # and again, since its address cannot be written
    assert not address.exists()
    resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE, unlimited)
    until(address.exists)
    assert place.status().supervisor == supervisor
    assert place.grpo("down").returncode == 0


def test_a_supervisor_without_descriptors_says_so_and_goes_on(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    supervisor, a, log = place.status().supervisor, place.pid("a"), place.run_folder() / "supervisor.log"
    assert supervisor is not None
    unlimited = resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, (3, unlimited[1]))
    until(lambda: "Too many open files" in log.read_text())
    until(lambda: "a part of the supervisor failed and runs again in 30 s (Sampler:" in log.read_text())
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, unlimited)
    assert place.status().supervisor == supervisor
    assert place.pid("a") == a
    assert place.grpo("down").returncode == 0


def test_a_start_that_was_under_way_when_its_supervisor_left_is_begun_anew_and_no_failure(place: Workplace) -> None:
    place.profile(service("a", POLITE, ready=UP), service("b", POLITE))
    place.up()
    a, keeper = place.pid("a"), keeper_pid(place, "a")
    place.lose_daemon()
    os.kill(a, signal.SIGKILL)
    until(lambda: identify(keeper) is None)
    write_ledger(place, "a", state="starting", attempt=2, has_process=True)  # no keeper was started for it yet
    assert place.grpo("start", "b").returncode == 0  # brings a daemon that takes over
    until(lambda: status_of(place, "a").state in {ServiceState.READY, ServiceState.FAILED})
    assert (status_of(place, "a").state, status_of(place, "a").attempt) == (ServiceState.READY, 3)
    assert place.grpo("down").returncode == 0


def test_a_service_whose_start_nobody_saw_counts_as_ready_without_a_probe(place: Workplace) -> None:
    place.profile(service("a", POLITE), service("b", POLITE))
    place.up()
    a = place.pid("a")
    place.lose_daemon()
    write_ledger(place, "a", state="starting", was_ready=False)  # as when the daemon dies between start and answer
    assert place.grpo("start", "b").returncode == 0
    until(lambda: status_of(place, "a").state is ServiceState.READY)
    assert place.pid("a") == a
    assert place.grpo("down").returncode == 0


def test_a_killed_daemon_and_a_killed_keeper_together_leave_nobody_unknown(place: Workplace) -> None:
    place.ports = free_ports(5)
    place.profile(service("a", FAMILY, HOLDER, "family", *place.ports), service("b", POLITE))
    place.up()
    until(lambda: all(map(is_open, place.ports)))
    until(lambda: num_in_ledger(place, "a") == 1 + len(place.ports))  # what is younger than a sample nobody knows
    keeper = keeper_pid(place, "a")
    place.lose_daemon()
    os.kill(keeper, signal.SIGKILL)
    assert place.grpo("restart", "b").returncode == 0  # brings a daemon that takes over
    until(lambda: status_of(place, "a").state is ServiceState.FAILED)
    until(lambda: not any(map(is_open, place.ports)))
    assert place.grpo("down").returncode == 0


def test_services_that_lost_daemon_and_keepers_are_known_ended_and_never_doubled(place: Workplace) -> None:
    notes = place.folder / "notes"
    place.profile(service("a", NOTES_START, notes, "a", ready=UP), service("b", DEAF, ready="{ log = 'deaf' }"))
    run = place.up()
    keepers = [keeper_pid(place, name) for name in ("a", "b")]
    place.lose_daemon()
    for keeper in keepers:
        os.kill(keeper, signal.SIGKILL)
    status = place.status()
    assert (status.state, status.warnings[0].id) == (RunState.DEGRADED, "no-supervisor")
    assert "processes of its services are still alive" in status.warnings[0].text
    joined = place.grpo("up", "--profile", "p", "--detach", "--wait", "ready")
    assert joined.returncode == 1, joined  # it is the same run, and nobody is up in it any more
    assert f"run {run} joined" in joined.stderr
    assert len(notes.read_text().splitlines()) == 1
    place.grpo("down")
    assert place.survivors() == []


def test_down_goes_on_when_the_daemon_is_lost_meanwhile_and_says_that_nothing_is_left_when_it_is_so(
    place: Workplace,
) -> None:
    place.profile(service("a", DEAF, stop_grace_s=4, ready="{ log = 'deaf', interval_s = 0.02 }"))
    place.up()
    supervisor = place.status().supervisor
    assert supervisor is not None
    ending = place.start("down")
    until(lambda: status_of(place, "a").state is ServiceState.STOPPING)
    assert place.status().is_ending
    os.kill(supervisor.pid, signal.SIGKILL)
    out, err = ending.communicate(timeout=60)
    assert ending.returncode == 0, err
    assert "a new one continues it" in err
    assert "stopped in" in out
    assert place.survivors() == []


def test_an_up_during_a_down_waits_for_the_end_and_starts_anew(place: Workplace) -> None:
    place.profile(service("a", DEAF, stop_grace_s=2, ready="{ log = 'deaf', interval_s = 0.02 }"))
    run = place.up()
    ending = place.start("down")
    until(lambda: place.status().is_ending)
    again = place.grpo("up", "--profile", "p", "--detach", "--wait", "ready")
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() != run
    ending.communicate(timeout=60)
    assert place.status().state is RunState.RUNNING
    assert place.grpo("down", "--timeout", 0.1).returncode == 0


def test_a_failure_is_explained_however_fast_it_came(place: Workplace) -> None:
    crashes = "import sys; print('no such model', flush=True); sys.exit(3)"
    place.profile(service("a", crashes, ready="{ file = 'never' }"))
    done = place.grpo("up", "--profile", "p", "--wait", "finished")
    assert done.returncode == 1
    assert "exit code 3" in done.stderr
    assert "no such model" in done.stderr
    left = place.grpo("up", "--profile", "p", "--wait", "ready", "--detach")
    assert left.returncode == 1
    assert "the run goes on" not in left.stderr


def test_what_a_command_probe_leaves_behind_is_ended_with_its_answer(place: Workplace) -> None:
    leaves = "import os, subprocess, sys; subprocess.Popen([sys.executable, '-I', '-S', '-c', sys.argv[1]], "
    leaves += "start_new_session=True, env={}); open(sys.argv[2])"
    argv = [place.argv()[0], "-I", "-S", "-c", leaves, DEAF, str(place.folder / "go")]
    place.profile(service("a", POLITE, ready=f"{{ command = {json.dumps(argv)}, interval_s = 0.05 }}"))
    assert place.grpo("up", "--profile", "p", "--detach").returncode == 0
    supervisor = place.status().supervisor
    assert supervisor is not None
    until(lambda: (status_of(place, "a").health or "").endswith("exits 1"))
    (place.folder / "go").touch()
    until(lambda: status_of(place, "a").state is ServiceState.READY)
    until(lambda: len(below(supervisor.pid, all_processes())) == 2)
    assert place.grpo("down").returncode == 0


def test_a_run_that_lost_folder_and_daemon_is_not_started_beside(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    run = place.up()
    place.lose_daemon()
    shutil.rmtree(place.run_folder())
    refused = place.grpo("up", "--profile", "p", "--detach")
    assert refused.returncode == 1
    assert f"run {run} is live and its folder was deleted: end it with `grpo-tui down {run}` first" in refused.stderr
    assert place.grpo("down", run).returncode == 0
    assert place.survivors() == []
