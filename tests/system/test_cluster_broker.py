"""Services on machines of a cluster: the process that stands for each, the broker, and the agents of the machines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_fakes import ClusterOfAgents
from launches import launch
from ports import free_port
from stage import Stage

from grpo_engine.python_command import module_command
from grpo_engine.wire.codec import to_line
from grpo_engine.wire.environment_variables import ATTEMPT_VARIABLE, MACHINE_ADDRESS_VARIABLE, SERVICE_VARIABLE
from grpo_engine.wire.handover import PlacedPorts
from grpo_engine.wire.run_folder import BROKER_FILE, HANDOVER_IN_STEP, HANDOVER_PORTS, MACHINE_ENDED, TOKEN_FILE
from grpo_engine.wire.supervisor import MachinesReport, MachineStatus, RanksReport, RankStatus, Refusal, ServiceReport
from grpo_engine.wire.unix_peers import peer_of
from grpo_tui import remote_process
from grpo_tui.services.base import Launch
from grpo_tui.supervisor import preflight
from grpo_tui.supervisor.keeper.proc import identify, read_stat
from grpo_tui.supervisor.placement import agent, attempts, broker, wire
from grpo_tui.supervisor.placement.agent import Agent
from grpo_tui.supervisor.placement.broker import Broker
from grpo_tui.supervisor.placement.remote import standing_for

DEADLINE_S = 60.0
DOORS = "127.0.0.3"
"""Where ports of services on another machine are reachable: another address of loopback, since that machine is this."""
LISTENS = """
import socket, sys
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
while True:
    connection, _ = listening.accept()
    connection.sendall(b"hello")
    connection.close()
"""
PRINTS = "import os; print('devices', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
WAITS = f"{PRINTS}; import os, signal; print('pid', os.getpid(), flush=True); signal.pause()"


def program(name: str, code: str, *, num_devices: int = 1) -> Launch:
    """A service that runs a Python program."""
    return launch(name, argv=(sys.executable, "-I", "-S", "-c", code), num_devices=num_devices, stop_grace_s=5.0)


class Bench:
    """A broker with its cluster."""

    def __init__(self, stage: Stage, tmp_path: Path, launches: list[Launch], **num_devices: int) -> None:
        self.run_folder = tmp_path / stage.run
        self.run_folder.mkdir()
        self.launches = {each.name: replace(each, argv=(*each.argv, stage.token)) for each in launches}
        self.cluster = ClusterOfAgents(run_folder=self.run_folder, folder=tmp_path, num_devices=num_devices)
        self.reports: list[MachinesReport] = []
        self.passed_on: list[ServiceReport | RanksReport] = []
        self.started: list[asyncio.subprocess.Process] = []
        self.socket = tmp_path / "b.sock"

    @asynccontextmanager
    async def broker(self, *, ends_all: bool = True) -> AsyncIterator[Broker]:
        """A broker that serves; as if it was killed unless `ends_all`."""
        broker = Broker(
            self.cluster,
            self.launches.values(),
            run_folder=self.run_folder,
            report=self.reports.append,
            pass_on=self._pass_on,
            door_host=DOORS,
        )
        await broker.open()
        ready = asyncio.Event()
        serving = asyncio.create_task(broker.serve(self.socket, ready.set))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await ready.wait()
                yield broker
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            if ends_all:
                await broker.close()
                for process in self.started:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.communicate()

    async def _pass_on(self, report: ServiceReport | RanksReport) -> None:
        self.passed_on.append(report)

    async def start(self, name: str, attempt: int = 1) -> asyncio.subprocess.Process:
        """The process that stands for a service."""
        environment = {**os.environ, SERVICE_VARIABLE: name, ATTEMPT_VARIABLE: str(attempt)}
        argv = standing_for(self.launches[name], self.run_folder).argv
        process = await asyncio.create_subprocess_exec(*argv, env=environment, stdout=asyncio.subprocess.PIPE)
        self.started.append(process)
        return process


async def line_of(process: asyncio.subprocess.Process, start: str) -> str:
    """The next line that starts so."""
    assert process.stdout is not None
    while line := (await process.stdout.readline()).decode():
        if line.startswith(start):
            return line.strip()
    raise AssertionError(f"no line starts with {start}")


def lost_machine(bench: Bench) -> MachineStatus:
    """The machine `left`, as it was reported last."""
    return next(each for each in bench.reports[-1].machines if each.name == "left")


async def until_gone(pid: int) -> None:
    """Wait until a process has ended."""
    async with asyncio.timeout(DEADLINE_S):
        while identify(pid) is not None:  # noqa: ASYNC110 - the process is no child of this one
            await asyncio.sleep(0.01)


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


async def test_services_go_on_while_the_broker_is_restarted_and_no_line_is_lost_or_repeated(
    stage: Stage, tmp_path: Path
) -> None:
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
    async with bench.broker():
        out, _ = await process.communicate()
        assert (out.decode(), process.returncode) == ("two\n", 0)


async def test_a_lost_machine_is_named_and_its_service_starts_on_another(stage: Stage, tmp_path: Path) -> None:
    bench = Bench(stage, tmp_path, [program("a", WAITS), program("b", WAITS)], left=1, right=1, spare=1)
    async with bench.broker():
        a, b = await bench.start("a"), await bench.start("b")
        gone, stays = [int((await line_of(each, "pid")).split()[1]) for each in (a, b)]
        bench.cluster.lose("left")
        assert "left is lost" in (await line_of(a, "grpo-tui"))
        assert await a.wait() == remote_process.EXIT_LOST
        machines = {each.name: each for each in bench.reports[-1].machines}
        assert {name: each.state for name, each in machines.items()} == {
            "left": "lost",
            "right": "ready",
            "spare": "ready",
        }
        assert machines["left"].lost_services == ["a"]
        assert machines["left"].next == "a is restarted on spare, which has 1 free device"
        again = await bench.start("a", attempt=2)
        async with asyncio.timeout(DEADLINE_S):
            while "a is started on spare by " not in (says := lost_machine(bench).next or ""):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert says.endswith(", when it runs nowhere else for certain")
        starting = asyncio.create_task(line_of(again, "pid"))
        assert identify(gone) is not None
        assert not starting.done()
        os.kill(gone, signal.SIGKILL)
        (bench.run_folder / f"left{MACHINE_ENDED}").touch()  # as its agent does when nothing is left
        await starting
        assert not (bench.run_folder / f"left{MACHINE_ENDED}").exists()
        assert identify(stays) is not None
        bench.cluster.lost.clear()
    await until_gone(stays)


async def test_a_broker_after_one_that_lost_a_machine_waits_for_what_may_run_there(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(broker, "FENCE_S", 3.0)
    bench = Bench(stage, tmp_path, [program("a", WAITS)], left=1, right=1)
    async with bench.broker():
        process = await bench.start("a")
        gone = int((await line_of(process, "pid")).split()[1])
        bench.cluster.lose("left")
        assert await process.wait() == remote_process.EXIT_LOST
    assert (bench.run_folder / "machines.json").exists()
    async with bench.broker():  # of the run that is resumed at once
        again = await bench.start("a", attempt=2)
        await line_of(again, "pid")
        assert "a may still run on left: it is started when its agent has ended it" in caplog.text
        os.kill(gone, signal.SIGKILL)
    assert not (bench.run_folder / "machines.json").exists()


def test_a_lease_is_renewed_by_answers_that_the_broker_has_and_not_by_late_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    own = Agent(tmp_path, tmp_path, None, node="n")
    first = own._number_answer()
    now_s[0] += agent.LEASE_S - 1
    own._renew(None)
    assert own._why_to_end() is None
    own._renew(first)  # a request that was sent long ago
    now_s[0] += 2
    assert own._why_to_end() is not None
    late = own._number_answer()
    own._renew(late)
    assert own._why_to_end() is None


async def test_a_machine_that_stops_answering_is_named_though_the_question_to_it_is_still_open(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("SILENT_AFTER_S", 0.5), ("LOOK_S", 0.05), ("WATCH_S", 0.05)):
        monkeypatch.setattr(broker, name, seconds)
    bench = Bench(stage, tmp_path, [program("a", WAITS), program("b", WAITS)], left=1, right=1)

    def machine(name: str) -> MachineStatus:
        return next(each for each in bench.reports[-1].machines if each.name == name)

    async def until(holds: Callable[[], bool]) -> None:
        while not holds():  # noqa: ASYNC110 - reports come without a signal
            await asyncio.sleep(0.01)

    async with bench.broker():
        assert bench.reports[0].machines[0].is_joining
        await until(lambda: {each.state for each in bench.reports[-1].machines} == {"ready"})
        bench.cluster.silent.add("left")
        await until(lambda: machine("left").state == "silent")
        assert machine("left").since == machine("left").answered_at
        assert machine("left").next == "nothing is restarted yet: the cluster decides whether it is lost"
        assert list(machine("left").services) == ["a"]
        named_at = machine("left").since
        await until(lambda: (machine("right").answered_at or 0.0) > named_at + 0.6)  # the other is asked meanwhile
        bench.cluster.silent.clear()


async def test_a_machine_is_named_whose_agent_answers_while_the_process_of_the_cluster_is_stopped(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("SILENT_AFTER_S", 0.5), ("LOOK_S", 0.05), ("WATCH_S", 0.05)):
        monkeypatch.setattr(broker, name, seconds)
    bench = Bench(stage, tmp_path, [program("a", WAITS)], left=1)

    async def until_state(state: str) -> None:
        while bench.reports[-1].machines[0].state != state:  # noqa: ASYNC110 - reports come without a signal
            await asyncio.sleep(0.01)

    async with bench.broker():
        process = await bench.start("a")
        pid = int((await line_of(process, "pid")).split()[1])
        await until_state("ready")
        bench.cluster.unchecked.add("left")
        await until_state("silent")
        assert identify(pid) is not None
        bench.cluster.unchecked.clear()
        await until_state("ready")


async def test_services_are_placed_together_on_a_cluster_that_is_new_since_the_broker_before(
    stage: Stage, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path, [program("a", WAITS, num_devices=2), program("b", WAITS)], small=1, large=2)
    async with bench.broker(ends_all=False):
        pass
    bench.cluster.num_devices = {"tiny": 1, "big": 2}
    bench.cluster.reserved.clear()
    async with bench.broker():
        assert bench.cluster.reserved == {"big": 2, "tiny": 1}


async def test_a_broker_starts_though_a_machine_died_with_the_one_before_it(stage: Stage, tmp_path: Path) -> None:
    bench = Bench(stage, tmp_path, [program("a", WAITS), program("b", WAITS)], left=1, right=1, spare=1)
    async with bench.broker(ends_all=False):
        a, b = await bench.start("a"), await bench.start("b")
        gone, stays = [int((await line_of(each, "pid")).split()[1]) for each in (a, b)]
    bench.cluster.reserved.clear()
    bench.cluster.dying.add("left")  # still listed
    async with bench.broker():
        assert "lost" in (await line_of(a, "grpo-tui"))
        assert await a.wait() == remote_process.EXIT_LOST
        await line_of(await bench.start("a", attempt=2), "pid")
        assert bench.cluster.reserved == {"right": 1, "spare": 1}
        assert identify(stays) is not None
        left = read_stat(gone)
        assert left is not None
        os.kill(gone, signal.SIGKILL)
        await until_gone(left.parent)  # its keeper
    await until_gone(stays)


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


PART = ("{number}", "{num_machines}", "{num_devices}", "{address}", "{port}")
SHOWS_PART = "import os, sys; print('part', *sys.argv[-5:], os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
WAITS_AS_PART = f"{SHOWS_PART}; import signal; print('pid', os.getpid(), flush=True); signal.pause()"


def in_parts(code: str, *, num_devices: int = 2) -> Launch:
    """A service `a` that runs a Python program on two machines."""
    return replace(program("a", code, num_devices=num_devices), num_machines=2, part_arguments=PART)


async def pids_of(process: asyncio.subprocess.Process) -> dict[str, int]:
    """The process of each part: `""` of the first, whose lines are as they are."""
    assert process.stdout is not None
    found: dict[str, int] = {}
    while len(found) < 2:
        line = (await process.stdout.readline()).decode()
        assert line
        before, word, pid = line.rpartition("pid ")
        if word:
            found[before.removesuffix(": ")] = int(pid)
    return found


async def test_a_service_on_two_machines_is_one_process_with_one_log_here(stage: Stage, tmp_path: Path) -> None:
    bench = Bench(stage, tmp_path, [in_parts(SHOWS_PART, num_devices=4)], left=2, right=2, spare=2)
    async with bench.broker():
        process = await bench.start("a")
        out, _ = await process.communicate()
        assert process.returncode == 0
        first, second = sorted(out.decode().splitlines(), key=lambda line: line.startswith("right: "))
        port = first.split()[5]
        assert first == f"part 0 2 2 127.0.0.1 {port} 0,1"
        assert second == f"right: part 1 2 2 127.0.0.1 {port} 0,1"
        assert int(port) < 32_768
        assert bench.cluster.reserved == {"left": 2, "right": 2}


@pytest.mark.parametrize("killed", ["", "right"])
async def test_a_killed_part_ends_the_other_and_the_exit_here_is_its_kill(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    monkeypatch.setattr(attempts, "PART_GRACE_S", 0.1)
    bench = Bench(stage, tmp_path, [in_parts(WAITS_AS_PART)], left=1, right=1)
    async with bench.broker():
        process = await bench.start("a")
        pids = await pids_of(process)
        os.kill(pids[killed], signal.SIGKILL)
        other = await line_of(process, f"grpo-tui: {killed or 'left'}: its part exited with code -9")
        assert other.endswith("; the others are ended")
        assert await process.wait() == -signal.SIGKILL
        for pid in pids.values():
            await until_gone(pid)


async def test_the_parts_of_a_lost_machine_start_again_with_those_that_were_ended(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "PART_GRACE_S", 0.1)
    bench = Bench(stage, tmp_path, [in_parts(WAITS_AS_PART)], left=1, right=1, spare=1)
    async with bench.broker():
        process = await bench.start("a")
        pids = await pids_of(process)
        bench.cluster.lose("right")
        assert await process.wait() == remote_process.EXIT_LOST
        await until_gone(pids[""])
        machines = {each.name: each for each in bench.reports[-1].machines}
        assert machines["right"].next == "a is restarted on left and spare, which has 1 free device"
        again = await bench.start("a", attempt=2)
        os.kill(pids["right"], signal.SIGKILL)
        (bench.run_folder / f"right{MACHINE_ENDED}").touch()  # as its agent does when nothing is left
        assert (await pids_of(again)).keys() == {"", "spare"}
        assert list(machines["left"].services) == ["a"]
        bench.cluster.lost.clear()


async def test_a_stop_is_for_the_first_part_which_ends_the_others(stage: Stage, tmp_path: Path) -> None:
    leads = (
        "import pathlib, signal, sys; folder, number = pathlib.Path(sys.argv[1]), sys.argv[-5]\n"
        "def stop(*_):\n    (folder / 'ended').touch()\n    raise SystemExit(0)\n"
        "if number == '0':\n    signal.signal(signal.SIGTERM, stop)\nprint('pid', 1, flush=True)\n"
        "import time\nwhile number == '0' or not (folder / 'ended').exists():\n    time.sleep(0.01)\n"
    )
    service = in_parts(leads)
    service = replace(service, argv=(*service.argv, str(tmp_path)))
    bench = Bench(stage, tmp_path, [service], left=1, right=1)
    async with bench.broker():
        process = await bench.start("a")
        await pids_of(process)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_parts_end_with_the_process_that_stands_for_them(stage: Stage, tmp_path: Path) -> None:
    bench = Bench(stage, tmp_path, [in_parts(WAITS_AS_PART)], left=1, right=1)
    async with bench.broker():
        process = await bench.start("a")
        pids = await pids_of(process)
        process.kill()
        await process.wait()
        for pid in pids.values():
            await until_gone(pid)


async def test_parts_go_on_while_the_broker_is_restarted(stage: Stage, tmp_path: Path) -> None:
    counts = (
        "import sys\nnumber = sys.argv[-5]\nprint('pid', 1, flush=True)\n"
        "for line in open(sys.argv[1] + number):\n    print(line, end='', flush=True)"
    )
    pipes = [tmp_path / f"pipe{number}" for number in range(2)]
    for pipe in pipes:
        os.mkfifo(pipe)
    service = in_parts(counts)
    service = replace(service, argv=(*service.argv, str(tmp_path / "pipe")))
    bench = Bench(stage, tmp_path, [service], left=1, right=1)
    async with bench.broker(ends_all=False):
        process = await bench.start("a")
        await pids_of(process)
        writers = [await asyncio.to_thread(pipe.open, "w") for pipe in pipes]
        for number, writer in enumerate(writers):
            writer.write(f"one {number}\nhalf")
            writer.flush()
        assert process.stdout is not None
        lines = {(await process.stdout.readline()).decode() for _ in writers}
        assert lines == {"one 0\n", "right: one 1\n"}
    for number, writer in enumerate(writers):
        writer.write(f" of {number}\n")
        writer.close()
    bench.cluster.reserved.clear()
    async with bench.broker():
        out, _ = await process.communicate()
        assert sorted(out.decode().splitlines()) == ["half of 0", "right: half of 1"]
        assert process.returncode == 0


def test_the_exit_of_parts_is_that_of_the_cause() -> None:
    lost, killed = remote_process.EXIT_LOST, 137
    assert attempts.exit_code([0, 0], (2,)) == 0
    assert attempts.exit_code([1, 0, killed], (2,)) == killed
    assert attempts.exit_code([1, killed, lost], (2,)) == lost
    assert attempts.exit_code([1, 2], (2,)) == 2
    assert attempts.exit_code([0, 3, 1], (2,)) == 3


def test_lines_of_parts_are_whole_and_a_long_one_does_not_wait_for_its_end() -> None:
    lines = attempts.LogLines("b: ")
    assert lines.take(b"one\ntw", is_last=False) == b"b: one\n"
    assert lines.num_kept == 2
    assert lines.take(b"o\n50%\rhalf", is_last=False) == b"b: two\n"
    assert lines.take(b"", is_last=True) == b"b: 50%\rhalf\n"
    first = attempts.LogLines("")
    assert first.take(b"one\n50%\rhalf", is_last=False) == b"one\n50%\r"
    assert first.num_kept == 4
    long = b"x" * attempts.MAX_LINE_BYTES
    assert lines.take(long, is_last=False) == b"b: " + long


def test_a_chosen_port_is_free_and_none_that_a_connection_or_a_service_gets(tmp_path: Path) -> None:
    taken = free_port()
    few = tmp_path / "range"
    few.write_text(f"{taken + 2}\t60999\n")
    with socket.create_server(("127.0.0.1", taken)):
        found = agent.free_port("127.0.0.1", but=range(20_000, taken), range_file=few)
    assert found in (taken + 1, None) if taken >= 20_000 else found is not None and found != taken


async def test_what_ranks_on_two_machines_report_is_one_report_with_their_machines(
    stage: Stage, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path, [in_parts(WAITS_AS_PART)], left=1, right=1)

    async def until_passed_on(wanted: RanksReport | ServiceReport) -> None:
        while wanted not in bench.passed_on:  # noqa: ASYNC110 - reports come without a signal
            await asyncio.sleep(0.01)

    async with bench.broker():
        process = await bench.start("a")
        pids = await pids_of(process)
        left, right = RankStatus(rank=0, pid=pids[""]), RankStatus(rank=1, pid=pids["right"])
        agents = bench.cluster.agents
        agents["left"].take_report(RanksReport(service="a", attempt=1, ranks=[left]))
        agents["right"].take_report(RanksReport(service="a", attempt=1, ranks=[right]))
        agents["right"].take_report(RanksReport(service="a", attempt=7, ranks=[left]))  # of no attempt here
        placed = [
            left.model_copy(update={"machine": "left"}),
            right.model_copy(update={"machine": "right"}),
        ]
        await until_passed_on(RanksReport(service="a", attempt=1, ranks=placed))
        waits = ServiceReport(service="a", attempt=1, note="waits")
        agents["left"].take_report(waits)
        await until_passed_on(waits)
        agents["right"].take_report(RanksReport(service="a", attempt=1, end="rank 1 was killed"))
        agents["left"].take_report(RanksReport(service="a", attempt=1, end="rank 0 exited with code 1"))
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        await process.wait()
        last = bench.passed_on[-1]
        assert isinstance(last, RanksReport)
        assert last.end == "left: rank 0 exited with code 1; right: rank 1 was killed"
        assert not last.ranks
        assert all(report.attempt == 1 for report in bench.passed_on)


async def test_a_part_of_a_lost_machine_takes_devices_of_one_that_the_run_has_others_of(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "PART_GRACE_S", 0.1)
    services = [replace(in_parts(WAITS_AS_PART), kind="inference"), program("b", WAITS), program("c", WAITS)]
    bench = Bench(stage, tmp_path, services, left=1, right=1, both=3)
    async with bench.broker():
        assert bench.cluster.reserved == {"left": 1, "right": 1, "both": 2}
        process = await bench.start("a")
        pids = await pids_of(process)
        bench.cluster.lose("right")
        assert await process.wait() == remote_process.EXIT_LOST
        again = await bench.start("a", attempt=2)
        assert (await pids_of(again)).keys() == {"", "both"}
        assert bench.cluster.reserved["both"] == 3
        bench.cluster.lost.clear()
        os.kill(pids["right"], signal.SIGKILL)


async def test_a_broker_that_was_killed_between_two_parts_costs_nothing(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = "import os, sys, signal, time\nwhile not os.path.exists(sys.argv[1]):\n    time.sleep(0.01)\n"
    service = in_parts(f"{silent}{SHOWS_PART}")
    service = replace(service, argv=(*service.argv, str(tmp_path / "go")))
    bench = Bench(stage, tmp_path, [service], left=1, right=1)
    began = asyncio.Event()
    original = agent.Agent._start

    async def first_alone(self: agent.Agent, request: wire.Start) -> wire.Started:
        if self is bench.cluster.agents["right"]:
            await asyncio.Event().wait()
        answer = await original(self, request)
        began.set()
        return answer

    monkeypatch.setattr(agent.Agent, "_start", first_alone)
    async with bench.broker(ends_all=False):
        process = await bench.start("a")
        await began.wait()
    monkeypatch.setattr(agent.Agent, "_start", original)
    bench.cluster.reserved.clear()
    async with bench.broker():
        while not bench.cluster.agents["right"]._attempts:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        (tmp_path / "go").touch()
        out, _ = await process.communicate()
        assert process.returncode == 0
        parts = [line.removeprefix("right: ").split() for line in out.decode().splitlines()]
        assert sorted(part[1] for part in parts) == ["0", "1"]
        assert len({part[5] for part in parts}) == 1  # they meet at one port


BESIDE = (
    "import os, sys, signal; print('part', *sys.argv[2:], flush=True); print('pid', os.getpid(), flush=True); "
    "signal.pause()"
)


def beside(folder: Path, *others: str) -> Launch:
    """A service with a part on each machine of others."""
    return replace(
        program("p", BESIDE, num_devices=0),
        beside=others,
        machine_folder=folder,
        machine_arguments=("{machine}", "{folder}"),
        later_arguments=("later",),
    )


async def test_a_service_beside_others_goes_on_when_a_machine_is_lost_and_follows_them_to_another(
    stage: Stage, tmp_path: Path
) -> None:
    folder = tmp_path / "machines"
    trainer = replace(program("a", WAITS), kind="trainer")
    served = replace(program("b", WAITS), kind="inference", ports=(free_port(),))
    bench = Bench(stage, tmp_path, [trainer, served, beside(folder, "a", "b")], left=1, right=1, spare=1)

    def ports_on(machine: str) -> tuple[int, ...]:
        return tuple(PlacedPorts.model_validate_json((folder / machine / HANDOVER_PORTS).read_bytes()).ports)

    async with bench.broker():
        a, b, p = [await bench.start(name) for name in ("a", "b", "p")]
        assert await line_of(p, "part") == f"part left {folder}/left"
        pid = int((await line_of(p, "pid")).split()[1])
        assert await line_of(p, "right: part") == f"right: part right {folder}/right later"
        gone = int((await line_of(p, "right: pid")).split()[-1])
        assert (ports_on("left"), ports_on("right")) == ((), served.ports)
        (folder / "spare").mkdir()
        (folder / "spare" / HANDOVER_IN_STEP).touch()  # of an earlier life, as is an attempt that has ended there
        for asked in (
            wire.Start(launch=wire.LAUNCH.dump_json(bench.launches["p"]).decode(), attempt=1),
            wire.Signal(service="p", attempt=1, how="kill"),
        ):
            await bench.cluster.ask("spare", to_line(asked), timeout_s=DEADLINE_S)

        ends_with_it = (gone, int((await line_of(b, "pid")).split()[1]))
        bench.cluster.lose("right")
        assert "right is lost: p ran there" in await line_of(p, "grpo-tui")
        assert await b.wait() == remote_process.EXIT_LOST
        for number in ends_with_it:  # as its agent does
            os.kill(number, signal.SIGKILL)
        again = await bench.start("b", attempt=2)
        await line_of(again, "pid")
        assert await line_of(p, "spare: part") == f"spare: part spare {folder}/spare later"
        added = int((await line_of(p, "spare: pid")).split()[-1])
        assert not (folder / "spare" / HANDOVER_IN_STEP).exists()
        assert ports_on("spare") == served.ports
        while [*bench.reports[-1].machines[-1].services] != ["b", "p"]:  # noqa: ASYNC110 - reports have no signal
            await asyncio.sleep(0.01)
        assert [*lost_machine(bench).services] == ["a", "p"]
        assert identify(pid) is not None
        p.send_signal(signal.SIGTERM)
        assert await p.wait() == -signal.SIGTERM
        await until_gone(added)
        bench.cluster.lost.clear()
        assert a.returncode is None


async def test_a_part_that_fails_ends_its_service_and_another_broker_follows_all_parts(
    stage: Stage, tmp_path: Path
) -> None:
    bench = Bench(
        stage, tmp_path, [program("a", WAITS), program("b", WAITS), beside(tmp_path / "m", "a", "b")], left=1, right=1
    )
    async with bench.broker(ends_all=False):
        p = await bench.start("p")
        pid = int((await line_of(p, "pid")).split()[1])
        later = int((await line_of(p, "right: pid")).split()[-1])
    bench.cluster.reserved.clear()
    async with bench.broker():
        assert identify(later) is not None
        os.kill(later, signal.SIGKILL)
        assert "right: its part exited with code -9; the others are ended" in await line_of(p, "grpo-tui")
        assert await p.wait() == -signal.SIGKILL
        await until_gone(pid)


async def test_a_service_beside_one_that_was_placed_elsewhere_is_started_again_there(
    stage: Stage, tmp_path: Path
) -> None:
    trainer = replace(program("a", WAITS), kind="trainer")
    bench = Bench(stage, tmp_path, [trainer, program("b", WAITS), beside(tmp_path / "m", "a", "b")], left=1, right=1)
    async with bench.broker() as running:
        p = await bench.start("p")
        assert (await line_of(p, "part")).startswith("part left ")
        pid = int((await line_of(p, "pid")).split()[1])
        running._places["a"], running._places["b"] = running._places["b"], running._places["a"]
        running._follow_to_machines()  # as where ranks of `a` were lost, and all were placed together
        assert await line_of(p, "grpo-tui") == "grpo-tui: a is on another machine now"
        assert await p.wait() == remote_process.EXIT_LOST
        await until_gone(pid)
        again = await bench.start("p", attempt=2)
        assert (await line_of(again, "part")).startswith("part right ")


async def test_an_agent_is_no_child_of_the_actor_that_starts_it_which_kills_its_children_as_it_exits(
    stage: Stage, tmp_path: Path
) -> None:
    run_folder, folder = tmp_path / stage.run, tmp_path / "agent"
    run_folder.mkdir()
    own = str(os.getpid())
    argv = module_command("grpo_tui.supervisor.placement.agent", str(run_folder), str(folder), "node", own)
    starting = await asyncio.create_subprocess_exec(*argv, start_new_session=True)
    async with asyncio.timeout(DEADLINE_S):
        assert await starting.wait() == 0
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(folder / "agent.sock")
                break
            await asyncio.sleep(0.05)
        pid, _ = peer_of(writer.get_extra_info("socket"))
        stat = read_stat(pid)
        assert stat is not None
        assert stat.parent != os.getpid()
        writer.write(to_line(wire.End()))
        assert wire.Done.model_validate_json(await reader.readline()).error is None
        writer.close()
        await until_gone(pid)
        assert not folder.exists()
