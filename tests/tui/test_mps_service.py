"""When services that share a GPU get an MPS daemon, what it sees, why they get none, and how it is ended."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_mps
import pytest
from workplace import until

from grpo_tui import mps_process
from grpo_tui.mps_process import CannotHave, Daemon, daemon_of_all, refusal
from grpo_tui.profile.doctor import Machine, examine
from grpo_tui.profile.loading import load
from grpo_tui.profile.mps import FAULT, MachineFacts
from grpo_tui.profile.plan import make_plan, plan_text
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.base import Launch, NeedCondition
from grpo_tui.supervisor.keeper.proc import read_stat

SHARED = {"a": "gpus = [0]", "b": "gpus = [0]\nneeds = ['a']", "c": "gpus = [1]"}
MACHINE = MachineFacts(program="/usr/bin/nvidia-cuda-mps-control", environment={})
VISIBLE = "CUDA_VISIBLE_DEVICES"


def written(folder: Path, services: dict[str, str], top: str = "") -> str:
    """A profile of commands with these settings."""
    tables = [f'[services.{name}]\nkind = "command"\nargv = ["true"]\n{more}\n' for name, more in services.items()]
    (folder / "p.toml").write_text("\n".join([top, *tables]))
    return str(folder / "p.toml")


def planned(folder: Path, services: dict[str, str], *, top: str = "", **machine: Any) -> Plan:
    facts = MachineFacts(**{"program": MACHINE.program, "environment": {}, **machine})
    loaded = load(written(folder, services, top))
    return make_plan(loaded, run_folder=folder / "run", python=sys.executable, machine=facts)


def by_name(plan: Plan) -> dict[str, Launch]:
    return {launch.name: launch for launch in plan.launches}


def test_services_that_share_a_gpu_start_after_a_daemon_that_sees_their_gpus_and_follow_it(tmp_path: Path) -> None:
    plan = planned(tmp_path, SHARED)
    launches = by_name(plan)
    assert plan.launches[0].name == "mps"
    assert launches["mps"].followers == ("a", "b")
    assert launches["mps"].env[VISIBLE] == launches["b"].env[VISIBLE] == "0"
    assert launches["b"].needs == {"mps": NeedCondition.SETTLED, "a": NeedCondition.READY}
    assert (launches["c"].needs, launches["c"].env_in_temporary) == ({}, {})
    assert Plan.from_json(plan.to_json()) == plan
    assert "CUDA_MPS_PIPE_DIRECTORY=$TMPDIR/mps" in plan_text(plan, load(str(tmp_path / "p.toml")))


def test_daemon_and_services_name_other_gpus_than_the_first_by_uuid(tmp_path: Path) -> None:
    services = {"a": "gpus = [3, 1]", "b": "gpus = [3]"}
    known = {index: f"GPU-{index}" for index in range(4)}
    launches = by_name(planned(tmp_path, services, uuids=lambda: known))
    assert [launches[name].env[VISIBLE] for name in ("mps", "a", "b")] == ["GPU-1,GPU-3", "GPU-3,GPU-1", "GPU-3"]
    assert launches["a"].gpus == (3, 1)
    assert planned(tmp_path, services).notes == (
        "a and b share a GPU without MPS, so they are time-sliced: the driver does not say the UUID of GPU 3",
    )


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"program": None}, "nvidia-cuda-mps-control is not in PATH"),
        ({"daemon_of_all": "uid 7 (pid 8)"}, "the daemon of uid 7 (pid 8) serves all programs"),
        ({"environment": {"CUDA_MPS_PIPE_DIRECTORY": "/x"}}, "CUDA_MPS_PIPE_DIRECTORY is set to /x, so a uses"),
    ],
)
def test_a_plan_and_the_doctor_say_why_there_is_no_daemon(tmp_path: Path, machine: dict[str, Any], words: str) -> None:
    plan = planned(tmp_path, SHARED | {"b": "gpus = [0]\ngpu_share = 0.5"}, **machine)
    [note, limit] = plan.notes
    assert words in note
    assert limit == "gpu_share and gpu_priority of b have no effect without MPS"
    assert [launch.name for launch in plan.launches] == ["a", "b", "c"]
    facts: dict[str, Any] = {"gpus": (), "gpu_note": None, "port_holders": lambda ports: ()}
    findings = examine(Machine(**facts), load(str(tmp_path / "p.toml")), plan, tmp_path)
    assert [(each.severity, each.text) for each in findings if each.id == "mps"] == [("warning", n) for n in plan.notes]


@pytest.mark.parametrize(("profile", "has_daemon"), [("llama8b-random", True), ("llama8b-turns", False)])
def test_services_that_take_turns_on_a_gpu_have_no_daemon(profile: str, has_daemon: bool, tmp_path: Path) -> None:
    plan = make_plan(load(profile), run_folder=tmp_path / "run", python=sys.executable, machine=MACHINE)
    assert ("mps" in by_name(plan), plan.notes) == (has_daemon, ())


@pytest.mark.parametrize("why", [None, "GPU 0 is divided by MIG"])
def test_the_doctor_says_whether_the_gpus_allow_mps(tmp_path: Path, why: str | None) -> None:
    plan = planned(tmp_path, SHARED)
    asked: list[list[int]] = []
    facts: dict[str, Any] = {"gpus": (), "gpu_note": None, "port_holders": lambda ports: ()}
    machine = Machine(**facts, mps_refusal=lambda gpus: asked.append(list(gpus)) or why)  # type: ignore[func-returns-value]
    found = [each for each in examine(machine, load(str(tmp_path / "p.toml")), plan, tmp_path) if each.id == "mps"]
    assert [each.severity for each in found] == ["ok" if why is None else "warning"]
    assert (why or "its daemon starts with the run") in found[0].text
    assert asked == [[0]]


def test_a_profile_divides_the_gpu_or_goes_without_mps(tmp_path: Path) -> None:
    services = SHARED | {"b": "gpus = [0]\ngpu_share = 0.25\ngpu_priority = 'low'"}
    plan = planned(tmp_path, services)
    env = by_name(plan)["b"].env
    assert [note.partition(":")[0] for note in plan.notes] == ["gpu_share of b"]
    assert (env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], env["CUDA_MPS_CLIENT_PRIORITY"]) == ("25", "1")
    plan = planned(tmp_path, SHARED, top="[gpu]\nmps = false")
    assert ("mps" in by_name(plan), plan.notes) == (False, ())


@pytest.mark.parametrize(
    ("line", "is_fault"),
    [
        (
            "torch.AcceleratorError: CUDA error: the remote procedural call between the MPS server and the MPS client",
            True,
        ),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_faults_that_end_every_client_are_told_from_those_of_one(line: str, is_fault: bool) -> None:
    assert bool(re.search(FAULT, line)) is is_fault


@pytest.mark.parametrize(
    ("mode", "mig", "words"),
    [(0, 0, None), (3, 0, None), (2, 0, "GPU 0 has compute mode Prohibited"), (0, 1, "GPU 0 is divided by MIG")],
)
def test_a_gpu_that_mps_cannot_use_is_refused(mode: int, mig: int, words: str | None) -> None:
    nvml = SimpleNamespace(
        NVMLError=OSError,
        NVML_COMPUTEMODE_PROHIBITED=2,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeMode=lambda handle: mode,
        nvmlDeviceGetMigMode=lambda handle: [mig, mig],
    )
    why = refusal(nvml, [0])
    assert why is None if words is None else words in (why or "")


def test_a_daemon_at_the_default_place_is_found_by_its_command_and_none_that_any_user_can_imitate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pipes").mkdir()
    for pid, command in ((7, "bash\0nvidia-cuda-mps-control"), (8, "/usr/bin/nvidia-cuda-mps-control\0-d")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_text(f"{command}\0")
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx\nUid:\t{os.getuid()}\t{os.getuid()}\t0\t0\n")
    assert daemon_of_all(tmp_path / "pipes", tmp_path) == f"uid {os.getuid()} (pid 8)"
    assert daemon_of_all(tmp_path / "none", tmp_path) is None
    (tmp_path / "link").symlink_to(tmp_path / "pipes")  # any user can make one, and a folder, where programs look
    assert daemon_of_all(tmp_path / "link", tmp_path) is None
    (tmp_path / "7" / "cmdline").write_bytes(b"\xff\xfe\0")  # any process can call itself that
    assert daemon_of_all(tmp_path / "pipes", tmp_path) == f"uid {os.getuid()} (pid 8)"
    (tmp_path / "8" / "status").write_text(f"Uid:\t4711\t{os.getuid()}\t0\t0\n")  # and have files that are root's
    assert daemon_of_all(tmp_path / "pipes", tmp_path) is None
    monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result((0o40700, 0, 0, 1, 4711, 0, 0, 0, 0, 0)))
    assert daemon_of_all(tmp_path / "pipes", tmp_path) is None


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a daemon whose program is the fake one."""
    own = {mps_process.PIPES: str(tmp_path / "mps"), mps_process.LOGS: str(tmp_path / "log")}
    return {**os.environ, "PATH": f"{fake_mps.install(tmp_path / 'bin')}:{os.environ['PATH']}", **own}


def test_a_daemon_that_ignores_quit_is_ended_with_its_server(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mps_process, "END_LIMIT_S", 0.05)
    with Daemon({**environment, "MPS_FAKE": "stays"}) as daemon:
        server = daemon.start_server(lambda: False)
        assert server is not None
    left = read_stat(server)
    assert left is None or left.is_dead  # not yet reaped by its new parent
    assert "is left: SIGTERM" in capfd.readouterr().out
    assert not Path(environment[mps_process.PIPES]).exists()


def test_a_server_that_the_driver_refuses_is_quoted_from_its_log(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps_process, "START_LIMIT_S", 0.5)
    with Daemon({**environment, "MPS_FAKE": "no-server"}) as daemon:
        log = Path(environment[mps_process.LOGS]) / "server.log"
        until(lambda: log.exists() and bool(log.read_text()))
        with pytest.raises(CannotHave, match=r"did not start in 0\.5 s: the driver refuses"):
            daemon.start_server(lambda: False)


def test_a_daemon_whose_socket_folder_vanished_ends_so_that_no_restarted_service_misses_it(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mps_process, "FOLDER_POLL_S", 0.02)
    pipes = Path(environment[mps_process.PIPES])
    signals, sender = socket.socketpair()  # no signal comes
    with signals, sender, Daemon(environment) as daemon:
        server = daemon.start_server(lambda: False)
        assert server is not None
        pipes.rename(pipes.with_name("away"))
        pipes.mkdir(mode=0o700)  # by who cleans up, or by the supervisor
        assert daemon.watch(server, signals.fileno()) == 1
    assert f"the folder of its socket, {pipes}, was removed" in capfd.readouterr().out
    left = read_stat(server)
    assert left is None or left.is_dead


def test_a_daemon_with_a_fault_on_a_gpu_ends_so_that_clients_restart_whatever_their_logs_say(
    environment: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    signals, sender = socket.socketpair()  # no signal comes
    with signals, sender, Daemon(environment) as daemon:
        server = daemon.start_server(lambda: False)
        assert server is not None
        os.kill(int(Path(environment[mps_process.PIPES], "nvidia-cuda-mps-control.pid").read_text()), signal.SIGUSR1)
        assert daemon.watch(server, signals.fileno()) == 1
    output = capfd.readouterr().out
    assert "encountered a fatal GPU error" in output
    assert "MPS: a GPU had a fatal fault" in output
    left = read_stat(server)
    assert left is None or left.is_dead


def test_a_full_disk_ends_neither_the_log_of_a_daemon_nor_what_it_says_of_a_fault(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pipe was closed at the first line that could not be written, and SIGPIPE ended the daemon and its clients."""
    (tmp_path / "log").touch()
    daemon = Daemon(environment)
    with (tmp_path / "log").open() as unwritable:
        monkeypatch.setattr(sys, "stdout", unwritable)
        daemon._pass_on(io.BytesIO(b"Received new client connection\n" + mps_process.FATAL))
    assert os.read(daemon._fault, 2) == b"!"
