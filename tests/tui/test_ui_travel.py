"""Going back in time on the screen: keys of the line of time, what they change, and what they must not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from screen_fakes import (
    NOW,
    STARTED,
    FakeConnection,
    changed,
    four_services,
    run_status,
    service,
    write_log,
    write_metrics,
)
from textual import events
from textual.message import Message
from textual.pilot import Pilot

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.supervisor import RunState, RunStatus, ServiceState, Snapshot, UsageSampled
from grpo_tui.ui import messages
from grpo_tui.ui.app import GrpoScreen
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.widgets.activity_line import ActivityLine
from grpo_tui.ui.widgets.header import HeaderLine
from grpo_tui.ui.widgets.keys_bar import KeysBar
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.ui.widgets.log_panel import LogLines
from grpo_tui.ui.widgets.services_table import ServicesTable
from grpo_tui.ui.widgets.travel_bar import TravelBar, TravelInput
from grpo_tui.view.travel import Learned, PastRead, clock_at

pytestmark = pytest.mark.slow
CRASH_AT = STARTED + 400


class Shown:
    """An open screen, and ways to wait for it and to read it."""

    def __init__(self, app: GrpoScreen, pilot: Pilot[None], connection: FakeConnection) -> None:
        self.app = app
        self.pilot = pilot
        self.connection = connection

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                await self.pilot.pause(0.01)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def at(self, moment: float) -> None:
        """Wait until the screen shows a moment."""
        await self.until(lambda: self.app.state.travel.until == pytest.approx(moment, abs=0.01))
        await self.until(lambda: clock_at(moment) in self.text(HeaderLine))
        await self.until(lambda: clock_at(moment) in self.text(TravelBar).partition("\n")[0])

    def text(self, part: type[Lines]) -> str:
        assert self.app.shown is not None
        found = self.app.shown.query(part)  # none on a screen that is not composed yet
        return "\n".join(line for each in found for line in each.plain_lines)

    @property
    def log(self) -> str:
        return "\n".join(self.app.main.query_one(LogLines).plain_lines)


def write_timeline(folder: Path, *, size_of_log: int = 4000) -> None:
    """The run came up, vllm fell over after 400 s, and was started again."""
    services = four_services()
    early = [each.model_copy(update={"state": ServiceState.WAITING, "started_at": None}) for each in services]
    usage = {"cpu_percent": {}, "rss_bytes": {}, "gpu_memory_bytes": {}, "gpus": []}
    ends = {"trainer": size_of_log}
    events = [
        Snapshot(number=0, time=STARTED, status=run_status(state=RunState.STARTING, services=early)),
        *(changed(n, STARTED + 5 + n, each) for n, each in enumerate(services)),
        UsageSampled(number=5, time=STARTED + 10, log_bytes={"trainer": 300}, **usage),
        changed(6, CRASH_AT, service("vllm", state=ServiceState.FAILED, why="out of memory")),
        UsageSampled(number=7, time=CRASH_AT, log_bytes=ends, **usage),
        changed(8, CRASH_AT + 50, service("vllm", state=ServiceState.STARTING, attempt=2)),
        changed(9, CRASH_AT + 80, service("vllm", attempt=2, restarts=1)),
    ]
    (folder / "events.jsonl").write_bytes(b"".join(map(to_line, events)))


@asynccontextmanager
async def screen(
    folder: Path, status: RunStatus | None = None, *, size: tuple[int, int] = (120, 36)
) -> AsyncIterator[Shown]:
    """A run on the screen; a status is that of a run that is over."""
    write_metrics(folder, 280)
    write_log(folder, "trainer", num_lines=120)
    connection = FakeConnection()
    if status is None:
        connection.say(Snapshot(number=9, status=run_status()))
    else:
        connection.is_there, connection.stored = False, status
    app = GrpoScreen(folder, connection, clock=lambda: NOW)
    async with app.run_test(size=size) as pilot:
        shown = Shown(app, pilot, connection)
        await shown.until(lambda: app.state.status is not None and app.state.history.last is not None)
        await shown.until(lambda: "trainer" in shown.text(ServicesTable))
        yield shown


async def test_t_goes_back_to_a_crash_and_forth_again(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    async with screen(tmp_path) as shown:
        assert "PAST" not in shown.text(HeaderLine)
        await shown.press("t")
        await shown.at(NOW)
        await shown.press("left_square_bracket", "left_square_bracket", "left_square_bracket")
        await shown.at(CRASH_AT)
        await shown.until(lambda: "out of memory" in shown.text(ServicesTable))
        assert "PAST" in shown.text(HeaderLine)
        assert "✗ failed" in shown.text(ServicesTable)
        assert "vllm ready → failed: out of memory" in shown.text(TravelBar)
        assert "5m25s ago" in shown.text(TravelBar)
        assert "step 166" in " ".join(shown.text(TravelBar).split())
        assert "4000" not in shown.log
        await shown.press("t")
        await shown.until(lambda: "PAST" not in shown.text(HeaderLine))
        await shown.until(lambda: "out of memory" not in shown.text(ServicesTable))
        assert "step 280" in " ".join(shown.text(HeaderLine).split())


async def test_the_log_ends_where_it_ended_then(tmp_path: Path) -> None:
    write_timeline(tmp_path, size_of_log=3000)
    async with screen(tmp_path) as shown:
        await shown.until(lambda: "step 119" in shown.log)
        await shown.press("t", "colon", *"-5m25s", "enter")
        await shown.at(CRASH_AT)
        await shown.until(lambda: "step 119" not in shown.log and "trainer: step" in shown.log)
        written = (tmp_path / "trainer.log").read_bytes()[:3000]
        assert f"step {written.count(b'step')}" in shown.log


async def test_keys_of_the_line_of_time_are_its_own_and_only_while_it_is_there(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    async with screen(tmp_path, size=(80, 24)) as shown:
        shifted = shown.app.main.log_lines
        await shown.press("t")
        await shown.at(NOW)
        await shown.press("comma")
        await shown.at(STARTED + 2.4 * 280)
        await shown.press("home")
        await shown.at(STARTED)
        await shown.press("shift+right", "right")
        await shown.at(STARTED + 11 * 5)
        await shown.press("end")
        await shown.at(NOW)
        assert shifted.scroll_offset.x == 0
        assert "←" in shown.text(KeysBar)
        await shown.press("t")
        await shown.until(lambda: not shown.app.state.travel.is_open)
        await shown.press("right", "comma", "left_square_bracket", "full_stop")
        await shown.until(lambda: shifted.scroll_offset.x > 0)
        assert not shown.app.state.travel.is_open
        assert "restart vLLM" in shown.text(KeysBar)


async def test_the_line_of_time_is_the_only_one_that_offers_the_keys_it_takes(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    async with screen(tmp_path, size=(200, 50)) as shown:
        await shown.press("3")
        await shown.until(lambda: "← step back" in shown.text(KeysBar))
        await shown.press("t")
        await shown.until(lambda: "← → move" in shown.text(KeysBar))
        assert "step back" not in shown.text(KeysBar)


async def test_in_the_past_keys_that_act_refuse_and_say_why(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    async with screen(tmp_path) as shown:
        await shown.press("t", "left")
        await shown.at(NOW - 5)
        for key in ("v", "r", "s", "K", "D"):
            await shown.press(key)
            await shown.until(lambda: "press t to come back to now" in shown.text(ActivityLine))
        assert len(shown.app.screen_stack) == 1
        assert shown.connection.asked == []
        await shown.press("t", "v")
        await shown.until(lambda: shown.connection.asked == [("restart", "vllm")])


async def test_a_time_that_is_none_is_refused_in_words_and_escape_leaves_the_typing_alone(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    async with screen(tmp_path) as shown:
        await shown.press("t")
        await shown.at(NOW)
        await shown.press("colon", *"soon", "enter")
        await shown.until(lambda: "'soon' is no moment" in shown.text(TravelBar))
        await shown.press("colon", *"100")
        await shown.until(lambda: shown.app.main.query_one(TravelInput).value == "100")
        await shown.press("escape")
        await shown.until(lambda: not shown.app.state.travel.is_typing)
        assert shown.app.state.travel.is_open
        assert shown.app.state.travel.moment == NOW
        await shown.press("comma")
        await shown.at(STARTED + 2.4 * 280)


async def test_what_is_typed_in_one_go_is_typed_whole(tmp_path: Path) -> None:
    """As from a paste, or over a line of 200 ms: all keys are there before the first is handled."""
    write_timeline(tmp_path)
    async with screen(tmp_path) as shown:
        await shown.press("t")
        await shown.at(NOW)
        for key, character in ((":", ":"), *((each, each) for each in "100"), ("enter", "\r")):
            shown.app.post_message(events.Key("colon" if key == ":" else key, character))
        await shown.at(STARTED + 240)


async def test_a_click_and_a_drag_on_the_line_go_there(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    async with screen(tmp_path) as shown:
        await shown.press("t")
        await shown.at(NOW)
        bar = shown.app.main.query_one(TravelBar)
        await shown.pilot.click(bar, offset=(1, 1))
        await shown.at(STARTED)
        await shown.pilot.mouse_down(bar, offset=(20, 1))
        await shown.pilot.hover(bar, offset=(60, 1))
        await shown.pilot.mouse_up(bar, offset=(60, 1))
        share = 59 / (bar.size.width - 1)
        await shown.at(STARTED + share * (NOW - STARTED))


async def test_the_line_of_time_goes_along_to_every_screen(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    async with screen(tmp_path) as shown:
        await shown.press("t", "home")
        await shown.at(STARTED)
        await shown.press("5")
        await shown.until(lambda: shown.app.shown is not None and shown.app.shown.PLACE == "metrics")
        await shown.at(STARTED)
        await shown.press("right")
        await shown.at(STARTED + 5)
        await shown.press("t")
        await shown.until(lambda: "PAST" not in shown.text(HeaderLine))


@pytest.mark.parametrize("size", [(80, 24), (120, 36)], ids=["80x24", "120x36"])
async def test_a_run_that_is_over_opens_at_its_last_moment(tmp_path: Path, size: tuple[int, int]) -> None:
    write_timeline(tmp_path)
    over = run_status(state=RunState.FINISHED, ended_at=STARTED + 700, supervisor=None)
    async with screen(tmp_path, over, size=size) as shown:
        await shown.at(STARTED + 700)
        await shown.until(lambda: "the end" in shown.text(TravelBar))
        await shown.press("left")
        await shown.at(STARTED + 695)
        assert "before the end" in shown.text(TravelBar)
        await shown.press("t")
        await shown.until(lambda: "✓ finished" in shown.text(HeaderLine))
        assert "PAST" not in shown.text(HeaderLine)


async def test_a_run_without_a_timeline_says_so_and_travels_in_its_metrics(tmp_path: Path) -> None:
    async with screen(tmp_path) as shown:
        await shown.press("t")
        await shown.until(lambda: "no events.jsonl here" in shown.text(TravelBar))
        await shown.press("colon", *"100", "enter")
        await shown.at(STARTED + 240)
        assert "step 100" in " ".join(shown.text(HeaderLine).split())


async def test_a_run_without_a_timeline_is_told_of_once_and_not_read_over_and_over(tmp_path: Path) -> None:
    async with screen(tmp_path) as shown:
        told: list[messages.TimelineArrived] = []
        shown.app._news._post = noting(told, shown.app.post_message)
        await shown.press("t")
        await shown.until(lambda: "no events.jsonl here" in shown.text(TravelBar))
        await shown.at(NOW)
        for _ in range(20):
            await shown.pilot.pause()
    assert [type(each.change) for each in told] == [Learned, PastRead]


def noting(told: list[messages.TimelineArrived], post: Callable[[Message], bool]) -> Callable[[Message], bool]:
    """`post_message` that keeps what is told of the timeline."""

    def noted(message: Message) -> bool:
        if isinstance(message, messages.TimelineArrived):
            told.append(message)
        return post(message)

    return noted


async def test_the_help_tells_the_keys_and_signs_of_the_line_of_time(tmp_path: Path) -> None:
    async with screen(tmp_path) as shown:
        await shown.press("question_mark")
        await shown.until(lambda: isinstance(shown.app.screen, ReadingScreen))
        page = str(shown.app.screen.query_one("Static").render())
        assert "back to the present" in page
        assert "↻ restart" in page
