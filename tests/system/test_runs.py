"""Whole runs with real processes, used through the command line as a person would."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import HOLDER, free_ports, is_open
from workplace import DEAF, POLITE, PYTHON, SERVER, Workplace, open_workplace, service, until

from grpo_engine.wire.supervisor import ENDED_RUN_STATES, RunState, ServiceState
from grpo_tui.supervisor.keeper.proc import identify

pytestmark = pytest.mark.slow

COUNTS_STARTS = """
import os, signal, sys
with open(sys.argv[1], "a") as file: file.write(f"{os.getpid()}\\n")
print("up", flush=True)
signal.pause()
"""
"""Leaves a line for every process of it that was ever started."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path) as workplace:
        yield workplace


def starts(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


def test_a_service_starts_once_what_it_needs_answers_200_and_the_run_ends_with_the_last(place: Workplace) -> None:
    (port,) = place.ports = free_ports(1)
    place.profile(
        service("b", "print('hi')", needs="{ a = 'ready' }"),
        service(
            "a", SERVER, port, 0.5, ports=[port],
            ready=f"{{ http = 'http://127.0.0.1:{port}/health', interval_s = 0.05, within_s = 20 }}",
        ),
    )  # fmt: skip
    done = place.grpo("up", "--profile", "p", "--wait", "finished", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    told = [(line["service"], line["state"]) for line in lines if line["event"] == "service"]
    assert told.index(("a", "ready")) < told.index(("b", "starting"))
    assert lines[-1]["event"] == "end"
    assert (lines[-1]["state"], lines[-1]["exit_code"]) == ("finished", 0)
    status = place.status()
    assert status.state is RunState.FINISHED
    a, b = sorted(status.services, key=lambda each: each.name)
    assert a.ready_at is not None
    assert b.started_at is not None
    assert 0 <= b.started_at - a.ready_at < 0.3
    assert (a.state, b.state, b.exit_code) == (ServiceState.STOPPED, ServiceState.FINISHED, 0)
    assert place.survivors() == []


def test_a_failing_service_takes_the_run_down_and_is_named_with_its_last_words(place: Workplace) -> None:
    place.profile(
        service("idle", POLITE),
        service("trainer", "import sys; print('loss is NaN', flush=True); sys.exit(3)", needs="{ idle = 'started' }"),
    )
    done = place.grpo("up", "--profile", "p", "--wait", "finished")
    assert done.returncode == 1
    assert "trainer failed: exit code 3; last lines:\n  loss is NaN" in done.stderr
    assert place.status().state in ENDED_RUN_STATES
    assert place.survivors() == []


def test_a_command_that_does_not_exist_fails_in_words(place: Workplace) -> None:
    place.profile('[services.a]\nkind = "command"\nargv = ["no-such-program"]\n')
    done = place.grpo("up", "--profile", "p", "--wait", "finished")
    assert done.returncode == 1
    assert "cannot start no-such-program: not found in PATH" in done.stderr


def test_a_crash_is_followed_by_restarts_until_the_limit(place: Workplace) -> None:
    count = place.folder / "starts"
    crash = "import sys; open(sys.argv[1], 'a').write('1\\n'); sys.exit(7)"
    place.profile(service("a", crash, count, restart='"on-failure"', max_restarts=2, backoff_s=0.05))
    done = place.grpo("up", "--profile", "p", "--wait", "finished")
    assert done.returncode == 1
    assert len(starts(count)) == 3
    (status,) = place.status().services
    assert (status.restarts, status.exit_code) == (2, 7)
    assert status.why is not None
    assert status.why.startswith("exit code 7; given up after 2 restarts")


def test_restart_stop_and_start_do_what_they_say(place: Workplace) -> None:
    count = place.folder / "starts"
    place.profile(service("a", COUNTS_STARTS, count, ready="{ log = '^up$', interval_s = 0.02 }"))
    place.up()
    before = place.pid("a")
    assert place.grpo("restart", "a", "--wait").returncode == 0
    after = place.pid("a")
    assert after != before
    assert identify(before) is None
    assert place.grpo("stop", "a", "--wait").returncode == 0
    (status,) = place.status().services
    assert (status.state, status.pid, status.why) == (ServiceState.STOPPED, None, "stopped by request")
    assert place.grpo("start", "a", "--wait").returncode == 0
    assert len(starts(count)) == 3
    assert place.grpo("stop", "b").returncode == 2
    assert place.grpo("down").returncode == 0


def test_what_was_asked_is_told_with_the_state_that_followed_from_it(place: Workplace) -> None:
    place.profile(service("a", POLITE), service("deaf", DEAF, ready="{ log = '^deaf$' }", stop_grace_s=5))
    place.up()
    assert place.grpo("restart", "deaf").stderr == "deaf: restart requested; it is stopping\n"
    assert place.grpo("stop", "deaf").stderr == "deaf: stop requested; it is stopping\n"
    assert place.grpo("stop", "a", "--wait").returncode == 0
    asked = place.grpo("start", "a").stderr
    assert asked in {"a: start requested; it is starting\n", "a: start requested; it is ready\n"}
    assert place.grpo("down", "--timeout", "0").returncode == 0


def test_a_typo_in_a_task_fails_the_run_at_once_and_is_told(place: Workplace) -> None:
    place.profile('[services.env]\nkind = "environment"\nmodel_name = "local/tiny"\ntask = "python:my_onw:score"\n')
    done = place.grpo("up", "--profile", "p", "--wait", "finished")
    assert done.returncode == 1
    (status,) = place.status().services
    assert (status.state, status.attempt, status.exit_code) == (ServiceState.FAILED, 1, 2)
    assert status.why is not None
    assert status.why.startswith("exit code 2: grpo-engine env: task")
    assert "my_onw" in status.why
    assert f"env failed: {status.why}" in done.stderr


def test_nothing_is_started_over_a_service_that_has_failed_and_the_run_goes_on(place: Workplace) -> None:
    place.profile(service("a", POLITE), service("b", POLITE, needs="{ a = 'ready' }"))
    place.up()
    os.kill(place.pid("a"), signal.SIGKILL)
    until(lambda: place.status().services[0].state is ServiceState.FAILED)
    refused = place.grpo("restart", "b", "--wait")
    assert refused.returncode == 4
    assert "b needs a, which has failed: start a first" in refused.stderr
    assert place.status().state is RunState.DEGRADED
    assert place.grpo("start", "a", "--wait").returncode == 0
    assert place.grpo("restart", "b", "--wait").returncode == 0
    assert place.status().state is RunState.RUNNING
    assert place.grpo("down").returncode == 0


def test_down_ends_polite_services_from_the_top_and_says_how_long_each_took(place: Workplace) -> None:
    chain = [service("s0", POLITE)] + [service(f"s{i}", POLITE, needs=f"{{ s{i - 1} = 'started' }}") for i in (1, 2, 3)]
    place.profile(*chain)
    run = place.up()
    done = place.grpo("down")
    assert done.returncode == 0, done.stderr
    ended = [line.split()[2] for line in done.stdout.splitlines() if " ended in " in line]
    assert ended == ["s3", "s2", "s1", "s0"]
    assert f"{run}: stopped in" in done.stdout
    assert place.survivors() == []
    assert place.grpo("down").returncode == 5


def test_down_kills_deaf_services_after_one_grace_for_all_of_them(place: Workplace) -> None:
    grace = {"stop_grace_s": 2, "ready": "{ log = 'deaf', interval_s = 0.02 }"}
    chain = [service("s0", DEAF, **grace)]
    chain += [service(f"s{i}", DEAF, needs=f"{{ s{i - 1} = 'ready' }}", **grace) for i in (1, 2, 3)]
    place.profile(*chain)
    place.up()
    assert place.grpo("down").returncode == 0
    log = (place.run_folder() / "supervisor.log").read_text()
    assert "all services together have 2.0 s to stop" in log
    assert log.rindex("→ stopping") < log.index("→ stopped"), "a deaf service was waited for before the next was asked"
    assert place.survivors() == []


def test_a_daemon_that_was_killed_is_replaced_and_no_service_notices(place: Workplace) -> None:
    count = place.folder / "starts"
    place.profile(
        service("keeps", COUNTS_STARTS, count, ready="{ log = '^up$', interval_s = 0.02 }"),
        service("ends", "import sys; open(sys.argv[1]).read(); sys.exit(9)", place.folder / "gate", ends_run="false"),
    )
    os.mkfifo(place.folder / "gate")
    place.up()
    before = place.pid("keeps")
    place.lose_daemon()
    (place.folder / "gate").write_text("go")
    until(lambda: any(each.name == "ends" and each.exit_code == 9 for each in place.status().services))
    status = place.status()
    assert status.supervisor is None
    assert status.warnings[0].id == "no-supervisor"
    assert place.grpo("restart", "ends").returncode == 0  # any command brings a daemon that takes over
    assert place.pid("keeps") == before
    assert starts(count) == [before]
    ends = next(each for each in place.status().services if each.name == "ends")
    assert ends.attempt == 2
    log = (place.run_folder() / "supervisor.log").read_text()
    assert "keeps: taken over in attempt 1: ready" in log
    assert "ends: ready → failed (exit code 9)" in log
    (place.folder / "gate").write_text("go")
    assert place.grpo("down").returncode == 0
    assert place.survivors() == []


def test_down_works_on_a_run_whose_daemon_is_dead(place: Workplace) -> None:
    place.profile(service("a", POLITE), service("b", DEAF, stop_grace_s=0.2))
    place.up()
    place.lose_daemon()
    done = place.grpo("down")
    assert done.returncode == 0, done.stderr
    assert place.survivors() == []


def test_a_damaged_state_file_loses_no_service(place: Workplace) -> None:
    count = place.folder / "starts"
    place.profile(service("a", COUNTS_STARTS, count, ready="{ log = '^up$', interval_s = 0.02 }"))
    place.up()
    before = place.pid("a")
    place.lose_daemon()
    (place.run_folder() / "state.json").write_text('{"run": "x", "sta')
    second = place.grpo("up", "--profile", "p", "--detach", "--wait", "ready")
    assert second.returncode == 0, second.stderr
    assert place.pid("a") == before
    assert starts(count) == [before]
    assert place.grpo("down").returncode == 0


def test_sigterm_to_the_daemon_leaves_services_running(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    pid, supervisor = place.pid("a"), place.status().supervisor
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGTERM)
    until(lambda: identify(supervisor.pid) is None)
    assert identify(pid) is not None
    assert place.grpo("down").returncode == 0


def test_two_starts_at_once_make_one_run(place: Workplace) -> None:
    count = place.folder / "starts"
    place.profile(service("a", COUNTS_STARTS, count, ready="{ log = '^up$', interval_s = 0.02 }"))
    both = [place.start("up", "--profile", "p", "--detach", "--wait", "ready") for _ in range(2)]
    answers = [each.communicate(timeout=60) for each in both]
    assert [each.returncode for each in both] == [0, 0], answers
    assert len({out for out, _ in answers}) == 1
    assert sorted("joined" in err for _, err in answers) == [False, True]
    assert len(starts(count)) == 1
    assert place.grpo("down").returncode == 0


def test_a_changed_profile_is_told_to_whoever_joins(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    joined = place.grpo("up", "--profile", "p", "--detach", "--set", "services.a.stop_grace_s=1")
    assert joined.returncode == 0
    assert "has changed since" in joined.stderr
    assert place.grpo("down").returncode == 0


def test_a_stranger_on_the_port_is_named_and_left_alone(place: Workplace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        place.profile(service("a", SERVER, port, ports=[port]))
        done = place.grpo("up", "--profile", "p", "--wait", "ready")
        assert done.returncode == 4, done.stderr
        assert f"port {port} is held by pid {os.getpid()}" in done.stderr
        assert is_open(port)
    assert place.survivors() == []


def test_a_time_out_takes_an_attached_run_down_and_leaves_a_detached_one(place: Workplace) -> None:
    place.profile(service("a", POLITE, ready="{ file = 'never', interval_s = 0.05 }"))
    attached = place.grpo("up", "--profile", "p", "--wait", "ready", "--timeout", 1)
    assert attached.returncode == 3, attached.stderr
    assert place.survivors() == []
    detached = place.grpo("up", "--profile", "p", "--wait", "ready", "--timeout", 1, "--detach")
    assert detached.returncode == 3, detached.stderr
    assert "grpo-tui down" in detached.stderr
    assert place.status().state is RunState.STARTING
    assert place.grpo("down", "--timeout", 1).returncode == 0


def test_a_service_that_is_never_ready_fails_in_time_with_the_answer_of_its_probe(place: Workplace) -> None:
    (port,) = place.ports = free_ports(1)
    place.profile(
        service(
            "a",
            SERVER,
            port,
            1000,
            ready=f"{{ http = 'http://127.0.0.1:{port}/h', interval_s = 0.05, within_s = 0.8 }}",
        )
    )
    done = place.grpo("up", "--profile", "p", "--wait", "ready")
    assert done.returncode == 1
    assert "not ready within 0.8 s: /h answers 503" in done.stderr


def test_ctrl_c_ends_a_run_in_the_foreground(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    foreground = place.start("up", "--profile", "p")
    until(lambda: bool(place.survivors()) and (place.folder / "logs").is_dir())
    until(lambda: place.grpo("ps").stdout.count("running") == 1)
    foreground.send_signal(signal.SIGINT)
    _, talk = foreground.communicate(timeout=30)
    assert foreground.returncode == 130
    assert "Traceback" not in talk
    assert place.status().state is RunState.STOPPED


def test_a_closed_terminal_ends_no_service(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    master, slave = pty.openpty()
    typed = subprocess.Popen(
        place.argv("up", "--profile", "p"),
        cwd=place.folder,
        env=place.environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(slave)
    until(lambda: place.grpo("ps").stdout.count("running") == 1)
    pid = place.pid("a")
    os.close(master)
    typed.wait(timeout=30)
    status = place.status()
    assert status.state is RunState.RUNNING
    assert status.supervisor is not None
    assert identify(pid) is not None
    assert place.grpo("down").returncode == 0


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may themselves run under nohup


def test_nothing_known_is_its_own_exit_code(place: Workplace) -> None:
    for command in (["status"], ["status", "nix"], ["down"], ["logs", "a"], ["metrics"], ["restart", "a"], ["attach"]):
        done = place.grpo(*command)
        assert done.returncode == 5, (command, done)
        assert done.stdout == ""
        assert "Traceback" not in done.stderr


def test_a_wrong_profile_starts_nothing(place: Workplace) -> None:
    place.profile(service("a", POLITE, needs="{ vlm = 'ready' }"))
    done = place.grpo("up", "--profile", "p", "--detach")
    assert done.returncode == 2
    assert "services.a.needs: 'vlm' is not a service here" in done.stderr
    assert not list(place.folder.glob("logs/p-*"))


def test_the_status_document_has_every_promised_key_and_null_for_the_unknown(place: Workplace) -> None:
    place.profile(service("a", POLITE, ports=free_ports(1)), service("b", POLITE, needs="{ a = 'finished' }"))
    assert place.grpo("up", "--profile", "p", "--detach").returncode == 0
    until(lambda: "running" in place.grpo("status").stdout or "waits for a to finish" in place.grpo("status").stdout)
    until(lambda: next(each for each in place.status().services if each.name == "a").rss_bytes is not None)
    metrics = {"time": 1.0, "step": 7, "policy_version": 7, "metrics": {"train/loss": 0.5}}
    (place.run_folder() / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    document = json.loads(place.grpo("status", "--json").stdout)
    assert set(document) >= {"run", "profile", "state", "supervisor", "services", "gpus", "metrics", "warnings"}
    assert document["metrics"] == {"train/loss": 0.5, "step": 7}
    a, b = document["services"]
    promised = {"name", "kind", "state", "health", "pid", "pgid", "started_at", "ready_at", "restarts", "exit_code"}
    promised |= {"ports", "gpus", "cpu_percent", "rss_bytes", "gpu_memory_bytes", "log", "why"}
    assert set(a) >= promised
    assert a["pid"] == a["pgid"]
    assert a["rss_bytes"] > 1_000_000
    assert (b["state"], b["pid"], b["rss_bytes"], b["exit_code"]) == ("waiting", None, None, None)
    assert b["why"].startswith("waits for a to finish: ready for")
    stored = json.loads((place.run_folder() / "state.json").read_text())
    assert (stored["run"], stored["state"], stored["supervisor"]) == (
        document["run"],
        document["state"],
        document["supervisor"],
    )
    assert place.grpo("down").returncode == 0


def test_logs_are_shown_filtered_and_followed_to_the_end_of_the_run(place: Workplace) -> None:
    talk = """
import sys
for i in range(5): print("step", i, flush=True)
open(sys.argv[1]).read()
print("late step", flush=True)
"""
    os.mkfifo(place.folder / "gate")
    place.profile(service("a", talk, place.folder / "gate"))
    assert place.grpo("up", "--profile", "p", "--detach").returncode == 0
    until(lambda: "step 4" in place.grpo("logs", "a").stdout)
    following = place.start("logs", "a", "-f", "--grep", "step [34]|late", "-n", "1")
    assert following.stdout is not None
    assert following.stdout.readline() == "step 4\n"
    (place.folder / "gate").write_text("go")
    rest, _ = following.communicate(timeout=30)
    assert rest == "late step\n"
    assert place.grpo("logs", "a", "-n", "2").stdout.splitlines() == ["step 4", "late step"]
    assert place.grpo("logs", "nobody").returncode == 2
    assert place.grpo("logs", "a", "--grep", "(").returncode == 2


def test_a_client_that_stops_reading_holds_up_nobody(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    address = json.loads((place.run_folder() / "daemon.json").read_text())["socket"]
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(address)
        silent.sendall(b'{"type": "subscribe"}\n')
        for _ in range(3):
            assert place.grpo("restart", "a", "--wait").returncode == 0
        assert place.grpo("down").returncode == 0


@pytest.mark.extended("test_a_damaged_state_file_loses_no_service")
def test_a_removed_state_file_is_written_anew_with_the_next_change(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    (place.run_folder() / "state.json").unlink()
    assert place.grpo("restart", "a", "--wait").returncode == 0
    until((place.run_folder() / "state.json").exists)
    assert place.grpo("down").returncode == 0


def test_an_upgrade_hands_a_run_over_and_no_service_notices(place: Workplace) -> None:
    count = place.folder / "starts"
    place.profile(service("a", COUNTS_STARTS, count, ready="{ log = '^up$', interval_s = 0.02 }"))
    run = place.up()
    before, old = place.pid("a"), place.status().supervisor
    done = place.grpo("upgrade")
    assert done.returncode == 0, done.stderr
    new = place.status().supervisor
    assert old is not None
    assert new is not None
    assert new.pid != old.pid
    assert identify(old.pid) is None
    assert done.stdout.startswith(f"{run}: supervised by ")
    assert f"(pid {new.pid}) instead of" in done.stdout
    assert place.pid("a") == before
    assert starts(count) == [before]
    assert place.grpo("down").returncode == 0


def test_a_broken_program_is_found_before_the_old_supervisor_is_asked_to_leave(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    old = place.status().supervisor
    program = "import sys; from grpo_tui.client import launch; launch.sys.executable = '/bin/false'\n"
    program += "from grpo_tui.cli import main; sys.argv[1:] = ['upgrade']; main()"
    done = subprocess.run(
        [PYTHON, "-P", "-c", program], cwd=place.folder, env=place.environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "a new supervisor cannot be started" in done.stderr
    assert place.status().supervisor == old
    assert place.grpo("down").returncode == 0


def test_a_run_folder_deleted_under_a_live_run_is_made_anew_and_nothing_starts_twice(place: Workplace) -> None:
    count = place.folder / "starts"
    place.profile(service("a", COUNTS_STARTS, count, ready="{ log = '^up$', interval_s = 0.02 }"))
    run = place.up()
    before = place.pid("a")
    shutil.rmtree(place.run_folder())
    until((place.folder / "logs" / run / "state.json").exists)
    joined = place.grpo("up", "--profile", "p", "--detach", "--wait", "ready")
    assert (joined.returncode, joined.stdout.strip()) == (0, run), joined.stderr
    assert "was deleted during its run and was made again" in (place.run_folder() / "supervisor.log").read_text()
    place.lose_daemon()  # its successor finds everything in the new folder
    assert place.grpo("restart", "a", "--wait").returncode == 0
    assert identify(before) is None
    assert len(starts(count)) == 2
    assert place.grpo("down").returncode == 0


@pytest.mark.extended("test_a_damaged_state_file_loses_no_service")
def test_a_state_file_of_another_version_is_a_ledger_the_less_and_loses_no_service(place: Workplace) -> None:
    count = place.folder / "starts"
    place.profile(service("a", COUNTS_STARTS, count, ready="{ log = '^up$', interval_s = 0.02 }"))
    place.up()
    before = place.pid("a")
    place.lose_daemon()
    path = place.run_folder() / "state.json"
    document = json.loads(path.read_text())
    document["ledger"] = {"version": 1, "ending": None, "services": "laid out otherwise"}
    path.write_text(json.dumps(document))
    assert place.grpo("status").returncode == 0
    assert place.grpo("up", "--profile", "p", "--detach", "--wait", "ready").returncode == 0
    assert "its ledger is of version 1, this program reads 2" in (place.run_folder() / "supervisor.log").read_text()
    assert (place.pid("a"), starts(count)) == (before, [before])
    assert place.grpo("down").returncode == 0


def test_a_jump_of_the_clock_moves_no_timer_of_an_adopted_service(place: Workplace) -> None:
    place.profile(
        service("a", "import sys; sys.exit(3)", restart='"on-failure"', backoff_s=1, max_restarts=1),
        service("b", POLITE, ends_run="true"),
    )
    assert place.grpo("up", "--profile", "p", "--detach").returncode == 0
    until(lambda: place.status().services[0].state is ServiceState.BACKOFF)
    place.lose_daemon()
    path = place.run_folder() / "state.json"
    document = json.loads(path.read_text())  # as a daemon would have left it before the clock went back by a year
    for name in ("started_at", "ended_at"):
        document[name] = None if document[name] is None else document[name] + 31e6
    for each in document["services"]:
        each["started_at"] = each["started_at"] and each["started_at"] + 31e6
    path.write_text(json.dumps(document))
    assert place.grpo("start", "b").returncode == 0  # brings a daemon that takes over
    until(lambda: place.status().services[0].state is ServiceState.FAILED)
    assert "; given up after 1 restart" in (place.status().services[0].why or "")
    assert place.grpo("down").returncode == 0


def test_on_explicit_word_a_stranger_on_the_port_makes_way(place: Workplace) -> None:
    (port,) = place.ports = free_ports(1)
    holder = subprocess.Popen([PYTHON, "-I", "-S", "-c", HOLDER, str(port)])
    try:
        until(lambda: is_open(port))
        health = f"{{ http = 'http://127.0.0.1:{port}/', interval_s = 0.05 }}"
        place.profile(service("a", SERVER, port, ports=[port], ready=health))
        refused = place.grpo("up", "--profile", "p", "--wait", "ready")
        assert refused.returncode == 4, refused.stderr
        assert identify(holder.pid) is not None
        place.up("--take-ports")
        assert holder.wait(timeout=20) == -signal.SIGKILL
        assert place.grpo("down").returncode == 0
    finally:
        holder.kill()
        holder.wait()


def test_what_lives_of_a_run_without_folder_and_supervisor_is_ended_by_its_name(place: Workplace) -> None:
    place.profile(service("a", DEAF, ready="{ log = 'deaf', interval_s = 0.02 }"))
    run = place.up()
    pid = place.pid("a")
    place.lose_daemon()
    shutil.rmtree(place.run_folder())
    done = place.grpo("down", run)
    assert done.returncode == 0, done.stderr
    assert f"pid {pid}" in done.stdout
    assert place.survivors() == []
    assert place.grpo("down", run).returncode == 5
