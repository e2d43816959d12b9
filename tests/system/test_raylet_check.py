"""Whether a raylet answers: sockets do as one that runs, is stopped, or has exited. And what ends a given-up one, what
machines are called, and what is logged where they have no room."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from grpo_tui.profile.cluster import has_ray
from grpo_tui.services.base import ClusterPlan
from grpo_tui.supervisor.placement.assignment import NoRoom
from grpo_tui.supervisor.placement.cluster import NoAnswer, Node

if TYPE_CHECKING:
    from grpo_tui.supervisor.placement.ray_cluster import RayCluster

pytestmark = pytest.mark.skipif(not has_ray(), reason="Ray is not installed")


def cluster_at(port: int, folder: Path) -> RayCluster:
    from grpo_tui.supervisor.placement.ray_cluster import RayCluster

    cluster = RayCluster(folder)
    cluster._raylets["id"] = "127.0.0.1", port
    cluster._nodes["id"] = Node(id="id", name="machine-2", address="127.0.0.1", num_free=1, num_devices=1)
    return cluster


async def test_a_raylet_answers_whose_first_frame_arrives(tmp_path: Path) -> None:
    hello = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello.extend(await reader.readexactly(33))
        writer.write(bytes(9))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        await cluster_at(server.sockets[0].getsockname()[1], tmp_path).check("id", timeout_s=10.0)
    assert hello.startswith(b"PRI * HTTP/2.0\r\n")


async def test_a_raylet_that_is_stopped_does_not_answer_though_its_port_accepts_connections(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        socket.create_connection(listening.getsockname()).close()
        with pytest.raises(NoAnswer, match="machine-2: its raylet does not answer"):
            await cluster_at(listening.getsockname()[1], tmp_path).check("id", timeout_s=0.1)


async def test_a_raylet_that_has_exited_does_not_answer(tmp_path: Path) -> None:
    with socket.socket() as bound:  # and not listening: nobody else gets the port meanwhile
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(NoAnswer):
            await cluster_at(bound.getsockname()[1], tmp_path).check("id", timeout_s=10.0)


def listed(node_id: str, host: str) -> dict[str, Any]:
    """A living node as Ray lists it."""
    place = {"NodeManagerHostname": host, "NodeManagerAddress": "10.0.0.1", "NodeManagerPort": 1}
    return {"NodeID": node_id, "Alive": True, "Resources": {"GPU": 1.0}, **place}


async def test_two_machines_with_one_host_name_are_two_and_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_tui.supervisor.placement import ray_cluster

    there = [listed("aaaaaaaa", "vm"), listed("bbbbbbbb", "vm"), listed("cccccccc", "other")]
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: there)
    state = ray_cluster.ray._private.state
    monkeypatch.setattr(state, "available_resources_per_node", lambda: {each["NodeID"]: {"GPU": 1.0} for each in there})
    cluster = ray_cluster.RayCluster(tmp_path)
    names = {node.id: node.name for node in await cluster.nodes()}
    assert names == {"aaaaaaaa": "vm", "bbbbbbbb": "vm-bbbbbb", "cccccccc": "other"}
    there.reverse()
    assert {node.id: node.name for node in await cluster.nodes()} == names
    there[:] = [listed("dddddddd", "vm")]  # the same machine, started again
    assert [node.name for node in await cluster.nodes()] == ["vm"]


def test_a_cluster_without_room_is_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from grpo_tui.supervisor.placement import ray_cluster

    async def has_no_room(*_: object) -> None:
        raise NoRoom("no machine has 2 free devices")

    plan = SimpleNamespace(cluster=ClusterPlan(address="head:6379", machines=0, devices_per_machine=0))
    monkeypatch.setattr(ray_cluster.Plan, "of", lambda folder: plan)
    monkeypatch.setattr(ray_cluster, "serve_broker", has_no_room)
    monkeypatch.setattr(ray_cluster.sys, "argv", ["ray_cluster", "broker", str(tmp_path)])
    assert ray_cluster.main() == 1
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("ERROR", "no machine has 2 free devices")
    ]


class FakeNode:
    """The processes of a machine, as far as they are watched; a head knows which machines it counts as alive."""

    def __init__(self, number: int, alive: dict[str, bool]) -> None:
        self.node_id, self._alive = f"{number:056x}", alive
        alive[self.node_id] = True
        self.dead: list[tuple[str, None]] = []
        self.is_killed = False

    def dead_processes(self) -> list[tuple[str, None]]:
        return self.dead

    def kill_all_processes(self, **_: bool) -> None:
        self.is_killed = True

    def get_gcs_client(self) -> FakeNode:
        return self

    def check_alive(self, ids: list[Any], timeout: float) -> list[bool]:
        return [self._alive[each.hex()] for each in ids]


def test_a_machine_that_was_given_up_while_its_raylet_is_stopped_is_ended_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_tui.supervisor.placement import ray_cluster

    alive: dict[str, bool] = {}
    head, stays, stopped = (FakeNode(number, alive) for number in (1, 2, 3))
    nodes: dict[int, Any] = {2: stays, 3: stopped}
    started: list[int] = []

    def start(plan: ClusterPlan, number: int, folder: str, head: FakeNode) -> FakeNode:
        started.append(number)
        head.dead.append(("gcs_server", None))  # which ends the watch
        return FakeNode(number + 10, alive)

    monkeypatch.setattr(ray_cluster, "_start_node", start)
    alive[stopped.node_id] = False
    ray_cluster._watch(head, nodes, ClusterPlan(address=None, machines=3, devices_per_machine=1), str(tmp_path))  # type: ignore[arg-type]
    assert (started, stays.is_killed, stopped.is_killed) == ([3], False, True)


def test_the_cluster_exits_with_its_head_also_while_a_machine_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_tui.supervisor.placement import ray_cluster

    codes: list[int] = []
    monkeypatch.setattr(ray_cluster, "EXIT_WITHIN_S", 0.0)
    monkeypatch.setattr(ray_cluster.os, "_exit", codes.append)
    monkeypatch.setattr(ray_cluster.logging, "shutdown", lambda: None)
    head = FakeNode(1, {})
    head.dead.append(("gcs_server", None))
    ray_cluster._exit_with(head)  # in a thread beside the one that starts the machine
    assert codes == [1]
