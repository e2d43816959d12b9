"""A service on several machines of a cluster, whose parts start, end and are lost together."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from broker_bench import WAITS, Bench, line_of, program, until_gone
from ports import free_port
from stage import Stage

from grpo_engine.wire.run_folder import MACHINE_ENDED
from grpo_engine.wire.supervisor import RanksReport, RankStatus, ServiceReport
from grpo_tui import remote_process
from grpo_tui.services.base import Launch
from grpo_tui.supervisor.placement import agent, attempts, wire

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
        found = agent.free_port("127.0.0.1", but=range(taken), range_file=few)
    assert found in (taken + 1, None)  # none: another process has it


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
