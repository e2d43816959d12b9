"""Machines of a cluster that are lost or do not answer: what is said of them, and where their services go on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from broker_bench import DEADLINE_S, WAITS, Bench, line_of, lost_machine, program, until_gone
from stage import Stage, until

from grpo_engine.wire.run_folder import MACHINE_ENDED
from grpo_engine.wire.supervisor import MachineStatus
from grpo_tui import remote_process
from grpo_tui.supervisor.keeper.proc import identify, read_stat
from grpo_tui.supervisor.placement import agent, fences, watching
from grpo_tui.supervisor.placement.agent import Agent


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
    later_s = 0.0
    clock = SimpleNamespace(**vars(time) | {"time": lambda: unix_time() + later_s})
    unix_time = time.time
    monkeypatch.setattr(fences, "time", clock)
    bench = Bench(stage, tmp_path, [program("a", WAITS)], left=1, right=1)
    async with bench.broker():
        process = await bench.start("a")
        gone = int((await line_of(process, "pid")).split()[1])
        bench.cluster.lose("left")
        assert await process.wait() == remote_process.EXIT_LOST
    assert (bench.run_folder / "machines.json").exists()
    async with bench.broker():  # of the run that is resumed at once
        again = await bench.start("a", attempt=2)
        await until(lambda: "a may still run on left: it is started when its agent has ended it" in caplog.text)
        later_s = fences.FENCE_S
        await line_of(again, "pid")
        os.kill(gone, signal.SIGKILL)
    assert not (bench.run_folder / "machines.json").exists()
    await until(lambda: not stage.survivors())  # the keeper of the one that was killed


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
        monkeypatch.setattr(watching, name, seconds)
    bench = Bench(stage, tmp_path, [program("a", WAITS), program("b", WAITS)], left=1, right=1)

    def machine(name: str) -> MachineStatus:
        return next(each for each in bench.reports[-1].machines if each.name == name)

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
        monkeypatch.setattr(watching, name, seconds)
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
