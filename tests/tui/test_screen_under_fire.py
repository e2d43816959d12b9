"""The screen under faults: damaged files, a hanging driver, fast logs, a faulty supervisor, random keys.

An exception anywhere in the app ends the test: `run_test` raises it again. The keys of the last test come from a seed;
`GRPO_FUZZ_S=60 GRPO_FUZZ_SEED=7 pytest -k random_keys` presses for a minute.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from alignment_fakes import healthy_group, write_groups
from recorded_runs import RECORDED, events_of, unpacked
from rich.cells import cell_len
from screen_fakes import GIB, NOW, FakeConnection, changed, gpu, metrics_line, run_status, service, without_gpus
from shown_screen import LARGE, SMALL, Shown, open_app, shown
from textual.command import CommandPalette
from textual.pilot import Pilot

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.run_folder import ADDRESS_FILE
from grpo_engine.wire.supervisor import Address, Event, Hello, RunStatus, ServiceState, Snapshot
from grpo_tui.ui.connection import LocalRun
from grpo_tui.ui.glyphs import SERVICE_GLYPHS
from grpo_tui.ui.keys import EVERYWHERE
from grpo_tui.ui.screens import SCREENS
from grpo_tui.ui.widgets.frame.header import HeaderLine
from grpo_tui.ui.widgets.main.gpu_panel import GpuPanel
from grpo_tui.ui.widgets.main.log_panel import LogLines, LogTitle
from grpo_tui.ui.widgets.main.metrics_panel import MetricsPanel
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.view.state import ViewState, reduce

pytestmark = pytest.mark.slow
UNICODE = [
    "奖励平均值 0.87 步骤 39 已完成",
    "e\u0301e\u0301 combining, \u200bzero width, \u202eright to left\u202c, שלום עולם, مرحبا",
    "👩‍👩‍👧‍👦 🏳️‍🌈 emoji of several characters, \ufeff and a byte order mark",
    "\x1b[31mred\x1b[0m \x1b[38;2;1;2;3mtrue\x1b[0m \x1b[999mno such colour\x1b[ \x1b]0;title\x07 bell\x07 \x9b31m",
    "[bold]not markup[/bold] [/] [@click=app.detach]nor a link[/]",
    "a\ttab\tand a very long line " + "0123456789" * 800,
]
SEED = int(os.environ.get("GRPO_FUZZ_SEED", "1"))
FUZZ_S = float(os.environ.get("GRPO_FUZZ_S", "0"))
NUM_KEYS = 40
"""Of each size, where no time is set."""
LEAVING_KEYS = {"q", "ctrl+c", "ctrl+q"}
UNBOUND_KEYS = [*"xY70ü漢", "ctrl+a", "f5", "shift+tab", "tab", "backspace", "delete", "enter", "escape"]


async def visit_every_screen(screen: Shown) -> None:
    """Open each, and check that no line is wider than its part."""
    for place in SCREENS:
        await screen.go_to(place)
        await screen.check_widths()
    await screen.go_to("run")


# --- unusual machines ------------------------------------------------------------------------------------------------


async def test_a_machine_without_a_driver_is_shown_on_every_screen(tmp_path: Path) -> None:
    async with shown(tmp_path, LARGE, without_gpus(), num_steps=30) as screen:
        for size in (LARGE, SMALL):
            await screen.resize(size)
            await screen.until_text(GpuPanel, "no NVIDIA driver")
            await screen.until_text(GpuPanel, "vllm 9.2G")
            assert "gpu" not in screen.lines(ServicesTable)[0]
            await screen.check_widths()
        await visit_every_screen(screen)


@pytest.mark.extended("test_ui_arrangement; the accepted pictures")
async def test_eight_gpus_and_twelve_services_fit_at_every_size(tmp_path: Path) -> None:
    states, why = list(ServiceState), "exit code 3: RuntimeError: CUDA error while gathering 漢字 on rank 3 of 8; " * 3
    names = ["模型服务器", "évaluation-très-longue-nom", *(f"worker-{place}" for place in range(9))]
    services = [
        service(name, kind="command", state=states[place % len(states)], restarts=place, ports=[9000 + place],
                gpu_memory_bytes=place * GIB, why=why if place % 2 else None, rss_bytes=1 << place)
        for place, name in enumerate(names)
    ]  # fmt: skip
    gpus = [gpu(index, other=index << 30) for index in range(8)]
    gpus[3] = gpus[3].model_copy(
        update={"memory_used_bytes": None, "memory_total_bytes": None, "utilization_percent": None, "by_service": {}}
    )
    status = run_status(run=tmp_path.name, services=[*services, service("trainer")], gpus=gpus)
    async with opened_on(tmp_path, SMALL, status) as screen:
        for size in (LARGE, SMALL, (40, 10), (20, 5)):
            await screen.resize(size)
            await screen.check_widths()
            if size[1] >= 10:
                rows = screen.lines(ServicesTable)[1:]
                signs = {
                    cell_len(row.partition(sign)[0]) for row in rows for sign in SERVICE_GLYPHS.values() if sign in row
                }
                assert len(signs) == 1, rows
            if size[1] >= 24:
                for name in (names[0], "trainer"):
                    screen.app.select(name)
                    await screen.until_text(ServicesTable, name)
                assert screen.part(LogLines).size.height >= 4
            if size in (SMALL, (40, 10)):
                await visit_every_screen(screen)


@asynccontextmanager
async def opened_on(run_folder: Path, size: tuple[int, int], status: RunStatus) -> AsyncIterator[Shown]:
    """Open a screen on whatever the folder holds."""
    connection = FakeConnection()
    connection.send(Snapshot(number=1, status=status))
    async with open_app(run_folder, connection, size) as screen:
        await screen.until_place("run")
        await screen.until(lambda: screen.app.state.status is not None)
        yield screen


# --- damaged files ---------------------------------------------------------------------------------------------------


async def test_a_log_in_any_script_and_without_an_encoding_is_shown(tmp_path: Path) -> None:
    junk = bytes(range(256)) + b"\xff\xfe\xc3\x28 \xf0\x9f\x98 half a character"
    text = "\n".join(UNICODE).encode("utf-8", "surrogatepass") + b"\n" + junk + b"\nthe last line\n"
    (tmp_path / "trainer.log").write_bytes(text)
    async with opened_on(tmp_path, SMALL, run_status(run=tmp_path.name)) as screen:
        await screen.until_text(LogLines, "the last line")
        await screen.press("z")
        await screen.until_text(LogLines, "[bold]not markup[/bold]")
        assert "奖励平均值 0.87" in screen.text(LogLines)
        await screen.resize(LARGE)
        await visit_every_screen(screen)


async def test_metrics_with_half_a_line_a_nan_and_steps_out_of_order_are_shown(tmp_path: Path) -> None:
    lines = [metrics_line(step).model_dump_json() for step in (1, 2, 5, 3, 3, 4)]
    odd = metrics_line(6).model_dump_json().replace('"reward/mean":', '"reward/mean":NaN,"odd/one":')
    infinite = metrics_line(7).model_dump_json().replace('"train/loss":', '"train/loss":-Infinity,"odd/two":')
    rotten = ["", "null", "[]", '{"time": "now"}', "\x00\x00\x00", '{"time": 1e400, "step": 1}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, odd, infinite, *rotten, '{"time": 17, "st']))
    (tmp_path / "rollouts.jsonl").write_text("\n".join([*rotten, '{"time": 1.0, "step": 3, "prom']))
    (tmp_path / "events.jsonl").write_text("\n".join([*rotten, '{"type":"snapshot","number":']))
    async with opened_on(tmp_path, LARGE, run_status(run=tmp_path.name)) as screen:
        await screen.until(lambda: screen.app.state.num_bad_metric_lines >= 4)
        await screen.until_text(HeaderLine, "step")
        await visit_every_screen(screen)


async def test_a_run_that_is_deleted_under_any_screen_is_survived(tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    folder.mkdir()
    write_groups(folder, [healthy_group(step=step) for step in (1, 2, 3)])
    async with shown(folder, LARGE, num_steps=5) as screen:
        shutil.copytree(folder, copy)
        for place in SCREENS:
            await screen.go_to(place)
            shutil.rmtree(folder)
            await screen.until(lambda: screen.app.state.history.last is None and not screen.app.state.log.lines)
            shutil.copytree(copy, folder)
            await screen.until(lambda: screen.app.state.history.last is not None)
        await screen.go_to("run")
        shutil.rmtree(folder)
        await screen.until_text(MetricsPanel, "no step yet")


async def test_keys_work_while_a_log_grows_by_megabytes_between_two_reads(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        block = b"".join(
            b"INFO step %07d loss -0.021 reward 0.87 grad_norm 0.41 tokens/s 11873 ratio 1.003 sync 0.004s\n" % number
            for number in range(30_000)
        )
        for turn in range(2):
            with (tmp_path / "trainer.log").open("ab") as file:
                file.write(block + b"the end of block %d\n" % turn)
            for key, note in (("f", "paused"), ("f", "following")):
                await screen.press(key)
                await screen.until_text(LogTitle, note)
            await screen.until_text(LogLines, f"the end of block {turn}")
        assert any("skipped, too fast" in line for line in screen.app.state.log.lines)
        await screen.press("up")
        await screen.until_text(LogLines, "env: step 39")


# --- a supervisor that sends faulty data ----------------------------------------------------------------------------


def test_events_in_the_wrong_order_never_restore_an_older_state(tmp_path: Path) -> None:
    opening, *rest = events_of(unpacked(RECORDED[0], tmp_path / "logs"))
    events = [each for each in rest if isinstance(each, Event)]
    shuffled = [*events, *events]
    random.Random(SEED).shuffle(shuffled)
    state = ViewState(run_folder=tmp_path, now=NOW)
    for each in (changed(10**6, NOW, service("nobody")), opening, *shuffled, events[-1]):
        state = reduce(state, each)
    assert state.last_number == max(event.number for event in events)
    assert [each.name for each in state.services] == [each.name for each in opening.status.services]


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="grpo-test-") as name:
        yield Path(name)


async def test_the_screen_reconnects_to_a_supervisor_that_sends_garbage(tmp_path: Path, socket_folder: Path) -> None:
    hello = to_line(Hello(run="run", pid=1))
    valid = to_line(Snapshot(number=1, status=run_status(run="run")))
    sent = iter([b"\x00\xff\n", b"", b"x" * 100_000, hello + b"{}\n", hello + b'{"type":"snapshot"}\n', hello + valid])
    folder = tmp_path / "run"
    folder.mkdir()
    is_over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = next(sent, b"")
        writer.write(data)
        await writer.drain()
        if data.endswith(valid):
            await reader.read()  # until the screen is closed
        writer.close()
        if data.endswith(valid):
            await writer.wait_closed()
            is_over.set()

    path = socket_folder / "s"
    address = to_line(Address(pid=1, socket=str(path)))
    server = await asyncio.start_unix_server(answer, path)
    async with server:
        (folder / ADDRESS_FILE).write_bytes(address)
        async with open_app(folder, LocalRun(folder)) as screen:
            await screen.until(lambda: screen.app.state.status is not None)
            await screen.until_text(ServicesTable, "vllm")
        await is_over.wait()


# --- random keys -----------------------------------------------------------------------------------------------------


def all_keys() -> list[str]:
    """Every key of every screen but those that leave, twice, and some that mean nothing."""
    bound = {part for keys in (EVERYWHERE, *(screen.KEYS for screen in SCREENS.values()))
             for key in keys for part in key.key.split(",")}  # fmt: skip
    return [*sorted(bound - LEAVING_KEYS) * 2, *UNBOUND_KEYS]


@pytest.mark.parametrize(
    "size",
    [SMALL, *(pytest.param(size, marks=pytest.mark.extended("the same at 80x24")) for size in (LARGE, (60, 12)))],
    ids=lambda size: f"{size[0]}x{size[1]}",
)
async def test_random_keys_on_all_screens_break_nothing(
    tmp_path: Path, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGER", "true")
    chosen = random.Random(f"{SEED} {size}")
    write_groups(tmp_path, [healthy_group(step=step) for step in range(1, 7)])
    recorded = unpacked(RECORDED[0], tmp_path / "recorded")
    shutil.copy(recorded / "events.jsonl", tmp_path / "events.jsonl")
    pressed: list[str] = []
    keys = all_keys()
    until = time.monotonic() + FUZZ_S / 3

    def goes_on() -> bool:
        return time.monotonic() < until if FUZZ_S else len(pressed) < NUM_KEYS

    async with shown(tmp_path, size, num_steps=40) as screen:
        try:
            while goes_on():
                await press_any(screen.pilot, chosen, keys, pressed, size)
        except BaseException as error:
            error.add_note(f"GRPO_FUZZ_SEED={SEED}, {len(pressed)} keys, the last of them {pressed[-30:]}")
            raise
        assert screen.app.is_running, pressed[-30:]


async def press_any(
    pilot: Pilot[None], chosen: random.Random, keys: Sequence[str], pressed: list[str], size: tuple[int, int]
) -> None:
    """A key, now and then another size; what would leave by the palette is not chosen there."""
    key = chosen.choice(keys)
    if isinstance(pilot.app.screen, CommandPalette) and key == "enter":
        key = "escape"
    pressed.append(key)
    if chosen.random() < 0.02:
        await pilot.resize_terminal(*chosen.choice([size, (30, 8), (132, 40)]))
    await pilot.press(key)
