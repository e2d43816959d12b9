"""The screen where all goes wrong around it: broken files, a hanging driver, a flood, a mad daemon, a mad person.

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
from shown_screen import LARGE, SMALL, Shown, shown
from textual.command import CommandPalette
from textual.pilot import Pilot

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.run_folder import ADDRESS_FILE
from grpo_engine.wire.supervisor import Address, Event, Hello, RunStatus, ServiceState, Snapshot
from grpo_tui.ui import news
from grpo_tui.ui.app import GrpoScreen
from grpo_tui.ui.connection import LocalRun
from grpo_tui.ui.keys import EVERYWHERE, PLACES
from grpo_tui.ui.screens import SCREENS
from grpo_tui.ui.widgets.frame.header import HeaderLine
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.ui.widgets.main.gpu_panel import GpuPanel
from grpo_tui.ui.widgets.main.log_panel import LogLines
from grpo_tui.ui.widgets.main.metrics_panel import MetricsPanel
from grpo_tui.ui.widgets.main.services_table import ServicesTable

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
LEAVING_KEYS = {"q", "ctrl+c", "ctrl+q"} | {
    str(number) for number, place in enumerate(PLACES, start=1) if place not in SCREENS
}
UNBOUND_KEYS = (
    "x",
    "Y",
    "7",
    "0",
    "ctrl+a",
    "f5",
    "shift+tab",
    "tab",
    "backspace",
    "delete",
    "enter",
    "escape",
    "ü",
    "漢",
)


async def visit_every_screen(screen: Shown) -> None:
    """Open each, and see that no line is wider than its part."""
    for number, place in enumerate(PLACES, start=1):
        if place not in SCREENS:
            continue
        await screen.pilot.press(str(number))
        await screen.until(lambda place=place: screen.app.shown is not None and place == screen.app.shown.PLACE)
        assert screen.app.shown is not None
        for part in screen.app.shown.query(Lines):
            for line in part.plain_lines if part.size else []:  # one without room keeps what it said before
                assert cell_len(line) <= part.size.width, (place, type(part).__name__, line)
    await screen.pilot.press("1")


# --- machines and runs that are not as usual -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "200x50"])
async def test_a_machine_without_a_driver_is_shown_on_every_screen(tmp_path: Path, size: tuple[int, int]) -> None:
    async with shown(tmp_path, size, without_gpus(), num_steps=30) as screen:
        assert "no NVIDIA driver" in screen.text(GpuPanel)
        await visit_every_screen(screen)


async def test_a_driver_that_hangs_leaves_its_last_figures_marked_as_old(tmp_path: Path) -> None:
    stale = gpu().model_copy(update={"stale_s": 83.0})
    note = "GPU figures are 83 s old: the driver does not answer"
    status = run_status(run=tmp_path.name, gpus=[stale], gpu_note=note)
    async with shown(tmp_path, LARGE, status, num_steps=5) as screen:
        assert "stale 1m23s" in screen.text(GpuPanel)
        await visit_every_screen(screen)


@pytest.mark.parametrize("size", [SMALL, LARGE, (40, 10), (20, 5)], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_eight_gpus_and_twelve_services_find_room(tmp_path: Path, size: tuple[int, int]) -> None:
    states = list(ServiceState)
    services = [
        service(f"environment-{place}", state=states[place % len(states)], restarts=place, ports=[9000 + place],
                gpu_memory_bytes=place * GIB, why="because " * place or None, rss_bytes=1 << place)
        for place in range(11)
    ]  # fmt: skip
    gpus = [gpu(index, other=index << 30) for index in range(8)]
    gpus[3] = gpus[3].model_copy(
        update={"memory_used_bytes": None, "memory_total_bytes": None, "utilization_percent": None, "by_service": {}}
    )
    status = run_status(run=tmp_path.name, services=[*services, service("trainer")], gpus=gpus)
    async with opened_on(tmp_path, size, status) as screen:
        if size[1] >= 24:
            await screen.until(lambda: "trainer" in screen.text(ServicesTable))
        await visit_every_screen(screen)


@asynccontextmanager
async def opened_on(run_folder: Path, size: tuple[int, int], status: RunStatus) -> AsyncIterator[Shown]:
    """A screen on whatever the folder holds."""
    connection = FakeConnection()
    connection.say(Snapshot(number=1, status=status))
    app = GrpoScreen(run_folder, connection, clock=lambda: NOW)
    async with app.run_test(size=size) as pilot:
        screen = Shown(app, pilot, connection)
        await screen.until(lambda: app.shown is not None and app.shown.is_mounted and app.state.status is not None)
        yield screen


# --- files that are not as they should be ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "200x50"])
async def test_a_log_in_any_script_and_in_none_is_shown(tmp_path: Path, size: tuple[int, int]) -> None:
    junk = bytes(range(256)) + b"\xff\xfe\xc3\x28 \xf0\x9f\x98 half a character"
    text = "\n".join(UNICODE).encode("utf-8", "surrogatepass") + b"\n" + junk + b"\nthe last line\n"
    (tmp_path / "trainer.log").write_bytes(text)
    async with opened_on(tmp_path, size, run_status(run=tmp_path.name)) as screen:
        await screen.until(lambda: "the last line" in screen.text(LogLines))
        await screen.pilot.press("z")
        await screen.until(lambda: "[bold]not markup[/bold]" in screen.text(LogLines))
        assert "奖励平均值 0.87" in screen.text(LogLines)
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
        await screen.until(lambda: "step" in screen.text(HeaderLine))
        await visit_every_screen(screen)


@pytest.mark.parametrize("place", [place for place in PLACES if place in SCREENS])
async def test_a_run_that_is_deleted_under_any_screen_is_survived(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_groups(folder, [healthy_group(step=step) for step in (1, 2, 3)])
    async with shown(folder, LARGE, num_steps=5) as screen:
        await screen.pilot.press(str(PLACES.index(place) + 1))
        await screen.until(lambda: screen.app.shown is not None and place == screen.app.shown.PLACE)
        shutil.rmtree(folder)
        await screen.until(lambda: screen.app.state.history.last is None)
        await screen.pilot.press("1")
        await screen.until(lambda: "no step yet" in screen.text(MetricsPanel))


async def test_keys_are_answered_while_a_log_grows_by_megabytes_between_two_looks(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        block = b"".join(
            b"INFO step %07d loss -0.021 reward 0.87 grad_norm 0.41 tokens/s 11873 ratio 1.003 sync 0.004s\n" % number
            for number in range(30_000)
        )
        for turn in range(4):
            with (tmp_path / "trainer.log").open("ab") as file:
                file.write(block + b"the end of block %d\n" % turn)
            for key, note in (("f", "paused"), ("f", "following")):
                await screen.pilot.press(key)
                await screen.until(lambda note=note: note in screen.app.main.query_one("LogTitle").plain_lines[0])
            await screen.until(lambda turn=turn: f"the end of block {turn}" in screen.text(LogLines))
        assert any("skipped, too fast" in line for line in screen.app.state.log.lines)
        await screen.pilot.press("up")
        await screen.until(lambda: "env: step 39" in screen.text(LogLines))


# --- a daemon that is not as it should be ----------------------------------------------------------------------------


async def test_events_in_the_wrong_order_never_lead_back(tmp_path: Path) -> None:
    folder = unpacked(RECORDED[0], tmp_path / "logs")
    opening, *rest = events_of(folder)
    events = [each for each in rest if isinstance(each, Event)]
    shuffled = [*events, *events]
    random.Random(SEED).shuffle(shuffled)
    connection = FakeConnection()
    connection.say(changed(10**6, NOW, service("nobody")), opening, *shuffled, events[-1])
    app = GrpoScreen(folder, connection, clock=lambda: NOW)
    async with app.run_test(size=LARGE) as pilot:
        screen = Shown(app, pilot, connection)
        await screen.until(lambda: app.state.last_number == max(event.number for event in events))
        await visit_every_screen(screen)
        assert [each.name for each in app.state.services] == [each.name for each in opening.status.services]


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="grpo-test-") as name:
        yield Path(name)


async def test_a_daemon_that_says_nonsense_is_left_and_asked_again(
    tmp_path: Path, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "RECONNECT_S", 0.01)
    hello = to_line(Hello(run="run", pid=1))
    sense = to_line(Snapshot(number=1, status=run_status(run="run")))
    turns = iter([b"\x00\xff\n", b"", b"x" * 100_000, hello + b"{}\n", hello + b'{"type":"snapshot"}\n', hello + sense])
    folder = tmp_path / "run"
    folder.mkdir()

    is_over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = next(turns, None)
        if said is None:
            writer.close()
            return
        writer.write(said)
        await writer.drain()
        is_sense = said.endswith(sense)
        if is_sense:
            await reader.read()  # until the screen is closed
        writer.close()
        if is_sense:
            await writer.wait_closed()
            is_over.set()

    path = socket_folder / "s"
    address = to_line(Address(pid=1, socket=str(path)))
    server = await asyncio.start_unix_server(answer, path)
    async with server:
        (folder / ADDRESS_FILE).write_bytes(address)
        app = GrpoScreen(folder, LocalRun(folder), clock=lambda: NOW)
        async with app.run_test(size=SMALL) as pilot:
            screen = Shown(app, pilot, FakeConnection())
            await screen.until(lambda: app.state.status is not None)
            await screen.until(lambda: "vllm" in screen.text(ServicesTable))
        await is_over.wait()


# --- a person who is not as they should be ---------------------------------------------------------------------------


def all_keys() -> list[str]:
    """Every key of every screen but those that leave, twice, and some that mean nothing."""
    bound = {part for keys in (EVERYWHERE, *(screen.KEYS for screen in SCREENS.values()))
             for key in keys for part in key.key.split(",")}  # fmt: skip
    return [*sorted(bound - LEAVING_KEYS) * 2, *UNBOUND_KEYS]


@pytest.mark.parametrize("size", [SMALL, LARGE, (60, 12)], ids=lambda size: f"{size[0]}x{size[1]}")
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
