"""The MPS daemon of a run: started before the services that share a GPU, ended after them, restarted with them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import fake_mps
import pytest
from workplace import Workplace, service, until

from grpo_engine.wire.supervisor import ServiceState
from grpo_tui.supervisor.keeper.proc import command_line, marker

SHOWS = """
import os, signal, sys
def fail(*_):
    print("RuntimeError: CUDA error: the remote procedural call between the MPS server and the MPS client failed")
    sys.exit(1)
signal.signal(signal.SIGUSR1, fail)
print("up", os.environ.get("CUDA_MPS_PIPE_DIRECTORY"), flush=True)
while True:
    signal.pause()
"""
CONTROL, SERVER = "nvidia-cuda-mps-control -f", "nvidia-cuda-mps-server"
"""Words in their command lines."""
GPU = 0
"""The first, so that no driver is asked for its UUID; of no other test of this folder, since runs share none."""
UP = "{ log = '^up', interval_s = 0.02 }"


@pytest.fixture(autouse=True)
def with_fake_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = fake_mps.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)


def sharing(name: str, **settings: object) -> str:
    """A service that prints where it looks for the daemon."""
    return service(name, SHOWS, gpus=[GPU], ready=UP, **settings)


def folders(place: Workplace, name: str) -> list[str]:
    """What each attempt of a service printed."""
    return [line.split()[1] for line in place.log(name).splitlines() if line.startswith("up ")]


def pids_of(place: Workplace, word: str) -> list[int]:
    """The processes of the fake daemon or server of this test."""
    ours = [each.pid for each in place.survivors() if (mark := marker(each.pid)) is not None and mark.service == "mps"]
    return [pid for pid in ours if word in command_line(pid)]


@pytest.mark.slow
def test_a_daemon_is_restarted_before_the_services_that_use_it_and_ended_after_them(place: Workplace) -> None:
    place.up(sharing("server"), sharing("trainer"), service("other", SHOWS, ready=UP))
    (folder,) = set(folders(place, "server") + folders(place, "trainer"))
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert folders(place, "other") == ["None"], "it shares no GPU"
    daemon, servers = pids_of(place, CONTROL), pids_of(place, SERVER)
    assert (len(daemon), len(servers)) == (1, 1)
    os.kill(servers[0], signal.SIGKILL)
    place.until_state(ServiceState.READY, "server", attempt=2)
    place.until_state(ServiceState.READY, "trainer", attempt=2)
    assert place.service("mps").attempt == 2
    assert pids_of(place, SERVER) != servers
    assert pids_of(place, CONTROL) != daemon
    assert folders(place, "server") == [folder] * 2
    place.succeed("down")
    ends = [line.split(": ")[0].split()[-1] for line in place.log().splitlines() if "stopping → stopped" in line]
    assert ends[-1] == "mps"
    assert not pids_of(place, CONTROL)
    assert not pids_of(place, SERVER)


@pytest.mark.extended("test_machine: a service that another one ended; the test before this one")
def test_a_service_that_fails_by_the_daemon_restarts_it_and_all_that_use_it_also_after_a_killed_supervisor(
    place: Workplace,
) -> None:
    place.up(sharing("server"), sharing("trainer"), service("other", SHOWS, ready=UP))
    (folder,) = set(folders(place, "server"))
    daemon = pids_of(place, CONTROL)
    place.kill_supervisor()
    place.succeed("restart", "other", "--wait")  # starts the next supervisor
    assert pids_of(place, CONTROL) == daemon
    os.kill(place.pid("trainer"), signal.SIGUSR1)
    place.until_state(ServiceState.READY, "server", attempt=2)
    place.until_state(ServiceState.READY, "trainer", attempt=2)
    assert place.service("mps").attempt == 2
    assert "trainer: ready → backoff (ended by a failure of mps: exit code 1" in place.log()
    assert folders(place, "server") == [folder] * 2
    assert len(folders(place, "other")) == 2, "only by hand"
    place.succeed("stop", "mps")
    place.until_state(ServiceState.READY, "trainer", attempt=3)
    assert place.service("mps").state is ServiceState.STOPPED
    place.succeed("start", "mps")
    place.until_state(ServiceState.READY, "trainer", attempt=4)
    assert place.service("mps").state is ServiceState.READY


@pytest.mark.extended("test_mps_service: what the daemon lacks; test_machine: an optional service")
def test_a_run_goes_on_without_a_daemon_that_cannot_be_had_and_says_why(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPS_FAKE", "refuses")
    place.up(sharing("server"), sharing("trainer"))
    mps = place.service("mps")
    assert mps.state is ServiceState.FINISHED
    assert "exited with 1" in (mps.why or "")
    assert place.status().state == "running"
    until(lambda: not pids_of(place, CONTROL))
    os.kill(place.pid("trainer"), signal.SIGUSR1)
    place.until_state(ServiceState.FAILED, "trainer")  # by its own policy: it has no daemon that could have failed
