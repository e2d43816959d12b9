"""Metrics that are read from the output of real processes: while they run, after they ended, and again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import workplace
from stage import Stage, open_stage, python, until
from workplace import Workplace

from grpo_engine.wire.metrics import MetricsLine
from grpo_tui.services.base import ConsoleMetric
from grpo_tui.supervisor import capped_log
from grpo_tui.supervisor.keeper.client import Keeper
from grpo_tui.supervisor.report import console_metrics
from grpo_tui.supervisor.report.console_metrics import ConsoleMetrics

PRINTER = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
for number, part in enumerate(sys.argv[1:-1]):
    if number: signal.sigwait([signal.SIGUSR1])
    sys.stdout.write(part)
    sys.stdout.flush()
"""
"""Prints its arguments but the last, one at once and each other on SIGUSR1, and ends."""

CONSOLE = {
    "step": ConsoleMetric(pattern=r"^Step (\d+)/\d+$"),
    "train/loss": ConsoleMetric(pattern=r"^\s*Loss: (-?[\d.]+|nan)"),
    "grpo/clipped_fraction": ConsoleMetric(pattern=r"clipped=([\d.]+)%", scale=0.01),
}


def printed(*steps: int) -> str:
    """The output of the stock trainer for some steps."""
    return "".join(
        f"\nStep {n}/9\n  Loss: {n}.5000, Grad norm: 0.1\n    GRPO: ratio=1.0, clipped=50.0%\n" for n in steps
    )


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(console_metrics, "POLL_S", 0.01)
    with open_stage(tmp_path) as stage:
        yield stage


async def start(stage: Stage, *parts: str, attempt: int = 1) -> Keeper:
    return await stage.start(*python(PRINTER, *parts, stage.token), attempt=attempt)


def go_on(keeper: Keeper) -> None:
    """Have the process print its next part."""
    assert keeper.main_pid is not None
    os.kill(keeper.main_pid, signal.SIGUSR1)


def reader(stage: Stage, keeper: Keeper, messages: list[str] | None = None) -> ConsoleMetrics:
    return ConsoleMetrics(
        stage.launch("true", console=CONSOLE),
        attempt=keeper.attempt,
        log_offset=keeper.log_offset,
        run_folder=stage.folder,
        notice=[].append if messages is None else messages.append,
    )


@asynccontextmanager
async def following(stage: Stage, keeper: Keeper, messages: list[str] | None = None) -> AsyncIterator[None]:
    """The supervisor's task that reads the attempt; it is cancelled at the end."""
    task = asyncio.create_task(reader(stage, keeper, messages).run(asyncio.Event()))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def read_to_the_end(stage: Stage, keeper: Keeper, messages: list[str] | None = None) -> None:
    await keeper.exited()
    ended = asyncio.Event()
    ended.set()
    await reader(stage, keeper, messages).run(ended)


def kept(stage: Stage) -> list[tuple[int, dict[str, float]]]:
    """The lines of metrics.jsonl."""
    file = stage.folder / "metrics.jsonl"
    lines = [MetricsLine.model_validate_json(line) for line in file.read_bytes().splitlines()] if file.exists() else []
    return [(line.step, line.metrics) for line in lines]


def complete(*steps: int) -> list[tuple[int, dict[str, float]]]:
    return [(step, {"train/loss": step + 0.5, "grpo/clipped_fraction": 0.5}) for step in steps]


async def test_a_step_is_written_while_the_process_runs_the_next(stage: Stage) -> None:
    keeper = await start(stage, printed(1, 2), printed(3))
    async with following(stage, keeper):
        await until(lambda: kept(stage) == complete(1, 2))
    go_on(keeper)
    await read_to_the_end(stage, keeper)
    assert kept(stage) == complete(1, 2, 3)


@pytest.mark.parametrize(
    "output",
    [
        printed(1).rstrip("\n"),
        "  0%|   |\rStep 1/9\r 10%|#  |\r  Loss: 1.5000\r 50%|## | clipped=50.0%\r100%|###|",
    ],
    ids=["no newline at the end", "carriage returns of a progress bar"],
)
async def test_lines_may_end_otherwise_than_by_a_newline(stage: Stage, output: str) -> None:
    keeper = await start(stage, output)
    await read_to_the_end(stage, keeper)
    assert kept(stage) == complete(1)


async def test_a_line_written_in_two_pieces_is_read_when_complete(stage: Stage) -> None:
    keeper = await start(stage, printed(1) + "Step 2/9\n  Loss: 2.5", "000, Grad norm: 0.1\n  GRPO: clipped=50.0%\n")
    async with following(stage, keeper):
        await until(lambda: kept(stage) == complete(1))
        go_on(keeper)
        await keeper.exited()
        await until(lambda: kept(stage) == complete(1, 2))


async def test_capping_the_log_meanwhile_loses_no_step(stage: Stage) -> None:
    chatter = ("." * 99 + "\n") * 1000
    keeper = await start(stage, printed(1) + chatter + printed(2), printed(3))
    async with following(stage, keeper):
        await until(lambda: kept(stage) == complete(1, 2))
        assert capped_log.cap(stage.folder / "a.log", 70_000) > 0
        go_on(keeper)
        await keeper.exited()
        await until(lambda: kept(stage) == complete(1, 2, 3))
    await read_to_the_end(stage, keeper)
    assert kept(stage) == complete(1, 2, 3)


async def test_steps_wait_in_the_log_until_their_file_can_be_written(stage: Stage) -> None:
    messages: list[str] = []
    file = stage.folder / "metrics.jsonl"
    file.mkdir()
    keeper = await start(stage, printed(1, 2), "")
    async with following(stage, keeper, messages):
        await until(lambda: bool(messages))
        file.rmdir()
        await until(lambda: kept(stage) == complete(1, 2))
    assert len(messages) == 1
    assert "metrics cannot be written: " in messages[0]
    go_on(keeper)
    await keeper.exited()


# --- a whole run ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_metrics_printed_without_a_supervisor_are_kept(place: Workplace) -> None:
    console = r"{ step = '^Step (\d+)', 'train/loss' = 'Loss: ([\d.]+|nan)' }"
    parts = [printed(1, 2), printed(3), printed(4).replace("4.5000", "nan") + printed(5)]
    others = workplace.service("b", workplace.IDLE)
    place.up(workplace.service("t", PRINTER, *parts, "end", console=console), others)
    workplace.until(lambda: place.status().metrics == {"step": 2, "train/loss": 2.5})
    pid = place.pid("t")
    log = place.run_folder() / "t.log"
    place.kill_supervisor()
    for last_step in (3, 5):
        os.kill(pid, signal.SIGUSR1)
        workplace.until(lambda line=f"Step {last_step}/9": line in log.read_text().splitlines())
    place.succeed("restart", "b", "--wait")  # any command starts a supervisor that takes over
    workplace.until(lambda: len(place.grpo("metrics", "--json").stdout.splitlines()) == 5)
    lines = [json.loads(line) for line in place.grpo("metrics", "--json").stdout.splitlines()]
    losses = {line["step"]: line["metrics"].get("train/loss") for line in lines}
    assert losses == {1: 1.5, 2: 2.5, 3: 3.5, 4: None, 5: 5.5}
    assert "train/loss is nan at step 4" in place.log()
