"""Gates and doors between machines of a cluster: who else connects, listens or stands between gets nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from contextlib import suppress

import pytest
from ports import free_port
from test_port_holders import received, squatter

from grpo_tui.supervisor.placement import relay as relay_module
from grpo_tui.supervisor.placement.relay import Relay

GATE, DOOR, BETWEEN = "127.0.0.2", "127.0.0.3", "127.0.0.4"
SECRET = b"Authorization: Bearer token-of-the-run"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A service that says `yes` to everything."""
    await reader.read(100)
    writer.write(b"yes")
    writer.close()


async def sent(host: str, port: int) -> bytes:
    """What comes back for the secret."""
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(SECRET)
            return await reader.read(100)
        except ConnectionError:
            return b""
        finally:
            writer.close()


async def test_a_process_between_a_door_and_a_gate_learns_nothing_by_passing_their_proofs_on() -> None:
    """It took the port of an earlier gate, to which the door still leads, and asks the next gate for the proofs."""
    port = free_port()
    service = await asyncio.start_server(answering, "127.0.0.1", port)
    there, here = Relay("t"), Relay("t", door_host=DOOR)
    gate = await there.open_gate(GATE, [port])
    heard: list[bytes] = []

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beyond = await asyncio.open_connection(GATE, gate)
        writer.write(await beyond[0].readline())
        beyond[1].write(await reader.readline())
        if proof := await beyond[0].readline():
            writer.write(proof)
            heard.append(await reader.read(100))
        beyond[1].close()
        writer.close()

    squatting = await asyncio.start_server(between, BETWEEN, 0)
    try:
        await here.set_doors({port: (BETWEEN, squatting.sockets[0].getsockname()[1])})
        assert await sent(DOOR, port) == b""
        assert heard == []
        await here.set_doors({port: (GATE, gate)})
        assert await sent(DOOR, port) == b"yes"
    finally:
        for each in (here, there):
            await each.close()
        squatting.close()
        service.close()


async def test_strangers_who_connect_to_a_gate_without_pause_keep_no_door_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty connect again as soon as they are taken: each door was closed as the oldest without a proof."""
    monkeypatch.setattr(relay_module, "MAX_UNKNOWN", 20)
    port, held = free_port(), list[socket.socket]()
    service = await asyncio.start_server(answering, "127.0.0.1", port)
    there, here = Relay("t"), Relay("t", door_host=DOOR)
    gate = await there.open_gate(GATE, [port])

    async def connect_again_and_again() -> None:
        while True:
            held.append(stranger := socket.socket())
            stranger.setblocking(False)
            with suppress(OSError):
                await asyncio.get_running_loop().sock_connect(stranger, (GATE, gate))
                await asyncio.get_running_loop().sock_recv(stranger, 100)
            if len(held) > 100:
                held.pop(0).close()

    strangers = [asyncio.create_task(connect_again_and_again()) for _ in range(60)]
    try:
        await here.set_doors({port: (GATE, gate)})
        assert await sent(DOOR, port) == b"yes"
    finally:
        for each in strangers:
            each.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
        for stranger in held:
            stranger.close()
        await here.close()
        await there.close()
        service.close()


@as_root
async def test_a_gate_leads_to_no_process_of_another_user_on_the_port_of_a_service() -> None:
    port = free_port()
    there, here = Relay("t"), Relay("t", door_host=DOOR)
    try:
        await here.set_doors({port: (GATE, await there.open_gate(GATE, [port]))})
        with squatter(port) as stranger:
            assert await sent(DOOR, port) == b""
            assert SECRET.decode() not in "".join(received(stranger))
    finally:
        await here.close()
        await there.close()


@as_root
async def test_a_door_serves_no_process_of_another_user() -> None:
    port = free_port()
    service = await asyncio.start_server(answering, "127.0.0.1", port)
    there, here = Relay("t"), Relay("t", door_host=DOOR)
    program = "import os, socket, sys; os.setuid(65534); s = socket.create_connection((sys.argv[1], int(sys.argv[2])));"
    program += "s.send(b'x'); sys.exit(s.recv(9) != b'yes')"
    try:
        await here.set_doors({port: (GATE, await there.open_gate(GATE, [port]))})
        for by_another, code in ((False, 0), (True, 1)):
            own = program if by_another else program.replace("os.setuid(65534);", "")
            client = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", own, DOOR, str(port))
            assert await client.wait() == code
    finally:
        await here.close()
        await there.close()
        service.close()


@as_root
async def test_requests_of_another_user_who_closes_at_once_pass_no_door_and_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does not say whose a closed socket was. Each of theirs was searched in all processes, and logged."""
    monkeypatch.setattr(relay_module, "who_has", lambda _: pytest.fail("searches all processes for each connection"))
    caplog.set_level(logging.INFO)
    port, heard = free_port(), []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(100))
        writer.write(b"yes")
        writer.close()

    service = await asyncio.start_server(hear, "127.0.0.1", port)
    there, here = Relay("t"), Relay("t", door_host=DOOR)
    program = "import os, socket, sys; os.setuid(65534)\nfor _ in range(50):\n s = socket.socket()"
    program += "; s.connect((sys.argv[1], int(sys.argv[2]))); s.send(b'x'); s.close()"
    try:
        await here.set_doors({port: (GATE, await there.open_gate(GATE, [port]))})
        client = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", program, DOOR, str(port))
        assert await client.wait() == 0
        assert await sent(DOOR, port) == b"yes"
        assert heard == [SECRET]
        assert len(caplog.messages) == 1
        assert "connections to doors are refused, 1 so far" in caplog.messages[0]
    finally:
        await here.close()
        await there.close()
        service.close()


async def test_connections_without_a_proof_are_bounded_and_keep_no_door_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay_module, "MAX_UNKNOWN", 8)
    caplog.set_level(logging.WARNING)
    port = free_port()
    service = await asyncio.start_server(answering, "127.0.0.1", port)
    there, here = Relay("t"), Relay("t", door_host=DOOR)
    gate = await there.open_gate(GATE, [port])
    await here.set_doors({port: (GATE, gate)})
    silent = [await asyncio.open_connection(GATE, gate) for _ in range(20)]
    try:
        assert await sent(DOOR, port) == b"yes"
        ended = 0
        for reader, _ in silent[:12]:
            async with asyncio.timeout(10):
                await reader.readline()
                ended += await reader.read() == b""
        assert ended == 12
        for line in (b"\xff\xfe\n", b"1 2 \xc3\xa9\n", b"x" * 5000, b"\n", b"%d a b\n" % port, b"1e5 a b c\n"):
            reader, writer = await asyncio.open_connection(GATE, gate)
            writer.write(line)
            with suppress(ConnectionError):
                assert b"\n" not in (await reader.read())[33:]
            writer.close()
        assert len(caplog.messages) == 1
        assert await sent(DOOR, port) == b"yes"
    finally:
        for _, writer in silent:
            writer.close()
        await here.close()
        await there.close()
        service.close()
