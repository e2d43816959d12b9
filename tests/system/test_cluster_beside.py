"""Services that are placed beside others, on each machine of theirs."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

from broker_bench import DEADLINE_S, WAITS, Bench, line_of, lost_machine, program, until_gone
from ports import free_port
from stage import Stage

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.handover import PlacedPorts
from grpo_engine.wire.run_folder import HANDOVER_IN_STEP, HANDOVER_PORTS
from grpo_tui import remote_process
from grpo_tui.services.base import Launch
from grpo_tui.supervisor.keeper.proc import identify
from grpo_tui.supervisor.placement import wire

# In one piece: a line of another part between the two would be taken for what a test waits past.
BESIDE = (
    "import os, sys, signal; print('part', *sys.argv[2:], end=f'\\npid {os.getpid()}\\n', flush=True); signal.pause()"
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
