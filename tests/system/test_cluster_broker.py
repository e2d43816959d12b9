"""Services on machines of a cluster: the process that stands for each, the broker, and the agents of the machines."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from broker_bench import DEADLINE_S, DOORS, PRINTS, WAITS, Bench, line_of, program, until_gone
from launches import launch
from ports import free_port
from stage import Stage

from grpo_engine.python_command import module_command
from grpo_engine.wire.codec import to_line
from grpo_engine.wire.environment_variables import MACHINE_ADDRESS_VARIABLE
from grpo_engine.wire.run_folder import BROKER_FILE, MACHINE_ENDED, TOKEN_FILE
from grpo_engine.wire.supervisor import Refusal
from grpo_engine.wire.unix_peers import peer_of
from grpo_tui.supervisor import preflight
from grpo_tui.supervisor.keeper.proc import identify, read_stat
from grpo_tui.supervisor.placement import agent, wire

LISTENS = """
import socket, sys
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
while True:
    connection, _ = listening.accept()
    connection.sendall(b"hello")
    connection.close()
"""


async def test_a_service_on_a_machine_has_its_log_its_devices_and_its_exit_code_here(
    stage: Stage, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path, [program("a", f"{PRINTS}; raise SystemExit(7)")], left=2)
    async with bench.broker():
        process = await bench.start("a")
        out, _ = await process.communicate()
        assert process.returncode == 7
        assert out.decode() == "devices 0\n"
    assert not (bench.run_folder / "machines.json").exists()


async def test_a_service_is_told_the_address_of_its_machine(stage: Stage, tmp_path: Path) -> None:
    bench = Bench(
        stage, tmp_path, [program("a", f"import os; print(os.environ[{MACHINE_ADDRESS_VARIABLE!r}])")], left=1
    )
    bench.cluster.addresses["left"] = "127.0.0.2"
    (bench.run_folder / TOKEN_FILE).write_text("token")
    async with bench.broker():
        out, _ = await (await bench.start("a")).communicate()
        assert out.decode() == "127.0.0.2\n"


async def test_a_stop_reaches_the_service_and_its_signal_is_the_exit_here(stage: Stage, tmp_path: Path) -> None:
    bench = Bench(stage, tmp_path, [program("a", WAITS)], left=1)
    async with bench.broker():
        process = await bench.start("a")
        pid = int((await line_of(process, "pid")).split()[1])
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == -signal.SIGTERM
        await until_gone(pid)


async def test_a_service_is_ended_with_the_process_that_stands_for_it(stage: Stage, tmp_path: Path) -> None:
    bench = Bench(stage, tmp_path, [program("a", WAITS)], left=1)
    async with bench.broker():
        process = await bench.start("a")
        pid = int((await line_of(process, "pid")).split()[1])
        process.kill()
        await process.wait()
        await until_gone(pid)


@pytest.mark.parametrize("num_unanswered", [0, 2])
async def test_services_go_on_while_the_broker_is_restarted_and_no_line_is_lost_or_repeated(
    stage: Stage, tmp_path: Path, num_unanswered: int
) -> None:
    """Also where their machine does not answer at first, since its actor is killed in that moment."""
    counts = (
        "import sys\nprint('ready', flush=True)\nfor line in open(sys.argv[1]):\n    print(line, end='', flush=True)"
    )
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    service = program("a", counts)
    service = launch("a", argv=(*service.argv, str(pipe)), num_devices=1)
    bench = Bench(stage, tmp_path, [service], left=1)
    async with bench.broker(ends_all=False):
        process = await bench.start("a")
        await line_of(process, "ready")
        writer = await asyncio.to_thread(pipe.open, "w")
        writer.write("one\n")
        writer.flush()
        await line_of(process, "one")
    writer.write("two\n")
    writer.close()
    bench.cluster.reserved.clear()  # as a cluster does whose driver was killed
    bench.cluster.num_unanswered = num_unanswered
    async with bench.broker():
        out, _ = await process.communicate()
        assert (out.decode(), process.returncode) == ("two\n", 0)
        assert bench.cluster.num_unanswered == 0


async def test_a_port_of_a_service_on_another_machine_is_reachable_here(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing_taken(*_: object, **__: object) -> list[Refusal]:
        return []  # the door here would count, since the other machine is this one

    monkeypatch.setattr(preflight, "free_resources", nothing_taken)
    port = free_port()
    service = program("a", LISTENS)
    service = replace(service, argv=(*service.argv, str(port)), ports=(port,))
    bench = Bench(stage, tmp_path, [service], left=1)
    bench.cluster.addresses["left"] = "127.0.0.2"
    (bench.run_folder / TOKEN_FILE).write_text("token of the run")
    async with bench.broker():
        await line_of(await bench.start("a"), "listening")
        reader, writer = await asyncio.open_connection(DOORS, port)
        assert await reader.read() == b"hello"
        writer.close()


async def test_without_a_broker_the_process_waits_for_one_and_a_second_machine_is_awaited(
    stage: Stage, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path, [program("a", PRINTS)], left=1)
    process = await bench.start("a")
    assert not (bench.run_folder / BROKER_FILE).exists()
    async with bench.broker():
        assert await line_of(process, "devices") == "devices 0"
        assert await process.wait() == 0


async def start_agent(run_folder: Path, folder: Path, raylet: int) -> None:
    """As an actor does; returns when the process that it starts has exited."""
    argv = module_command("grpo_tui.supervisor.placement.agent", str(run_folder), str(folder), "node", str(raylet))
    starting = await asyncio.create_subprocess_exec(*argv, start_new_session=True)
    assert await starting.wait() == 0


async def connect(folder: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To an agent, as soon as it listens."""
    while True:
        with contextlib.suppress(OSError):
            return await asyncio.open_unix_connection(folder / "agent.sock")
        await asyncio.sleep(0.05)


async def ask(folder: Path, request: wire.AnyRequest) -> bytes:
    """Ask an agent; its answer, or none."""
    reader, writer = await connect(folder)
    writer.write(to_line(request))
    answer = await reader.readline()
    writer.close()
    return answer


async def test_an_agent_is_no_child_of_the_actor_that_starts_it_which_kills_its_children_as_it_exits(
    stage: Stage, tmp_path: Path
) -> None:
    run_folder, folder = tmp_path / stage.run, tmp_path / "agent"
    run_folder.mkdir()
    async with asyncio.timeout(DEADLINE_S):
        await start_agent(run_folder, folder, os.getpid())
        _, writer = await connect(folder)
        pid, _ = peer_of(writer.get_extra_info("socket"))
        writer.close()
        stat = read_stat(pid)
        assert stat is not None
        assert stat.parent != os.getpid()
        assert wire.Done.model_validate_json(await ask(folder, wire.End())).error is None
        await until_gone(pid)
        assert not folder.exists()


async def test_an_actor_that_outlives_its_raylet_starts_no_agent(tmp_path: Path) -> None:
    raylet = await asyncio.create_subprocess_exec("true")
    await raylet.wait()
    await start_agent(tmp_path, tmp_path / "agent", raylet.pid)
    # In its folder the next raylet's actor would find it: it ended nothing when that raylet exited, and services waited
    # for the end of its lease.
    assert not (tmp_path / "agent").exists()


async def test_an_agent_that_ends_its_services_with_its_raylet_does_not_say_how_they_ended(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "LOOK_AT_LOG_S", 0.001)
    run_folder, folder = tmp_path / stage.run, tmp_path / "agent"
    run_folder.mkdir()
    folder.mkdir()
    raylet = await asyncio.create_subprocess_exec("sleep", "60")
    serving = asyncio.create_task(agent.Agent(run_folder, folder, identify(raylet.pid), node="node").run())
    service = launch("a", argv=(sys.executable, "-I", "-S", "-c", "import signal; signal.pause()", stage.token))

    async def follow(num_copied: int, wait_s: float) -> bytes:
        return await ask(folder, wire.Follow(service="a", attempt=1, num_copied=num_copied, wait_s=wait_s))

    async with asyncio.timeout(DEADLINE_S):
        started = await ask(folder, wire.Start(launch=wire.LAUNCH.dump_json(service).decode(), attempt=1))
        assert wire.Started.model_validate_json(started).refused is None
        log = base64.b64decode(wire.Followed.model_validate_json(await follow(0, 0.0)).data)
        is_asked = asyncio.Event()
        plain = agent.Agent._follow

        async def asked(self: agent.Agent, request: wire.Follow) -> wire.Followed:
            is_asked.set()
            return await plain(self, request)

        monkeypatch.setattr(agent.Agent, "_follow", asked)
        end = asyncio.create_task(follow(len(log), 30.0))
        await is_asked.wait()
        raylet.kill()
        # It was SIGKILL, for which the supervisor would start it again before the cluster has lost the machine.
        assert await end == b""
        await serving
        await raylet.wait()
    assert (run_folder / f"node{MACHINE_ENDED}").exists()
