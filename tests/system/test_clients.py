"""Clients that stop reading, send invalid lines or are many, against a real supervisor on a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from stage import Stage, python, until
from workplace import IDLE, IGNORES_SIGTERM

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.supervisor import PROTOCOL_VERSION, Bye, Notice, RunState, Subscribe, read_from_daemon
from grpo_tui.client.launch import wait_if_ending
from grpo_tui.client.local import look_at
from grpo_tui.client.socket import Daemon
from grpo_tui.exit_codes import ExitCode
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.base import Launch, Probe
from grpo_tui.supervisor.core import Supervisor
from grpo_tui.supervisor.handlers import converse
from grpo_tui.supervisor.keeper.client import ExitReport, adopt_keeper
from grpo_tui.supervisor.lock import take_lock, write_address
from grpo_tui.supervisor.service_runner import ServiceRunner
from grpo_tui.supervisor.state_file import read_state

FLOOD = 20_000
"""Notices of 400 bytes: far more than a socket and a client's queue hold."""


@asynccontextmanager
async def supervised(stage: Stage, program: str = IDLE, **settings: object) -> AsyncIterator[Supervisor]:
    """A supervisor of one service in this process, with its socket in the run folder."""
    launch = stage.launch(*python(program, stage.token), **settings)  # type: ignore[arg-type]
    async with supervising(stage, launch) as supervisor:
        await asyncio.wait_for(supervisor.wait_until(lambda s: s.state is RunState.RUNNING), 60)
        yield supervisor


@asynccontextmanager
async def supervising(stage: Stage, *launches: Launch) -> AsyncIterator[Supervisor]:
    plan = Plan(profile_name="p", profile_folder=stage.folder, launches=launches)
    supervisor = Supervisor(plan, run_folder=stage.folder, predecessor=read_state(stage.folder))
    running = asyncio.create_task(supervisor.run())
    path = stage.folder / "s"
    server = await asyncio.start_unix_server(lambda r, w: converse(supervisor, r, w, "client"), path)
    write_address(stage.folder, path)
    try:
        yield supervisor
    finally:
        supervisor.end(RunState.STOPPED)
        await running
        supervisor.broadcast.send_to_all(Bye(state=supervisor.state))
        server.close()


async def test_a_client_that_stops_reading_is_dropped_and_delays_no_other(stage: Stage) -> None:
    async with supervised(stage) as supervisor:
        _, silent = await asyncio.open_unix_connection(stage.folder / "s")
        silent.write(to_line(Subscribe()))
        silent.transport.pause_reading()  # type: ignore[attr-defined]
        received: list[str] = []

        async def read() -> None:
            async for message in Daemon(stage.folder).events():
                if isinstance(message, Notice) and message.text.startswith("flood"):
                    received.append(message.text.split()[1])
                    if len(received) == FLOOD:
                        return

        reading = asyncio.create_task(read())
        await until(lambda: sum(each.is_watching for each in supervisor.broadcast.clients) == 2)
        for number in range(FLOOD):
            supervisor.notice("info", f"flood {number} {'x' * 400}", None)
            if number % 500 == 499:
                await until(lambda: len(received) > number)  # noqa: B023 - awaited at once
        await asyncio.wait_for(reading, 60)
        assert received == [str(number) for number in range(FLOOD)]
        reply = await asyncio.wait_for(Daemon(stage.folder).command("status"), 60)
        assert reply.ok
        assert [each.is_dropped for each in supervisor.broadcast.clients if each.is_watching] == []
        silent.transport.abort()


async def test_two_clients_receive_the_same_and_one_may_leave(stage: Stage) -> None:
    async with supervised(stage) as supervisor:
        streams = [Daemon(stage.folder).events() for _ in range(2)]
        for stream in streams:
            await anext(stream)  # the snapshot
        supervisor.notice("info", "first", None)
        for stream in streams:
            assert await _receives(stream, "first")
        await streams[0].aclose()  # type: ignore[attr-defined]
        supervisor.notice("info", "second", None)
        assert await _receives(streams[1], "second")
        await streams[1].aclose()  # type: ignore[attr-defined]


async def _receives(stream: AsyncIterator[object], text: str) -> bool:
    async with asyncio.timeout(60):
        async for message in stream:
            if isinstance(message, Notice) and message.text == text:
                return True
    return False


async def test_a_supervisor_whose_run_is_over_is_waited_for_and_not_joined(stage: Stage) -> None:
    async with supervised(stage) as supervisor:
        lock = take_lock(stage.folder)
        assert lock is not None
        supervisor.end(RunState.STOPPED)
        await asyncio.wait_for(supervisor.wait_until(lambda s: s.state is RunState.STOPPED), 60)
        waiting = asyncio.create_task(asyncio.to_thread(wait_if_ending, look_at(stage.folder)))
        await asyncio.wait({waiting}, timeout=0.5)
        was_done = waiting.done()
        os.close(lock)
        assert await asyncio.wait_for(waiting, 60)
        assert not was_done


async def test_a_command_to_a_run_that_has_just_ended_is_refused_as_once_its_supervisor_has_exited(
    stage: Stage,
) -> None:
    """For as long as that took, it was said to be ending, with another exit code and without what goes on with it."""
    async with supervised(stage) as supervisor:
        supervisor.end(RunState.STOPPED)
        await asyncio.wait_for(supervisor.wait_until(lambda s: s.state is RunState.STOPPED), 60)
        reply = await Daemon(stage.folder).command("start", "a")
    assert reply.exit_code == ExitCode.NO_SUCH_RUN
    assert reply.error == f"run {stage.folder.name} has ended: stopped; `grpo-tui up` starts another"


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"type": "command"}\n', b"\xff\xfe\n"])
async def test_an_invalid_line_gets_an_error_and_ends_that_connection_alone(stage: Stage, line: bytes) -> None:
    async with supervised(stage):
        reader, writer = await asyncio.open_unix_connection(stage.folder / "s")
        writer.write(line)
        answer = await asyncio.wait_for(reader.read(), 60)
        last = read_from_daemon(answer.splitlines()[-1])
        assert last.type == "reply"
        assert "not a valid line of protocol" in (last.error or "")
        writer.close()
        assert (await Daemon(stage.folder).command("status")).ok


async def test_a_supervisor_of_another_protocol_version_is_an_error_that_names_upgrade(stage: Stage) -> None:
    async def answer_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = {"type": "hello", "version": PROTOCOL_VERSION + 1, "run": "r", "pid": 1}
        writer.write(json.dumps(hello).encode() + b"\n")
        await reader.read()
        writer.close()
        connections.append(writer)

    connections: list[asyncio.StreamWriter] = []
    path = stage.folder / "s"
    server = await asyncio.start_unix_server(answer_hello, path)
    write_address(stage.folder, path)
    with pytest.raises(Exception, match=r"uses protocol \d+, this program \d+: `grpo-tui upgrade"):
        await Daemon(stage.folder).hello()
    assert (await Daemon(stage.folder).hello(any_version=True)).version == PROTOCOL_VERSION + 1
    server.close()
    await until(lambda: len(connections) == 2)
    for each in connections:
        await each.wait_closed()


async def test_a_start_after_a_takeover_is_not_of_an_attempt_that_ended_without_a_supervisor(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ready until its end was recorded: `start` had nothing to do, and a moment later the service failed."""
    launches = [stage.launch(*python(IDLE, stage.token), name=name) for name in "ab"]
    plan = Plan(profile_name="p", profile_folder=stage.folder, launches=tuple(launches))
    first = Supervisor(plan, run_folder=stage.folder, predecessor=None)
    running = asyncio.create_task(first.run())
    await asyncio.wait_for(first.wait_until(lambda s: s.state is RunState.RUNNING), 60)
    pid = first.status().services[0].pid
    assert pid is not None
    running.cancel()
    await asyncio.wait({running})
    os.kill(pid, signal.SIGKILL)
    await until(lambda: isinstance(adopt_keeper(stage.folder, "a", 1), ExitReport))
    record = ServiceRunner._record_exit

    async def record_slowly(runner: ServiceRunner, attempt: int, report: ExitReport) -> None:
        await asyncio.sleep(0.2)
        await record(runner, attempt, report)

    monkeypatch.setattr(ServiceRunner, "_record_exit", record_slowly)
    async with supervising(stage, *launches) as supervisor:
        assert (await Daemon(stage.folder).command("start", "a", wait=True)).ok
        assert supervisor.service("a").attempt == 2


async def test_a_kill_overrides_a_stop_with_a_long_grace_period(stage: Stage) -> None:
    ready = Probe(log="up", interval_s=0.02)
    async with supervised(stage, IGNORES_SIGTERM, stop_grace_s=100.0, ready=ready):
        daemon = Daemon(stage.folder)
        assert (await daemon.command("stop", "a")).ok
        reply = await asyncio.wait_for(daemon.command("kill", "a", wait=True), 60)
        assert reply.ok
        assert reply.status is not None
        assert reply.status.services[0].exit_code == -signal.SIGKILL
