"""A run on a real Ray cluster: what a killed broker, actor, raylet, supervisor and head cost, and that nothing is left.

Two machines, which this one stands for; services `a` and `b` take one device each, so a lost machine is awaited.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from workplace import Workplace, service, until

from grpo_engine.wire.supervisor import RunStatus, ServiceState
from grpo_tui.keeper_process import Stat
from grpo_tui.profile.cluster import has_ray
from grpo_tui.supervisor.keeper.proc import command_line, identify, marker

pytestmark = [
    pytest.mark.skipif(not has_ray(), reason="Ray is not installed"),
    pytest.mark.extended("test_cluster_broker.py has the same with a cluster in this process"),
    pytest.mark.timeout(900),
]
CLUSTER = '[cluster]\nkind = "ray"\nmachines = 2\ndevices_per_machine = 1\n'
WAITS = "import os, signal; print('up', os.getpid(), flush=True); signal.pause()"
UP = "{ log = '^up', interval_s = 0.05, within_s = 300 }"


def placed(name: str) -> str:
    """A service that takes one device, and prints its pid on its machine."""
    return service(name, WAITS, num_devices=1, ready=UP, restart='"on-failure"', backoff_s=0.2)


def pids(place: Workplace, name: str) -> list[int]:
    """The process of each attempt on its machine."""
    return [int(pid) for pid in re.findall(r"^up (\d+)$", place.log(name), re.MULTILINE)]


def processes(place: Workplace, words: str) -> list[Stat]:
    """Processes of this test with these words in their command lines."""
    return [each for each in place.survivors() if words in command_line(each.pid)]


def kill(process: Stat) -> None:
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: identify(process.pid) is None)


def all_ready(place: Workplace) -> Callable[[], bool]:
    return lambda: all(each.state is ServiceState.READY for each in place.status().services)


def test_a_request_without_the_certificate_of_the_cluster_ends_nothing(place: Workplace) -> None:
    grpc = pytest.importorskip("grpc")
    place.profile(CLUSTER, placed("a"))
    place.succeed("up", "--profile", "p", "--detach", "--wait", "ready", "--timeout", "300", limit_s=400)
    pids_of_ray = [each.pid for kind in ("gcs_server", "raylet_socket_name") for each in processes(place, kind)]
    ports = {
        each.laddr.port
        for pid in pids_of_ray
        for each in psutil.Process(pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    assert len(ports) >= 3
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask = channel.unary_unary("/ray.rpc.syncer.RaySyncer/StartSync")
            with pytest.raises(grpc.RpcError):
                ask(b"", timeout=5)  # Ray 2.60 exits where it gets this
    assert all(identify(pid) is not None for pid in pids_of_ray)
    assert place.service("ray").attempt == 1
    place.succeed("down", limit_s=200)


def test_the_end_of_a_cluster_and_a_killed_head_are_nothing_to_another_one_beside_it(place: Workplace) -> None:
    one_machine = CLUSTER.replace("machines = 2", "machines = 1")
    runs = []
    for profile, name in (("p", "a"), ("q", "b")):
        place.profile(one_machine, placed(name), name=profile)
        flags = ("--detach", "--wait", "ready", "--timeout", "300")
        runs.append(place.succeed("up", "--profile", profile, *flags, limit_s=400).strip())
    (own, other) = (place.folder / "logs" / run for run in runs)

    def status(run: str) -> RunStatus:
        return RunStatus.model_validate_json(place.succeed("status", run, "--json"))

    def is_ready(run: str) -> bool:
        return all(each.state is ServiceState.READY for each in status(run).services)

    def is_of(folder: Path, pid: int) -> bool:
        mark = marker(pid)
        return mark is not None and mark.run_folder == str(folder)

    before = {each.name: (each.pid, each.attempt) for each in status(runs[1]).services}
    (head,) = [each for each in processes(place, "gcs_server") if is_of(own, each.pid)]
    kill(head)
    until(lambda: len(re.findall(r"^up \d+$", (own / "a.log").read_text(), re.MULTILINE)) == 2 and is_ready(runs[0]))
    place.succeed("down", runs[0], limit_s=200)
    until(lambda: not any(is_of(own, each.pid) for each in place.survivors()))
    assert is_ready(runs[1])
    assert {each.name: (each.pid, each.attempt) for each in status(runs[1]).services} == before
    assert len(re.findall(r"^up \d+$", (other / "b.log").read_text(), re.MULTILINE)) == 1
    place.succeed("down", runs[1], limit_s=200)
    assert not place.survivors()


def test_kills_cost_what_ran_there_and_nothing_is_left(place: Workplace) -> None:
    for module in (
        "grpo_tui",
        "pydantic",
        "numpy",
    ):  # as another user may put them there: no worker of Ray's takes them
        (place.folder / f"{module}.py").write_text("raise SystemExit('code of another user')\n")
    place.profile(CLUSTER, placed("a"), placed("b"))
    place.succeed("up", "--profile", "p", "--detach", "--wait", "ready", "--timeout", "300", limit_s=400)
    (a,), (b,) = pids(place, "a"), pids(place, "b")
    assert {each.name: each.machine for each in place.status().services if each.machine} == {
        "a": "machine-1",
        "b": "machine-2",
    }

    broker = place.pid("machines")
    os.kill(broker, signal.SIGKILL)
    until(lambda: place.service("machines").attempt == 2 and all_ready(place)())
    assert identify(a) is not None
    assert identify(b) is not None

    for actor in processes(place, "ray::MachineActor"):
        kill(actor)
    until(lambda: "another one is started" in place.log("machines"))
    until(lambda: all(each.state == "ready" for each in place.status().machines))
    assert identify(a) is not None
    assert identify(b) is not None

    (raylet,) = processes(place, "machine-2,1")
    kill(raylet)
    until(lambda: any(each.lost_services == ["b"] and each.lost_at for each in place.status().machines))
    until(lambda: place.service("b").attempt == 2 and all_ready(place)())
    until(lambda: identify(b) is None)
    assert "machine-2 (127.0.0.1) is lost, and with it b" in place.log()
    assert place.service("b").machine == "machine-2"
    assert pids(place, "a") == [a]

    place.kill_supervisor()
    place.succeed("status")
    assert identify(a) is not None
    place.succeed("restart", "b", "--wait", "--timeout", "120", limit_s=200)
    assert pids(place, "a") == [a]

    (head,) = processes(place, "gcs_server")
    kill(head)
    until(lambda: place.service("ray").attempt == 2 and all_ready(place)())
    until(lambda: identify(a) is None)
    place.succeed("down", limit_s=200)
    assert not place.survivors()
