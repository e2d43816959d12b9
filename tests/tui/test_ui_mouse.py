"""The mouse: a click on what is seen, and the wheel over what is longer than its room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from group_fakes import group, write_groups
from screen_fakes import four_services, port_taken, run_status
from shown_screen import LARGE, SMALL, Shown, ShownPast, past_screen, shown, write_timeline
from textual import events
from textual.widget import Widget

from grpo_tui.supervisor.keeper.proc import user_name
from grpo_tui.ui.screens.confirm import ConfirmScreen, TakePortScreen
from grpo_tui.ui.screens.main import MainScreen
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.widgets.frame.header import TabsLine
from grpo_tui.ui.widgets.frame.travel_bar import TravelBar
from grpo_tui.ui.widgets.log_page import LogPage, LogServices, LogsTitle
from grpo_tui.ui.widgets.main.metrics_panel import MetricsPanel
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.ui.widgets.metric_list import MetricList
from grpo_tui.ui.widgets.plot_panel import PlotPanel
from grpo_tui.ui.widgets.rollout_group import RolloutGroup
from grpo_tui.ui.widgets.rollout_list import RolloutList
from grpo_tui.view.metrics.curves import listed

pytestmark = pytest.mark.slow


def part(screen: Shown, kind: type[Widget], selector: str = "") -> Widget:
    return screen.app.screen.query_one(selector or kind.__name__, kind)


async def at_place(screen: Shown, place: str) -> None:
    await screen.until(lambda: screen.app.shown is not None and place == screen.app.shown.PLACE)
    await screen.until(lambda: screen.app.screen.is_mounted)


def turn_wheel(screen: Shown | ShownPast, over: Widget, by: int) -> None:
    """So many notches down over a part, or up."""
    kind = events.MouseScrollDown if by > 0 else events.MouseScrollUp
    x, y = over.region.x + 2, over.region.y + 2
    for _ in range(abs(by)):
        screen.app.post_message(kind(None, x, y, 0, 0, 0, False, False, False, screen_x=x, screen_y=y))


async def click_on(screen: Shown, kind: type[Widget], words: str, selector: str = "", **how: int) -> None:
    """Where the words stand in a part."""
    found = part(screen, kind, selector)
    lines = found.plain_lines  # type: ignore[attr-defined]
    y = next(number for number, line in enumerate(lines) if words in line)
    await screen.pilot.click(found, offset=(lines[y].index(words) + 1 + found.styles.padding.left, y), **how)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "200x50"])
async def test_a_metric_of_the_main_screen_is_seen_in_full_by_a_click(tmp_path: Path, size: tuple[int, int]) -> None:
    async with shown(tmp_path, size, num_steps=30) as screen:
        await click_on(screen, MetricsPanel, "grad_norm")
        await at_place(screen, "metrics")
        await screen.until(lambda: "train/grad_norm" in part(screen, PlotPanel).plain_lines[0])  # type: ignore[attr-defined]
        await click_on(screen, TabsLine, "run")
        await at_place(screen, "run")
        await screen.pilot.click(part(screen, MetricsPanel), offset=(5, 0))  # its title
        await screen.pilot.pause()
        assert isinstance(screen.app.screen, MainScreen)


async def test_the_wheel_moves_through_services_and_metrics(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=30) as screen:
        turn_wheel(screen, part(screen, ServicesTable), -2)
        await screen.until(lambda: screen.app.state.selected == "vllm")
        await screen.pilot.press("5")
        await at_place(screen, "metrics")
        await screen.until(lambda: bool(part(screen, MetricList).plain_lines))  # type: ignore[attr-defined]
        turn_wheel(screen, part(screen, MetricList), 5)  # faster than it is drawn
        names = listed(screen.app.state.history, "")
        await screen.until(lambda: screen.app.state.plots.selected == names[5])


async def test_a_completion_and_a_token_are_chosen_by_a_click_and_a_text_scrolls_by_the_wheel(tmp_path: Path) -> None:
    write_groups(tmp_path, *(group(step, (1.0, 0.0)) for step in range(1, 4)))
    async with shown(tmp_path, (140, 40)) as screen:
        await screen.pilot.press("4")
        await at_place(screen, "rollouts")
        pane = part(screen, RolloutGroup, "#group")
        await screen.until(lambda: "completion 1" in "\n".join(pane.plain_lines))  # type: ignore[attr-defined]
        turn_wheel(screen, part(screen, RolloutList), 1)
        await screen.until(lambda: screen.app.state.rollouts.chosen == 1)
        await screen.until(lambda: "group 2 of 3" in "\n".join(pane.plain_lines))  # type: ignore[attr-defined]
        await click_on(screen, RolloutGroup, "   2    0.000", "#group")
        await screen.until(lambda: "completion 2" in "\n".join(pane.plain_lines))  # type: ignore[attr-defined]
        lines = pane.plain_lines  # type: ignore[attr-defined]
        first = next(number for number, line in enumerate(lines) if "completion 2" in line) + 1
        last = len(lines[first].rstrip()) - 1
        await screen.pilot.click(pane, offset=(last + pane.styles.padding.left, first))
        await screen.until(lambda: screen.app.state.rollouts.token > 0)


async def test_two_clicks_open_a_group_on_a_narrow_screen(tmp_path: Path) -> None:
    write_groups(tmp_path, *(group(step, (1.0, 0.0)) for step in range(1, 4)))
    async with shown(tmp_path) as screen:
        await screen.pilot.press("4")
        await at_place(screen, "rollouts")
        await screen.until(lambda: "…" in "\n".join(part(screen, RolloutList).plain_lines))  # type: ignore[attr-defined]
        await screen.pilot.double_click(part(screen, RolloutList), offset=(10, 4))
        await screen.until(lambda: screen.app.state.rollouts.is_in_group and screen.app.state.rollouts.chosen == 0)


async def test_in_the_logs_the_wheel_holds_and_a_click_on_the_title_follows_again(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press("6")
        await at_place(screen, "logs")
        await screen.until(lambda: len(screen.app.state.logs.lines) > 50)
        turn_wheel(screen, part(screen, LogPage), -2)
        await screen.until(lambda: not screen.app.state.logs.is_following)
        await screen.pilot.click(part(screen, LogsTitle), offset=(70, 0))
        await screen.until(lambda: screen.app.state.logs.is_following)
        await click_on(screen, LogServices, "vllm")
        await screen.until(lambda: screen.app.state.logs.chosen == "vllm")


async def test_the_wheel_over_the_line_of_time_moves_along_it(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    async with past_screen(tmp_path) as moved:
        await moved.press("t")
        await moved.until(lambda: moved.app.state.travel.until is not None)
        moment, bar = moved.app.state.travel.moment, moved.app.screen.query_one(TravelBar)
        await moved.until(lambda: bool(bar.plain_lines))
        turn_wheel(moved, bar, -2)
        await moved.at(moment - 10)


async def test_a_click_beside_the_help_closes_it_and_one_on_it_does_not(tmp_path: Path) -> None:
    async with shown(tmp_path, LARGE) as screen:
        await screen.pilot.press("question_mark")
        await screen.until(lambda: isinstance(screen.app.screen, ReadingScreen))
        await screen.pilot.click(offset=(100, 20))
        await screen.pilot.pause()
        assert isinstance(screen.app.screen, ReadingScreen)
        await screen.pilot.click(offset=(2, 20))
        await screen.until(lambda: isinstance(screen.app.screen, MainScreen))


@pytest.mark.parametrize(("word", "asked"), [("yes", [("stop", "trainer")]), ("no", [])])
async def test_a_question_is_answered_by_a_click(tmp_path: Path, word: str, asked: list[tuple[str, str]]) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press("s")
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmScreen))
        answers = screen.app.screen.query("Static").last()
        await screen.pilot.click(answers, offset=(str(answers.render()).index(word), 0))
        await screen.until(lambda: isinstance(screen.app.screen, MainScreen))
        assert screen.connection.asked == asked


async def test_a_taken_port_is_answered_by_a_click(tmp_path: Path) -> None:
    services = [four_services()[0], port_taken("vllm", user_name(os.getuid()))]
    async with shown(tmp_path, status=run_status(run=tmp_path.name, services=services)) as screen:
        await screen.pilot.press("v")
        await screen.until(lambda: isinstance(screen.app.screen, TakePortScreen))
        again = next(each for each in screen.app.screen.query("Static") if "try again" in str(each.render()))
        await screen.pilot.click(again, offset=(6, 0))
        await screen.until(lambda: screen.connection.asked == [("restart", "vllm")])
        assert screen.connection.took_ports == [False]
