"""Metrics read from what real processes print, through real keepers: while they run, after they ended, and again."""

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
from workplace import Workplace, open_workplace

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
    """What the stock trainer prints of some steps, with all lines ended."""
    return "".join(
        f"\nStep {n}/9\n  Loss: {n}.5000, Grad norm: 0.1\n    GRPO: ratio=1.0, clipped=50.0%\n" for n in steps
    )


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(console_metrics, "POLL_S", 0.01)
    with open_stage(tmp_path) as stage:
        yield stage


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path) as place:
        yield place


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
    """A daemon's task that reads the attempt, and is cancelled with the daemon at the end."""
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


def whole(*steps: int) -> list[tuple[int, dict[str, float]]]:
    return [(step, {"train/loss": step + 0.5, "grpo/clipped_fraction": 0.5}) for step in steps]


async def test_a_step_is_written_while_the_process_runs_the_next(stage: Stage) -> None:
    keeper = await start(stage, printed(1, 2), printed(3))
    async with following(stage, keeper):
        await until(lambda: kept(stage) == whole(1, 2))
    go_on(keeper)
    await read_to_the_end(stage, keeper)
    assert kept(stage) == whole(1, 2, 3)


async def test_a_last_line_without_newline_counts(stage: Stage) -> None:
    keeper = await start(stage, printed(1).rstrip("\n"))
    await read_to_the_end(stage, keeper)
    assert kept(stage) == whole(1)


async def test_a_line_written_in_two_pieces_is_read_when_complete(stage: Stage) -> None:
    keeper = await start(stage, printed(1) + "Step 2/9\n  Loss: 2.5", "000, Grad norm: 0.1\n  GRPO: clipped=50.0%\n")
    async with following(stage, keeper):
        await until(lambda: kept(stage) == whole(1))
        go_on(keeper)
        await keeper.exited()
        await until(lambda: kept(stage) == whole(1, 2))


async def test_a_progress_bar_ends_its_lines_with_carriage_returns(stage: Stage) -> None:
    keeper = await start(stage, "  0%|   |\rStep 1/9\r 10%|#  |\r  Loss: 1.5000\r 50%|## | clipped=50.0%\r100%|###|")
    await read_to_the_end(stage, keeper)
    assert kept(stage) == whole(1)


async def test_a_supervisor_that_takes_over_neither_repeats_nor_omits_a_step(stage: Stage) -> None:
    keeper = await start(stage, printed(1, 2, 3), printed(4), printed(5))
    async with following(stage, keeper):
        await until(lambda: kept(stage) == whole(1, 2, 3))
    go_on(keeper)
    await stage.says("Step 4/9")
    async with following(stage, keeper):
        await until(lambda: kept(stage) == whole(1, 2, 3, 4))
    go_on(keeper)
    await read_to_the_end(stage, keeper)
    assert kept(stage) == whole(1, 2, 3, 4, 5)


async def test_an_attempt_that_was_read_to_its_end_adds_nothing_when_it_is_read_again(stage: Stage) -> None:
    keeper = await start(stage, printed(1, 2))
    await read_to_the_end(stage, keeper)
    await read_to_the_end(stage, keeper)
    assert kept(stage) == whole(1, 2)


async def test_steps_of_a_restarted_process_that_counts_from_1_are_written_as_counted(stage: Stage) -> None:
    first = await start(stage, printed(1, 2, 3))
    await read_to_the_end(stage, first)
    second = await start(stage, printed(1, 2), printed(3), attempt=2)
    async with following(stage, second):
        await until(lambda: kept(stage) == whole(1, 2, 3, 1, 2))
    go_on(second)
    await read_to_the_end(stage, second)
    assert kept(stage) == whole(1, 2, 3, 1, 2, 3)


async def test_nan_is_left_out_and_reported_once_while_the_process_runs(stage: Stage) -> None:
    messages: list[str] = []
    nan = "\nStep {0}/9\n  Loss: nan, Grad norm: nan\n    GRPO: clipped=50.0%\n"
    keeper = await start(stage, printed(1) + nan.format(2) + nan.format(3), "")
    async with following(stage, keeper, messages):
        await until(lambda: kept(stage) == [*whole(1), *((n, {"grpo/clipped_fraction": 0.5}) for n in (2, 3))])
    assert messages == ["train/loss is nan at step 2: left out of the metrics (reported once)"]
    go_on(keeper)
    await keeper.exited()


async def test_capping_the_log_meanwhile_loses_no_step(stage: Stage) -> None:
    chatter = ("." * 99 + "\n") * 1000
    keeper = await start(stage, printed(1) + chatter + printed(2), printed(3))
    async with following(stage, keeper):
        await until(lambda: kept(stage) == whole(1, 2))
        assert capped_log.cap(stage.folder / "a.log", 70_000) > 0
        go_on(keeper)
        await keeper.exited()
        await until(lambda: kept(stage) == whole(1, 2, 3))
    await read_to_the_end(stage, keeper)
    assert kept(stage) == whole(1, 2, 3)


async def test_steps_wait_in_the_log_until_their_file_can_be_written(stage: Stage) -> None:
    messages: list[str] = []
    file = stage.folder / "metrics.jsonl"
    file.mkdir()
    keeper = await start(stage, printed(1, 2), "")
    async with following(stage, keeper, messages):
        await until(lambda: bool(messages))
        file.rmdir()
        await until(lambda: kept(stage) == whole(1, 2))
    assert len(messages) == 1
    assert "metrics cannot be written: " in messages[0]
    go_on(keeper)
    await keeper.exited()


# --- a whole run ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_metrics_printed_without_a_supervisor_are_kept(place: Workplace) -> None:
    console = r"{ step = '^Step (\d+)', 'train/loss' = 'Loss: ([\d.]+|nan)' }"
    parts = [printed(1, 2), printed(3), printed(4).replace("4.5000", "nan") + printed(5)]
    others = workplace.service("b", workplace.POLITE)
    place.profile(workplace.service("t", PRINTER, *parts, "end", console=console), others)
    place.up()
    workplace.until(lambda: place.status().metrics == {"step": 2, "train/loss": 2.5})
    pid = place.pid("t")
    log = place.run_folder() / "t.log"
    place.lose_daemon()
    for last_step in (3, 5):
        os.kill(pid, signal.SIGUSR1)
        workplace.until(lambda line=f"Step {last_step}/9": line in log.read_text().splitlines())
    assert place.grpo("restart", "b", "--wait").returncode == 0  # any command brings a daemon that takes over
    workplace.until(lambda: len(place.grpo("metrics", "--json").stdout.splitlines()) == 5)
    lines = [json.loads(line) for line in place.grpo("metrics", "--json").stdout.splitlines()]
    assert [(line["step"], line["metrics"].get("train/loss")) for line in lines] == [
        (1, 1.5),
        (2, 2.5),
        (3, 3.5),
        (4, None),
        (5, 5.5),
    ]
    assert "train/loss is nan at step 4" in (place.run_folder() / "supervisor.log").read_text()
    assert place.grpo("down").returncode == 0
