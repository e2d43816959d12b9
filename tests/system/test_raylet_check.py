"""Whether a raylet answers, asked of sockets that do as one does which runs, is stopped, or has exited."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from grpo_tui.profile.cluster import has_ray
from grpo_tui.supervisor.placement.cluster import NoAnswer, Node

if TYPE_CHECKING:
    from grpo_tui.supervisor.placement.ray_cluster import RayCluster

pytestmark = pytest.mark.skipif(not has_ray(), reason="Ray is not installed")


def cluster_at(port: int, folder: Path) -> RayCluster:
    from grpo_tui.supervisor.placement.ray_cluster import RayCluster

    cluster = RayCluster(folder)
    cluster._raylets["id"] = "127.0.0.1", port
    cluster._nodes["id"] = Node(id="id", name="machine-2", address="127.0.0.1", num_free=1)
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
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(NoAnswer):
        await cluster_at(port, tmp_path).check("id", timeout_s=10.0)
