"""What clients can do to a supervisor: stop reading, talk nonsense, come in numbers. A real one, on a real socket."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from stage import Stage, open_stage, python, until

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.supervisor import PROTOCOL_VERSION, Bye, Notice, RunState, Subscribe, read_from_daemon
from grpo_tui.client.socket import Daemon
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.base import Probe
from grpo_tui.supervisor.core import Supervisor
from grpo_tui.supervisor.handlers import converse
from grpo_tui.supervisor.lock import write_address

FLOOD = 20_000
"""Notices of 400 bytes: far more than a socket and a client's queue hold."""


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    with open_stage(tmp_path) as opened:
        yield opened


@asynccontextmanager
async def supervised(stage: Stage) -> AsyncIterator[Supervisor]:
    """A supervisor in this process, with one polite service, that listens where a daemon would."""
    launch = stage.launch(*python("import signal; signal.pause()", stage.token))
    plan = Plan(profile_name="p", profile_folder=stage.folder, launches=(launch,))
    supervisor = Supervisor(plan, run_folder=stage.folder, predecessor=None)
    running = asyncio.create_task(supervisor.run())
    path = stage.folder / "s"
    server = await asyncio.start_unix_server(lambda r, w: converse(supervisor, r, w, "client"), path)
    write_address(stage.folder, path)
    await asyncio.wait_for(supervisor.wait_until(lambda s: s.state is RunState.RUNNING), 20)
    try:
        yield supervisor
    finally:
        supervisor.end(RunState.STOPPED)
        await running
        supervisor.broadcast.send_to_all(Bye(state=supervisor.state))
        server.close()


async def test_a_client_that_stops_reading_is_let_go_and_holds_up_nobody(stage: Stage) -> None:
    async with supervised(stage) as supervisor:
        _, silent = await asyncio.open_unix_connection(stage.folder / "s")
        silent.write(to_line(Subscribe()))
        silent.transport.pause_reading()  # type: ignore[attr-defined]
        heard: list[str] = []

        async def read() -> None:
            async for message in Daemon(stage.folder).events():
                if isinstance(message, Notice) and message.text.startswith("flood"):
                    heard.append(message.text.split()[1])
                    if len(heard) == FLOOD:
                        return

        reading = asyncio.create_task(read())
        await until(lambda: sum(each.is_watching for each in supervisor.broadcast.clients) == 2)
        for number in range(FLOOD):
            supervisor.notice("info", f"flood {number} {'x' * 400}", None)
            if number % 500 == 499:
                await until(lambda: len(heard) > number)  # noqa: B023 - awaited at once
        await asyncio.wait_for(reading, 60)
        assert heard == [str(number) for number in range(FLOOD)]
        reply = await asyncio.wait_for(Daemon(stage.folder).command("status"), 20)
        assert reply.ok
        assert [each.is_dropped for each in supervisor.broadcast.clients if each.is_watching] == []
        silent.transport.abort()


async def test_two_clients_hear_the_same_and_either_may_leave(stage: Stage) -> None:
    async with supervised(stage) as supervisor:
        streams = [Daemon(stage.folder).events() for _ in range(2)]
        for stream in streams:
            await anext(stream)  # the snapshot
        supervisor.notice("info", "first", None)
        for stream in streams:
            assert await _hears(stream, "first")
        await streams[0].aclose()  # type: ignore[attr-defined]
        supervisor.notice("info", "second", None)
        assert await _hears(streams[1], "second")
        await streams[1].aclose()  # type: ignore[attr-defined]


async def _hears(stream: AsyncIterator[object], text: str) -> bool:
    async with asyncio.timeout(20):
        async for message in stream:
            if isinstance(message, Notice) and message.text == text:
                return True
    return False


@pytest.mark.parametrize("nonsense", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"type": "command"}\n', b"\xff\xfe\n"])
async def test_nonsense_is_answered_in_words_and_ends_that_conversation_alone(stage: Stage, nonsense: bytes) -> None:
    async with supervised(stage):
        reader, writer = await asyncio.open_unix_connection(stage.folder / "s")
        writer.write(nonsense)
        answer = await asyncio.wait_for(reader.read(), 20)
        last = read_from_daemon(answer.splitlines()[-1])
        assert last.type == "reply"
        assert "not a valid line of protocol" in (last.error or "")
        writer.close()
        assert (await Daemon(stage.folder).command("status")).ok


async def test_a_supervisor_of_another_protocol_is_told_how_to_be_replaced(stage: Stage) -> None:
    async def speak_otherwise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = {"type": "hello", "version": PROTOCOL_VERSION + 1, "run": "r", "pid": 1}
        writer.write(json.dumps(hello).encode() + b"\n")
        await reader.read()
        writer.close()

    path = stage.folder / "s"
    server = await asyncio.start_unix_server(speak_otherwise, path)
    write_address(stage.folder, path)
    with pytest.raises(Exception, match=r"uses protocol \d+, this program \d+: `grpo-tui upgrade"):
        await Daemon(stage.folder).hello()
    assert (await Daemon(stage.folder).hello(any_version=True)).version == PROTOCOL_VERSION + 1
    server.close()


async def test_a_kill_overtakes_a_stop_with_a_long_grace(stage: Stage) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    ready = Probe(log="deaf", interval_s=0.02)
    launch = stage.launch(*python(deaf, stage.token), stop_grace_s=100.0, ready=ready)
    plan = Plan(profile_name="p", profile_folder=stage.folder, launches=(launch,))
    supervisor = Supervisor(plan, run_folder=stage.folder, predecessor=None)
    running = asyncio.create_task(supervisor.run())
    path = stage.folder / "s"
    server = await asyncio.start_unix_server(lambda r, w: converse(supervisor, r, w, "client"), path)
    write_address(stage.folder, path)
    await asyncio.wait_for(supervisor.wait_until(lambda s: s.state is RunState.RUNNING), 20)
    daemon = Daemon(stage.folder)
    assert (await daemon.command("stop", "a")).ok
    reply = await asyncio.wait_for(daemon.command("kill", "a", wait=True), 20)
    assert reply.ok
    assert reply.status is not None
    assert reply.status.services[0].exit_code == -signal.SIGKILL
    supervisor.end(RunState.STOPPED)
    assert await running is RunState.STOPPED
    server.close()
