"""A run on several machines, made of namespaces, by the commands of docs/cluster.md."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from machines import ClusterWorkplace, Machine, machines, ray_machines, why_not
from workplace import service, until

from grpo_engine.wire.supervisor import RunStatus, ServiceState
from grpo_tui.profile.cluster import has_ray

pytestmark = [
    pytest.mark.skipif(not has_ray(), reason="Ray is not installed"),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.extended("test_cluster_lost_machines.py and test_cluster_relay.py have the parts of it on one machine"),
    pytest.mark.timeout(900),
]

GATE = """
import asyncio, sys
from grpo_tui.supervisor.placement import relay
relay.SILENT_LIMIT_S = 2.0
async def serve(reader, writer):
    writer.write(b"hello")
    await reader.read()
    print("the service is told", flush=True)
async def main():
    await asyncio.start_server(serve, "127.0.0.1", 9001)
    print(await relay.Relay("token").open_gate(sys.argv[1], [9001]), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
DOOR = """
import asyncio, sys
from grpo_tui.supervisor.placement import relay
relay.SILENT_LIMIT_S = 2.0
async def main():
    assert await relay.Relay("token").set_doors({9001: (sys.argv[1], int(sys.argv[2]))}) == []
    reader, writer = await asyncio.open_connection("127.0.0.1", 9001)
    print((await reader.readexactly(5)).decode(), flush=True)
    print("the client is told", await reader.read(), flush=True)
asyncio.run(main())
"""
WRITES = """
import socket, sys, time
print("up", flush=True)
with open(sys.argv[1], "a") as rows:
    while True:
        print(socket.gethostname(), time.time(), file=rows, flush=True)
        time.sleep(0.05)
"""
"""A line with the name of its machine, again and again, as a trainer writes its steps."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterWorkplace]:
    with ray_machines(tmp_path_factory.mktemp("shared"), "m1", "m2", "m3") as place:
        yield place


@contextmanager
def run(place: ClusterWorkplace, *settings: str) -> Iterator[Path]:
    """A run of `tiny-ray` on these machines, whose end leaves nothing of it, and the cluster as it was."""
    before = cluster(place)
    words = [word for setting in settings for word in ("--set", setting)]
    joined = ("--set", f"cluster.address={place.address}")
    up = ("up", "--profile", "tiny-ray", "--detach", "--wait", "ready")
    name = place.succeed(*up, *joined, *words, "--set", "services.trainer.eval_every=0", limit_s=600).strip()
    assert {each.name: each.machine for each in status(place, name).services if each.machine} == {
        "trainer": "m2",
        "vllm": "m3",
    }
    yield place.folder / "logs" / name
    place.succeed("down", name)
    assert not place.survivors()
    assert cluster(place) == before


def status(place: ClusterWorkplace, name: str) -> RunStatus:
    return RunStatus.model_validate_json(place.succeed("status", name, "--json"))


def steps(run_folder: Path) -> list[dict[str, float]]:
    """The metrics of each step."""
    try:
        lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line)["metrics"] for line in lines]


def cluster(place: ClusterWorkplace) -> set[int]:
    """The processes of the cluster itself."""
    found = [
        place.processes(each, kind) for each in place.machines.all for kind in ("gcs_server", "raylet_socket_name")
    ]
    return {process.pid for some in found for process in some}


def test_a_run_over_three_machines_sends_its_weights_again_to_a_killed_server_and_leaves_the_cluster_as_it_was(
    place: ClusterWorkplace,
) -> None:
    settings = ("bridge={mode='broadcast'}", "services.trainer.max_staleness=0", "services.trainer.training_steps=8")
    with run(place, *settings) as folder:
        until(lambda: len(steps(folder)) >= 2)
        (server,) = place.processes(place.machines.all[2], "-m grpo_engine server")
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: len(steps(folder)) == 8)
        assert next(each for each in status(place, folder.name).services if each.name == "vllm").attempt == 2
        # Sampled by the weights that are trained on: the two compute the same, but for rounding.
        assert max(each["alignment/diff_abs_mean"] for each in steps(folder)) < 1e-4
        assert {each["sync/num_servers"] for each in steps(folder) if "sync/num_servers" in each} == {1.0}
        assert {each["rollout/staleness_max"] for each in steps(folder)} == {0.0}


def test_a_connection_through_a_dead_link_ends_on_both_machines(tmp_path: Path) -> None:
    with machines(tmp_path, "a", "b") as made:
        there, here = made.all

        def start(machine: Machine, program: str, *words: str) -> subprocess.Popen[str]:
            argv = machine.argv([sys.executable, "-P", "-c", program, *words], cwd=tmp_path)
            return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

        with start(there, GATE, there.address) as gate:
            assert gate.stdout is not None
            with start(here, DOOR, there.address, gate.stdout.readline().strip()) as door:
                assert door.stdout is not None
                assert door.stdout.readline() == "hello\n"
                made.unplug(here)
                assert door.stdout.readline() == "the client is told b''\n"
            assert gate.stdout.readline() == "the service is told\n"
            gate.kill()


def test_what_runs_on_a_machine_that_is_cut_off_never_runs_beside_its_successor(place: ClusterWorkplace) -> None:
    rows = place.folder / "rows"
    up = "{ log = '^up', interval_s = 0.05, within_s = 300 }"
    writer = service("t", WRITES, rows, num_devices=1, ready=up, restart='"on-failure"', backoff_s=0.2)
    place.profile('[cluster]\nkind = "ray"\n', writer)
    joined = ("--set", f"cluster.address={place.address}")
    name = place.succeed("up", "--profile", "p", *joined, "--detach", "--wait", "ready", limit_s=300).strip()
    cut_off = place.machines.all[1]

    def has(state: str, attempt: int) -> bool:
        now = status(place, name)
        (machine,) = [each.state for each in now.machines if each.name == cut_off.name]
        (running,) = [each for each in now.services if each.name == "t"]
        return (machine, running.attempt) == (state, attempt) and running.state is ServiceState.READY

    place.machines.unplug(cut_off)
    until(lambda: has("silent", 1))
    place.machines.plug_in(cut_off)
    until(lambda: has("ready", 1))  # it went on
    place.machines.unplug(cut_off)
    until(lambda: has("lost", 2))
    place.succeed("down", name)
    place.machines.plug_in(cut_off)
    assert not place.survivors()
    written = [line.split() for line in rows.read_text().splitlines()]
    times = {host: [float(at) for of, at in written if of == host] for host in ("m2", "m3")}
    assert max(times["m2"]) < min(times["m3"])
