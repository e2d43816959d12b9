"""The mouse: clicks on what is shown, and the wheel over what is longer than its room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from group_fakes import group, write_groups
from screen_fakes import four_services, port_taken, run_status, service
from shown_screen import LARGE, SMALL, Shown, past_screen, shown
from textual import events
from textual.widget import Widget

from grpo_tui.supervisor.keeper.proc import user_name
from grpo_tui.ui.screens.confirm import ConfirmScreen, TakePortScreen
from grpo_tui.ui.screens.main import MainScreen
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.widgets.frame.header import TabsLine
from grpo_tui.ui.widgets.frame.keys_bar import KeysBar
from grpo_tui.ui.widgets.frame.travel_bar import TravelBar
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.ui.widgets.log_page import LogPage, LogServices, LogsTitle
from grpo_tui.ui.widgets.main.metrics_panel import MetricsPanel
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.ui.widgets.main.warnings_bar import WarningsBar
from grpo_tui.ui.widgets.metric_list import MetricList
from grpo_tui.ui.widgets.plot_panel import PlotPanel
from grpo_tui.ui.widgets.rollout_group import RolloutGroup
from grpo_tui.ui.widgets.rollout_list import RolloutList
from grpo_tui.view.metrics.curves import listed

pytestmark = pytest.mark.slow


def turn_wheel(screen: Shown, over: Widget, by: int) -> None:
    """So many notches down over a part, or up."""
    kind = events.MouseScrollDown if by > 0 else events.MouseScrollUp
    x, y = over.region.x + 2, over.region.y + 2
    for _ in range(abs(by)):
        screen.app.post_message(kind(None, x, y, 0, 0, 0, False, False, False, screen_x=x, screen_y=y))


async def click_on(screen: Shown, kind: type[Lines], words: str, selector: str = "") -> None:
    """Click on these words in a part."""
    part = screen.part(kind, selector)
    y = next(number for number, line in enumerate(part.plain_lines) if words in line)
    await screen.pilot.click(part, offset=(part.plain_lines[y].index(words) + 1 + part.styles.padding.left, y))


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(SMALL, id="80x24"),
        pytest.param(LARGE, id="200x50", marks=pytest.mark.extended("the same on a small terminal")),
    ],
)
async def test_clicks_and_the_wheel_on_the_main_and_the_metrics_screen(tmp_path: Path, size: tuple[int, int]) -> None:
    services = [*four_services(), service("eval", state="failed", why="exit code 3")]
    status = run_status(run=tmp_path.name, services=services)
    async with shown(tmp_path, size, status, num_steps=30) as screen:
        await screen.pilot.click(ServicesTable, offset=(6, 4))
        await screen.until(lambda: screen.app.state.selected == "trainer")
        turn_wheel(screen, screen.part(ServicesTable), -2)
        await screen.until(lambda: screen.app.state.selected == "vllm")
        await click_on(screen, WarningsBar, "eval failed")
        await screen.until_screen(ReadingScreen)
        await screen.press("escape")
        await screen.until_screen(MainScreen)
        await click_on(screen, KeysBar, "v restart")
        await screen.until_commands(("restart", "vllm"))

        await click_on(screen, MetricsPanel, "grad_norm")
        await screen.until_place("metrics")
        await screen.until(lambda: "train/grad_norm" in screen.lines(PlotPanel)[0])
        names = listed(screen.app.state.history, "")
        turn_wheel(screen, screen.part(MetricList), -5)  # faster than it is drawn
        await screen.until(lambda: screen.app.state.plots.selected == names[names.index("train/grad_norm") - 5])
        await click_on(screen, TabsLine, "run")
        await screen.until_place("run")
        await screen.pilot.click(screen.part(MetricsPanel), offset=(5, 0))  # its title
        await screen.pilot.pause()
        assert isinstance(screen.app.screen, MainScreen)


async def test_a_completion_and_a_token_are_chosen_by_a_click_and_a_text_scrolls_by_the_wheel(tmp_path: Path) -> None:
    write_groups(tmp_path, *(group(step, (1.0, 0.0)) for step in range(1, 4)))
    async with shown(tmp_path, (140, 40)) as screen:
        await screen.go_to("rollouts")
        pane = screen.part(RolloutGroup, "#group")
        await screen.until(lambda: "completion 1" in "\n".join(pane.plain_lines))
        turn_wheel(screen, screen.part(RolloutList), 1)
        await screen.until(lambda: screen.app.state.rollouts.chosen == 1)
        await screen.until(lambda: "group 2 of 3" in "\n".join(pane.plain_lines))
        await click_on(screen, RolloutGroup, "   2    0.000", "#group")
        await screen.until(lambda: "completion 2" in "\n".join(pane.plain_lines))
        first = next(number for number, line in enumerate(pane.plain_lines) if "completion 2" in line) + 1
        last = len(pane.plain_lines[first].rstrip()) - 1
        await screen.pilot.click(pane, offset=(last + pane.styles.padding.left, first))
        await screen.until(lambda: screen.app.state.rollouts.token > 0)


async def test_on_a_narrow_screen_two_clicks_open_a_group_and_clicks_choose_and_follow_logs(tmp_path: Path) -> None:
    write_groups(tmp_path, *(group(step, (1.0, 0.0)) for step in range(1, 4)))
    async with shown(tmp_path) as screen:
        await screen.go_to("rollouts")
        await screen.until_text(RolloutList, "You sort")
        await screen.pilot.double_click(screen.part(RolloutList), offset=(10, 4))
        await screen.until(lambda: screen.app.state.rollouts.is_in_group and screen.app.state.rollouts.chosen == 0)

        await screen.go_to("logs")
        await screen.until(lambda: len(screen.app.state.logs.lines) > 50)
        turn_wheel(screen, screen.part(LogPage), -2)
        await screen.until(lambda: not screen.app.state.logs.is_following)
        await screen.pilot.click(screen.part(LogsTitle), offset=(70, 0))
        await screen.until(lambda: screen.app.state.logs.is_following)
        await click_on(screen, LogServices, "vllm")
        await screen.until(lambda: screen.app.state.logs.chosen == "vllm")


async def test_the_wheel_over_the_timeline_moves_along_it(tmp_path: Path) -> None:
    async with past_screen(tmp_path) as screen:
        await screen.press("t")
        await screen.until(lambda: screen.app.state.travel.until is not None)
        moment, bar = screen.app.state.travel.moment, screen.part(TravelBar)
        await screen.until(lambda: bool(bar.plain_lines))
        turn_wheel(screen, bar, -2)
        await screen.until_moment(moment - 10)


async def test_dialogs_are_answered_and_closed_by_clicks(tmp_path: Path) -> None:
    api, _, env, trainer = four_services()
    services = [api, port_taken("vllm", user_name(os.getuid())), env, trainer]
    async with shown(tmp_path, LARGE, run_status(run=tmp_path.name, services=services)) as screen:
        await screen.press("question_mark")
        await screen.until_screen(ReadingScreen)
        await screen.pilot.click(offset=(100, 20))  # on the page
        await screen.pilot.pause()
        assert isinstance(screen.app.screen, ReadingScreen)
        await screen.pilot.click(offset=(2, 20))  # beside it
        await screen.until_screen(MainScreen)

        await screen.press("v")
        await screen.until_screen(TakePortScreen)
        again = next(each for each in screen.app.screen.query("Static") if "try again" in str(each.render()))
        await screen.pilot.click(again, offset=(6, 0))
        await screen.until_commands(("restart", "vllm"))
        assert screen.connection.took_ports == [False]

        await screen.press("down", "down")
        for word in ("no", "yes"):
            await screen.press("s")
            await screen.until_screen(ConfirmScreen)
            answers = screen.app.screen.query("Static").last()
            await screen.pilot.click(answers, offset=(str(answers.render()).index(word), 0))
            await screen.until_screen(MainScreen)
        await screen.until_commands(("restart", "vllm"), ("stop", "trainer"))


@pytest.mark.parametrize("key", ["question_mark", "ctrl+p"])
async def test_two_clicks_beside_a_page_or_the_palette_close_it_once(key: str, tmp_path: Path) -> None:
    async with shown(tmp_path, LARGE) as screen:
        await screen.go_to("logs")
        await screen.press(key)
        await screen.until(lambda: len(screen.app.screen_stack) == 3 and screen.app.screen.is_mounted)
        for kind in (events.MouseDown, events.MouseUp) * 2:
            screen.app.post_message(kind(None, 2, 40, 0, 0, 1, False, False, False, screen_x=2, screen_y=40))
        await screen.until(lambda: len(screen.app.screen_stack) < 3)
        await screen.until_place("logs")
