"""Ports of services on other machines at loopback: three addresses of loopback stand for two machines and a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from ports import free_port

from grpo_tui.supervisor.placement.relay import Relay

MACHINE, HERE = "127.0.0.2", "127.0.0.3"
PAYLOAD = bytes(range(256)) * 4096


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with everything that was sent, once it has ended."""
    writer.write(await reader.read())
    writer.write_eof()
    writer.close()


@asynccontextmanager
async def machines(port: int, *, token: str = "t", inside: list[int] | None = None) -> AsyncIterator[None]:
    """A service on loopback of one machine, and a door to it here."""
    service = await asyncio.start_server(echo, "127.0.0.1", port)
    there, here = Relay("t"), Relay(token, door_host=HERE)
    gate = await there.open_gate(MACHINE, [port] if inside is None else inside)
    try:
        assert await here.set_doors({port: (MACHINE, gate)}) == []
        yield
    finally:
        await here.close()
        await there.close()
        service.close()


async def answer(port: int) -> bytes:
    """What comes back through the door."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(HERE, port)
        try:
            writer.write(PAYLOAD)
            await writer.drain()
            writer.write_eof()
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


async def test_a_port_of_a_service_elsewhere_answers_at_loopback() -> None:
    port = free_port()
    async with machines(port):
        assert await answer(port) == PAYLOAD
        assert await asyncio.gather(*(answer(port) for _ in range(5))) == [PAYLOAD] * 5


@pytest.mark.parametrize("how", [{"token": "another"}, {"inside": []}], ids=["token", "port"])
async def test_nothing_passes_without_the_token_or_to_a_port_that_no_service_has(how: dict[str, object]) -> None:
    port = free_port()
    async with machines(port, **how):  # type: ignore[arg-type]
        assert await answer(port) == b""


async def test_a_port_that_is_taken_is_reported() -> None:
    port = free_port()
    taken = await asyncio.start_server(echo, HERE, port)
    relay = Relay("t", door_host=HERE)
    (fault,) = await relay.set_doors({port: (MACHINE, 1)})
    assert fault.startswith(f"port {port}: ")
    taken.close()
    await relay.close()
