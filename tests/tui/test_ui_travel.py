"""Going back in time on the screen: keys of the timeline, and what they change."""

from __future__ import annotations

from pathlib import Path

import pytest
from screen_fakes import NOW, STARTED, run_status
from shown_screen import CRASH_AT, past_screen
from textual import events
from textual.message import Message

from grpo_engine.wire.supervisor import RunState
from grpo_tui.ui import messages
from grpo_tui.ui.keys import ON_MAIN
from grpo_tui.ui.pages import help_page
from grpo_tui.ui.widgets.frame.activity_line import ActivityLine
from grpo_tui.ui.widgets.frame.header import HeaderLine
from grpo_tui.ui.widgets.frame.keys_bar import KeysBar
from grpo_tui.ui.widgets.frame.travel_bar import TravelBar, TravelInput
from grpo_tui.ui.widgets.main.log_panel import LogLines
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.view.timeline.state import Learned, PastRead

pytestmark = pytest.mark.slow


async def test_t_goes_back_to_a_crash_and_to_the_present_again(tmp_path: Path) -> None:
    async with past_screen(tmp_path) as screen:
        await screen.until_text(LogLines, "step 119")
        assert "PAST" not in screen.text(HeaderLine)
        await screen.press("t")
        await screen.until_moment(NOW)
        await screen.press("left_square_bracket", "left_square_bracket", "left_square_bracket")
        await screen.until_moment(CRASH_AT)
        await screen.until_text(ServicesTable, "out of memory")
        assert "PAST" in screen.text(HeaderLine)
        assert "✗ failed" in screen.text(ServicesTable)
        assert "vllm ready → failed: out of memory" in screen.text(TravelBar)
        assert "5m25s ago" in screen.text(TravelBar)
        assert "step 166" in " ".join(screen.text(TravelBar).split())
        await screen.until(lambda: "step 119" not in screen.text(LogLines) and "trainer: step" in screen.text(LogLines))
        written = (tmp_path / "trainer.log").read_bytes()[:3000]
        assert f"step {written.count(b'step')}" in screen.text(LogLines)
        await screen.press("t")
        await screen.until(lambda: "PAST" not in screen.text(HeaderLine))
        await screen.until(lambda: "out of memory" not in screen.text(ServicesTable))
        assert "step 280" in " ".join(screen.text(HeaderLine).split())


async def test_keys_of_the_timeline_work_only_while_it_is_open(tmp_path: Path) -> None:
    async with past_screen(tmp_path, size=(80, 24)) as screen:
        shifted = screen.app.main.log_lines
        await screen.press("t")
        await screen.until_moment(NOW)
        await screen.press("comma")
        await screen.until_moment(STARTED + 2.4 * 280)
        await screen.press("home")
        await screen.until_moment(STARTED)
        await screen.press("shift+right", "right")
        await screen.until_moment(STARTED + 11 * 5)
        await screen.press("end")
        await screen.until_moment(NOW)
        assert shifted.scroll_offset.x == 0
        assert "←" in screen.text(KeysBar)
        await screen.press("t")
        await screen.until(lambda: not screen.app.state.travel.is_open)
        await screen.press("right", "comma", "left_square_bracket", "full_stop")
        await screen.until(lambda: shifted.scroll_offset.x > 0)
        assert not screen.app.state.travel.is_open
        assert "restart vLLM" in screen.text(KeysBar)


async def test_in_the_past_keys_that_act_on_the_run_are_refused_with_the_reason(tmp_path: Path) -> None:
    async with past_screen(tmp_path) as screen:
        await screen.press("t", "left")
        await screen.until_moment(NOW - 5)
        for key in ("v", "r", "s", "K", "D"):
            await screen.press(key)
            await screen.until_text(ActivityLine, "press t for the present")
        assert len(screen.app.screen_stack) == 1
        assert screen.connection.commands == []
        await screen.press("t", "v")
        await screen.until_commands(("restart", "vllm"))


async def test_a_moment_is_typed_clicked_or_dragged_to_and_a_text_that_is_no_time_is_refused(tmp_path: Path) -> None:
    async with past_screen(tmp_path) as screen:
        await screen.press("t")
        await screen.until_moment(NOW)
        await screen.press("colon", *"soon", "enter")
        await screen.until_text(TravelBar, "'soon' is not a time")
        await screen.press("colon", *"100")
        await screen.until(lambda: screen.app.main.query_one(TravelInput).value == "100")
        await screen.press("escape")
        await screen.until(lambda: not screen.app.state.travel.is_typing)
        assert screen.app.state.travel.is_open
        assert screen.app.state.travel.moment == NOW
        await screen.press("comma")
        await screen.until_moment(STARTED + 2.4 * 280)
        for key, character in ((":", ":"), *((each, each) for each in "100"), ("enter", "\r")):  # as from a paste
            screen.app.post_message(events.Key("colon" if key == ":" else key, character))
        await screen.until_moment(STARTED + 240)

        bar = screen.part(TravelBar)
        await screen.pilot.click(bar, offset=(1, 1))
        await screen.until_moment(STARTED)
        await screen.pilot.mouse_down(bar, offset=(20, 1))
        await screen.pilot.hover(bar, offset=(60, 1))
        await screen.pilot.mouse_up(bar, offset=(60, 1))
        share = 59 / (bar.size.width - 1)
        await screen.until_moment(STARTED + share * (NOW - STARTED))


async def test_the_timeline_stays_open_on_every_screen(tmp_path: Path) -> None:
    async with past_screen(tmp_path, size=(200, 50)) as screen:
        await screen.go_to("alignment")
        await screen.until_text(KeysBar, "← step back")
        await screen.press("t", "home")
        await screen.until_moment(STARTED)
        assert "← → move" in screen.text(KeysBar)
        assert "step back" not in screen.text(KeysBar)  # the timeline takes this key
        await screen.go_to("metrics")
        await screen.until_moment(STARTED)
        await screen.press("right")
        await screen.until_moment(STARTED + 5)
        await screen.press("t")
        await screen.until(lambda: "PAST" not in screen.text(HeaderLine))


async def test_a_run_that_is_over_opens_at_its_last_moment(tmp_path: Path) -> None:
    over = run_status(state=RunState.FINISHED, ended_at=STARTED + 700, supervisor=None)
    async with past_screen(tmp_path, over, size=(80, 24)) as screen:
        await screen.until_moment(STARTED + 700)
        await screen.until_text(TravelBar, "the end")
        await screen.resize((120, 36))
        await screen.until_text(TravelBar, "the end")
        await screen.press("left")
        await screen.until_moment(STARTED + 695)
        assert "before the end" in screen.text(TravelBar)
        await screen.press("t")
        await screen.until_moment(STARTED + 700)


async def test_a_run_without_a_timeline_says_so_reads_it_once_and_shows_its_metrics_of_the_past(tmp_path: Path) -> None:
    async with past_screen(tmp_path, has_timeline=False) as screen:
        read: list[messages.TimelineArrived] = []
        post = screen.app.post_message

        def noted(message: Message) -> bool:
            if isinstance(message, messages.TimelineArrived):
                read.append(message)
            return post(message)

        screen.app._news._post = noted
        await screen.press("t")
        await screen.until_text(TravelBar, "no events.jsonl")
        await screen.until_moment(NOW)
        await screen.until(lambda: len(read) >= 2)
        for _ in range(20):
            await screen.pilot.pause()
        assert [type(each.change) for each in read] == [Learned, PastRead]
        await screen.press("colon", *"100", "enter")
        await screen.until_moment(STARTED + 240)
        assert "step 100" in " ".join(screen.text(HeaderLine).split())


def test_the_help_explains_the_keys_and_signs_of_the_timeline() -> None:
    page = help_page("run", ON_MAIN, 78).plain
    assert "back to the present" in page
    assert "↻ restart" in page
