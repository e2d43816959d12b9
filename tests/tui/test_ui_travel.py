"""Going back in time on the screen: keys of the line of time, what they change, and what they must not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from screen_fakes import (
    NOW,
    STARTED,
    run_status,
)
from shown_screen import CRASH_AT, past_screen, write_timeline
from textual import events
from textual.message import Message

from grpo_engine.wire.supervisor import RunState
from grpo_tui.ui import messages
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.widgets.frame.activity_line import ActivityLine
from grpo_tui.ui.widgets.frame.header import HeaderLine
from grpo_tui.ui.widgets.frame.keys_bar import KeysBar
from grpo_tui.ui.widgets.frame.travel_bar import TravelBar, TravelInput
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.view.timeline.state import Learned, PastRead

pytestmark = pytest.mark.slow


async def test_t_goes_back_to_a_crash_and_forth_again(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    async with past_screen(tmp_path) as shown:
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
    async with past_screen(tmp_path) as shown:
        await shown.until(lambda: "step 119" in shown.log)
        await shown.press("t", "colon", *"-5m25s", "enter")
        await shown.at(CRASH_AT)
        await shown.until(lambda: "step 119" not in shown.log and "trainer: step" in shown.log)
        written = (tmp_path / "trainer.log").read_bytes()[:3000]
        assert f"step {written.count(b'step')}" in shown.log


async def test_keys_of_the_line_of_time_are_its_own_and_only_while_it_is_there(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    async with past_screen(tmp_path, size=(80, 24)) as shown:
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
    async with past_screen(tmp_path, size=(200, 50)) as shown:
        await shown.press("3")
        await shown.until(lambda: "← step back" in shown.text(KeysBar))
        await shown.press("t")
        await shown.until(lambda: "← → move" in shown.text(KeysBar))
        assert "step back" not in shown.text(KeysBar)


async def test_in_the_past_keys_that_act_refuse_and_say_why(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    async with past_screen(tmp_path) as shown:
        await shown.press("t", "left")
        await shown.at(NOW - 5)
        for key in ("v", "r", "s", "K", "D"):
            await shown.press(key)
            await shown.until(lambda: "press t for the present" in shown.text(ActivityLine))
        assert len(shown.app.screen_stack) == 1
        assert shown.connection.asked == []
        await shown.press("t", "v")
        await shown.until(lambda: shown.connection.asked == [("restart", "vllm")])


async def test_a_time_that_is_none_is_refused_in_words_and_escape_leaves_the_typing_alone(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    async with past_screen(tmp_path) as shown:
        await shown.press("t")
        await shown.at(NOW)
        await shown.press("colon", *"soon", "enter")
        await shown.until(lambda: "'soon' is not a time" in shown.text(TravelBar))
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
    async with past_screen(tmp_path) as shown:
        await shown.press("t")
        await shown.at(NOW)
        for key, character in ((":", ":"), *((each, each) for each in "100"), ("enter", "\r")):
            shown.app.post_message(events.Key("colon" if key == ":" else key, character))
        await shown.at(STARTED + 240)


async def test_a_click_and_a_drag_on_the_line_go_there(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    async with past_screen(tmp_path) as shown:
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
    async with past_screen(tmp_path) as shown:
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
    async with past_screen(tmp_path, over, size=size) as shown:
        await shown.at(STARTED + 700)
        await shown.until(lambda: "the end" in shown.text(TravelBar))
        await shown.press("left")
        await shown.at(STARTED + 695)
        assert "before the end" in shown.text(TravelBar)
        await shown.press("t")
        await shown.until(lambda: "✓ finished" in shown.text(HeaderLine))
        assert "PAST" not in shown.text(HeaderLine)


async def test_a_run_without_a_timeline_says_so_and_travels_in_its_metrics(tmp_path: Path) -> None:
    async with past_screen(tmp_path) as shown:
        await shown.press("t")
        await shown.until(lambda: "no events.jsonl" in shown.text(TravelBar))
        await shown.press("colon", *"100", "enter")
        await shown.at(STARTED + 240)
        assert "step 100" in " ".join(shown.text(HeaderLine).split())


async def test_a_run_without_a_timeline_is_told_of_once_and_not_read_over_and_over(tmp_path: Path) -> None:
    async with past_screen(tmp_path) as shown:
        told: list[messages.TimelineArrived] = []
        shown.app._news._post = noting(told, shown.app.post_message)
        await shown.press("t")
        await shown.until(lambda: "no events.jsonl" in shown.text(TravelBar))
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
    async with past_screen(tmp_path) as shown:
        await shown.press("question_mark")
        await shown.until(lambda: isinstance(shown.app.screen, ReadingScreen))
        page = str(shown.app.screen.query_one("Static").render())
        assert "back to the present" in page
        assert "↻ restart" in page
