"""Several services at once, the palette, watching without acting, the mouse, the first hint, and resizing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.cells import cell_len
from screen_fakes import NOW, changed, four_services, gpu, run_status, service
from shown_screen import shown
from textual.command import CommandList, CommandPalette
from textual.content import Content
from textual.geometry import Region

from grpo_engine.wire.supervisor import Bye, RunState
from grpo_tui.ui.keys import EVERYWHERE, ON_MAIN
from grpo_tui.ui.palette import RunCommands
from grpo_tui.ui.preferences import Preferences
from grpo_tui.ui.screens.confirm import ConfirmScreen
from grpo_tui.ui.screens.main import MainScreen
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.widgets.frame.activity_line import ActivityLine
from grpo_tui.ui.widgets.frame.header import HeaderLine
from grpo_tui.ui.widgets.frame.keys_bar import KeysBar
from grpo_tui.ui.widgets.lines import Lines, differing_cells
from grpo_tui.ui.widgets.main.log_panel import LogLines
from grpo_tui.ui.widgets.main.services_table import TAG, ServicesTable
from grpo_tui.ui.widgets.main.warnings_bar import WarningsBar
from grpo_tui.view.state import Ticked

pytestmark = pytest.mark.slow
SMALL, LARGE = (80, 24), (200, 50)


# --- several services at once ----------------------------------------------------------------------------------------


async def test_r_restarts_every_tagged_service_and_escape_takes_the_tags_away(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press("up", "space", "up", "space", "down", "down")
        await screen.until(lambda: "2 tagged" in screen.text(ActivityLine))
        assert [TAG in row for row in screen.lines(ServicesTable)] == [False, False, True, True, False]
        assert screen.app.state.selected == "trainer"
        await screen.pilot.press("r")
        await screen.until(lambda: len(screen.connection.asked) == 2)
        assert screen.connection.asked == [("restart", "vllm"), ("restart", "env")]
        await screen.pilot.press("escape")
        await screen.until(lambda: TAG not in screen.text(ServicesTable))


async def test_killing_several_names_every_one_and_leaves_out_what_does_not_run(tmp_path: Path) -> None:
    services = [*four_services()[:2], service("env", state="stopped", pid=None), four_services()[3]]
    async with shown(tmp_path, status=run_status(run=tmp_path.name, services=services), num_steps=7) as screen:
        for _ in range(4):
            await screen.pilot.press("space", "up")
        await screen.pilot.press("K")
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmScreen))
        for name in ("api", "vllm", "trainer"):
            assert f"{name}, ready, pid {4000 + len(name)}" in screen.picture
        assert "Kill these 3 services now?" in screen.picture
        assert "trainer is at step 7" in screen.picture
        await screen.pilot.press("y")
        await screen.until(lambda: len(screen.connection.asked) == 3)
        assert screen.connection.asked == [("kill", "api"), ("kill", "vllm"), ("kill", "trainer")]


async def test_s_on_several_stops_those_that_run_and_asks_once_where_the_trainer_is_among_them(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press("space", "up", "space", "s")
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmScreen))
        assert "env, ready" in screen.picture
        assert screen.connection.asked == []
        await screen.pilot.press("y")
        await screen.until(lambda: len(screen.connection.asked) == 2)
        assert screen.connection.asked == [("stop", "env"), ("stop", "trainer")]


async def test_the_answers_stay_in_sight_however_many_are_named(tmp_path: Path) -> None:
    services = [service(f"worker-{number:02d}", kind="command") for number in range(30)]
    async with shown(tmp_path, status=run_status(run=tmp_path.name, services=services)) as screen:
        await screen.pilot.press("D")
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmScreen))
        await screen.until(lambda: "worker-00" in screen.picture)
        assert ">y<" in screen.picture.replace(" ", "")
        await screen.pilot.press("end")
        await screen.until(lambda: "worker-29" in screen.picture)


# --- the palette -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "found", "asked"),
    [
        ("restart env", "restart env", ("restart", "env")),
        ("stop api", "stop api", ("stop", "api")),
        ("vllm", "restart vLLM  (v)", ("restart", "vllm")),
    ],
)
async def test_the_palette_finds_actions_by_their_words(
    tmp_path: Path, typed: str, found: str, asked: tuple[str, str]
) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.press("ctrl+p")
        await screen.until(lambda: isinstance(screen.app.screen, CommandPalette))

        def first() -> str:
            commands = screen.app.screen.query_one(CommandList)
            return str(commands.get_option_at_index(0).prompt) if commands.option_count else ""

        await screen.pilot.press(*("space" if letter == " " else letter for letter in typed))
        await screen.until(lambda: first().startswith(found))
        await screen.pilot.press("enter")
        await screen.until(lambda: bool(screen.connection.asked))
        assert screen.connection.asked == [asked]


async def test_the_palette_has_every_key_service_and_screen_and_nothing_of_a_general_app(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        words = [command.words for command in RunCommands(screen.app.screen)._commands()]
        for key in (*EVERYWHERE, *ON_MAIN):
            assert key.action == "app.command_palette" or f"{key.label}  ({key.shown})" in words
        for name in ("api", "vllm", "env", "trainer"):
            assert {f"restart {name}", f"stop {name}", f"kill {name}", f"show log of {name}"} <= set(words)
        assert {"theme dark", "theme light", "theme ansi", "theme nord"} <= set(words)
        await screen.pilot.press("ctrl+p")
        await screen.until(lambda: "restart vLLM  (v)" in screen.picture)
        assert "Maximize" not in screen.picture
        assert "Screenshot" not in screen.picture


async def test_a_theme_that_is_chosen_is_remembered(tmp_path: Path) -> None:
    kept: list[Preferences] = []
    async with shown(tmp_path, options={"preferences": Preferences(), "remember": kept.append}) as screen:
        screen.app.choose_theme("light")
        assert screen.app.theme == "light"
        assert kept[-1].theme == "light"


# --- watching without acting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["v", "r", "s", "K", "D", "space"])
async def test_a_read_only_screen_refuses_with_words_and_asks_for_nothing(tmp_path: Path, key: str) -> None:
    async with shown(tmp_path, options={"is_read_only": True}) as screen:
        assert "read-only" in screen.text(HeaderLine)
        assert "restart vLLM" not in screen.text(KeysBar)
        assert "q detach" in screen.text(KeysBar)
        await screen.pilot.press(key)
        await screen.until(lambda: "read-only screen" in screen.text(ActivityLine))
        assert isinstance(screen.app.screen, MainScreen)
        assert screen.connection.asked == []


async def test_of_a_run_that_is_over_no_key_is_offered_that_acts_and_each_still_says_why(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        assert all(words in screen.text(KeysBar) for words in ("v restart", "r restart", "s stop", "D end"))
        screen.connection.say(Bye(state=RunState.FINISHED))
        await screen.until(lambda: "restart" not in screen.text(KeysBar))
        assert not {"v", "r", "s", "D"} & set(screen.text(KeysBar).split())
        assert {"t", "f", "z", "?", "q"} <= set(screen.text(KeysBar).split())
        for key, answer in (("v", "starts another"), ("D", "ended already")):
            await screen.pilot.press(key)
            await screen.until(lambda answer=answer: answer in screen.text(ActivityLine))
        words = [command.words for command in RunCommands(screen.app.screen)._commands()]
        assert not [each for each in words if each.startswith(("restart", "stop", "start/stop", "kill", "end  "))]
        assert screen.connection.asked == []


async def test_a_run_without_an_inference_server_offers_no_key_to_restart_it(tmp_path: Path) -> None:
    status = run_status(run=tmp_path.name, services=[service("trainer")])
    async with shown(tmp_path, status=status) as screen:
        assert "vLLM" not in screen.text(KeysBar)
        assert "r restart" in screen.text(KeysBar)


# --- the first time --------------------------------------------------------------------------------------------------


async def test_somebody_new_is_told_the_three_keys_that_matter_until_they_press_one(tmp_path: Path) -> None:
    kept: list[Preferences] = []
    async with shown(tmp_path, options={"preferences": Preferences(), "remember": kept.append}) as screen:
        assert "v restarts vLLM" in screen.text(ActivityLine)
        await screen.pilot.press("up")
        await screen.until(lambda: "New here" not in screen.text(ActivityLine))
        assert kept == [Preferences(has_read_hint=True)]


async def test_preferences_that_cannot_be_written_are_no_reason_to_fail(tmp_path: Path) -> None:
    def fail(_: Preferences) -> None:
        raise PermissionError(13, "Permission denied", "screen.json")

    async with shown(tmp_path, options={"preferences": Preferences(), "remember": fail}) as screen:
        await screen.pilot.press("up")
        await screen.until(lambda: "preferences are not saved" in screen.text(ActivityLine))


# --- the mouse -------------------------------------------------------------------------------------------------------


async def test_a_click_on_a_warning_opens_all_of_them(tmp_path: Path) -> None:
    status = run_status(run=tmp_path.name, services=[service("env", state="failed", why="exit code 3")])
    async with shown(tmp_path, status=status) as screen:
        await screen.until(lambda: "env failed" in screen.text(WarningsBar))
        await screen.pilot.click(WarningsBar, offset=(6, 0))
        await screen.until(lambda: isinstance(screen.app.screen, ReadingScreen))


async def test_a_click_on_the_last_line_is_its_key(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.click(KeysBar, offset=(4, 0))
        await screen.until(lambda: bool(screen.connection.asked))
        assert screen.connection.asked == [("restart", "vllm")]


# --- size ------------------------------------------------------------------------------------------------------------


async def test_resizing_on_and_on_ends_in_the_right_layout(tmp_path: Path) -> None:
    async with shown(tmp_path, LARGE, num_steps=40) as screen:
        down = [(200 - 7 * step, 50 - 2 * step + step // 4) for step in range(21)]
        for width, height in (*down, *reversed(down)):
            await screen.pilot.resize_terminal(width, max(15, height))
        await screen.until(lambda: screen.app.main.size == LARGE)
        await screen.until(lambda: screen.app.main.has_class("-wide"))
        assert screen.app.main.query_one(LogLines).region.x > 100
        assert "step 39" in screen.text(LogLines)
        for part in screen.app.main.query(Lines):
            assert all(cell_len(line) <= part.size.width for line in part.plain_lines), type(part).__name__


async def test_a_terminal_that_is_too_small_says_so_and_one_that_grows_shows_the_run(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.pilot.resize_terminal(39, 24)
        await screen.until(lambda: "39x24 is too small" in screen.text(HeaderLine))
        await screen.pilot.resize_terminal(80, 9)
        await screen.until(lambda: "80x9 is too small" in screen.text(HeaderLine))
        assert not screen.app.main.query_one("#body").display
        await screen.pilot.resize_terminal(*SMALL)
        await screen.until(lambda: "● running" in screen.text(HeaderLine))
        assert screen.app.main.query_one("#body").display


@pytest.mark.parametrize("size", [(40, 10), (60, 15), SMALL, LARGE])
async def test_wide_letters_many_services_and_long_reasons_stay_in_their_columns(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    why = "exit code 3: RuntimeError: CUDA error while gathering 漢字 on rank 3 of 8; " * 3
    services = [service("模型服务器", kind="inference"), service("évaluation-très-longue-nom", kind="command")]
    services += [
        service(f"worker-{number}", kind="command", state="failed", why=why, exit_code=3) for number in range(9)
    ]
    services += [service("trainer")]
    status = run_status(run=tmp_path.name, services=services, gpus=[gpu(index) for index in range(8)])
    async with shown(tmp_path, size, status) as screen:
        screen.connection.say(changed(2, NOW, service("trainer", state="unhealthy", why=why)))
        await screen.until(lambda: "unhealthy" in str(screen.app.state.services[-1].state))
        for part in screen.app.main.query(Lines):
            assert all(cell_len(line) <= part.size.width for line in part.plain_lines), type(part).__name__
        names = [line for line in screen.lines(ServicesTable) if "worker" in line or "模型" in line]
        places = {cell_len(line.partition(sign)[0]) for line in names for sign in "✗●" if sign in line[:40]}
        assert len(places) <= 1
        assert names


# --- what goes over the wire -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "cells"),
    [
        ("up 12m05s", "up 12m06s", (7, 8)),
        ("same", "same", (0, 0)),
        ("漢字 1", "漢字 2", (5, 6)),
        ("a", "abc", (1, 3)),
        ("abc", "a", (1, 3)),
        ("a漢", "ab ", (1, 3)),
    ],
)
def test_of_a_line_only_the_cells_that_differ_are_sent(old: str, new: str, cells: tuple[int, int]) -> None:
    assert differing_cells(Content(old), Content(new)) == cells


def test_a_word_that_only_changes_its_colour_is_sent_too() -> None:
    assert differing_cells(Content.assemble("a ", ("b", ".ok"), " c"), Content("a b c")) == (2, 3)


async def test_a_second_that_passes_paints_the_digits_of_the_clock_and_nothing_else(tmp_path: Path) -> None:
    async with shown(tmp_path, LARGE, num_steps=40) as screen:
        painted: list[Region] = []
        for part in screen.app.main.query(Lines):
            part.refresh = lambda *regions, **_: painted.extend(regions)  # type: ignore[method-assign]
        screen.app._apply(Ticked(now=NOW + 1))
        await screen.until(lambda: "12m06s" in screen.text(HeaderLine))
        assert painted
        assert all(region.width <= 2 for region in painted), painted


async def test_two_viewers_of_one_run_both_follow_and_either_may_leave(tmp_path: Path) -> None:
    async with shown(tmp_path) as one, shown(tmp_path, LARGE, options={"is_read_only": True}) as other:
        with (tmp_path / "trainer.log").open("a") as file:
            file.write("\nseen by both\n")
        both = (one, other)
        stopped = changed(2, NOW, service("env", state="stopped", pid=None))
        for screen in both:
            screen.connection.say(stopped)
        async with asyncio.timeout(30):
            for screen in both:
                await screen.until(lambda screen=screen: "seen by both" in screen.text(LogLines))
                await screen.until(lambda screen=screen: "■ stopped" in screen.text(ServicesTable))
        await one.pilot.press("q")
        assert one.app._exit
        assert other.app.is_running
