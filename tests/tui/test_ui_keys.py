"""Several services at once, the command palette, a read-only screen, preferences, and the size of the terminal."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from screen_fakes import NOW, changed, drawn, run_status, service, state_after
from shown_screen import LARGE, SMALL, shown
from textual.app import App
from textual.command import CommandList, CommandPalette
from textual.content import Content
from textual.widgets import Input

from grpo_engine.wire.supervisor import ServiceState
from grpo_tui.ui.board.keys import ON_BOARD
from grpo_tui.ui.board.table import KeysLine
from grpo_tui.ui.keys import EVERYWHERE, ON_MAIN
from grpo_tui.ui.palette import RunCommands
from grpo_tui.ui.preferences import Preferences
from grpo_tui.ui.screens.confirm import ConfirmScreen
from grpo_tui.ui.screens.gpus import GpusScreen
from grpo_tui.ui.screens.main import MainScreen
from grpo_tui.ui.terminal.resumable_driver import ResumableDriver
from grpo_tui.ui.widgets.frame.activity_line import FIRST_WATCHING_WORDS, FIRST_WORDS, ActivityLine
from grpo_tui.ui.widgets.frame.header import HeaderLine
from grpo_tui.ui.widgets.frame.keys_bar import KeysBar
from grpo_tui.ui.widgets.lines import differing_cells
from grpo_tui.ui.widgets.main.log_panel import LogLines
from grpo_tui.ui.widgets.main.services_table import TAG, ServicesTable
from grpo_tui.view.board.state import Board

slow = pytest.mark.slow


# --- several services at once ----------------------------------------------------------------------------------------


@slow
async def test_r_s_and_k_act_on_the_tagged_services_until_escape(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=7) as screen:
        await screen.press("up", "space", "up", "space", "down", "down")
        await screen.until_text(ActivityLine, "2 tagged")
        assert [TAG in row for row in screen.lines(ServicesTable)] == [False, False, True, True, False]
        assert screen.app.state.selected == "trainer"
        await screen.press("r")
        await screen.until_commands(("restart", "vllm"), ("restart", "env"))
        await screen.press("escape")
        await screen.until(lambda: TAG not in screen.text(ServicesTable))

        screen.connection.commands.clear()
        await screen.press("space", "up", "space", "s")  # the trainer is among them: one question for all
        await screen.until_screen(ConfirmScreen)
        assert "env, ready" in screen.picture
        assert screen.connection.commands == []
        await screen.press("y")
        await screen.until_commands(("stop", "env"), ("stop", "trainer"))

        screen.connection.commands.clear()
        screen.connection.send(changed(2, NOW, service("env", state="stopped", pid=None)))
        await screen.until(lambda: screen.app.state.services[2].state is ServiceState.STOPPED)
        await screen.press("up", "space", "up", "space", "K")
        await screen.until_screen(ConfirmScreen)
        assert "Kill these 3 services now?" in screen.picture  # what does not run is left out
        for name in ("api", "vllm", "trainer"):
            assert f"{name}, ready, pid {4000 + len(name)}" in screen.picture
        assert "trainer is at step 7" in screen.picture
        await screen.press("y")
        await screen.until_commands(("kill", "api"), ("kill", "vllm"), ("kill", "trainer"))


@slow
async def test_the_answers_of_a_question_stay_visible_however_many_services_it_names(tmp_path: Path) -> None:
    services = [service(f"worker-{number:02d}", kind="command") for number in range(30)]
    async with shown(tmp_path, status=run_status(run=tmp_path.name, services=services)) as screen:
        await screen.press("D")
        await screen.until_screen(ConfirmScreen)
        await screen.until(lambda: "worker-00" in screen.picture)
        assert ">y<" in screen.picture.replace(" ", "")
        await screen.press("end")
        await screen.until(lambda: "worker-29" in screen.picture)


# --- the palette -----------------------------------------------------------------------------------------------------


@slow
async def test_the_palette_finds_every_key_service_and_screen_by_words_and_nothing_of_a_general_app(
    tmp_path: Path,
) -> None:
    async with shown(tmp_path) as screen:
        words = [command.words for command in RunCommands(screen.app.screen)._commands()]
        for key in (*EVERYWHERE, *ON_MAIN):
            assert key.action == "app.command_palette" or f"{key.label}  ({key.shown})" in words
        for name in ("api", "vllm", "env", "trainer"):
            assert {f"restart {name}", f"stop {name}", f"kill {name}", f"show log of {name}"} <= set(words)
        assert {"theme dark", "theme light", "theme ansi", "theme nord"} <= set(words)

        def first() -> str:
            commands = screen.app.screen.query_one(CommandList)
            return str(commands.get_option_at_index(0).prompt) if commands.option_count else ""

        for typed, found in (
            ("stop api", "stop api"),
            ("vllm", "restart vLLM  (v)"),
        ):
            await screen.press("ctrl+p")
            await screen.until_screen(CommandPalette)
            await screen.until(lambda: "restart vLLM  (v)" in screen.picture)
            assert "Maximize" not in screen.picture
            assert "Screenshot" not in screen.picture
            await screen.press(*("space" if letter == " " else letter for letter in typed))
            await screen.until(lambda found=found: first().startswith(found))  # type: ignore[misc]
            await screen.press("enter")
            await screen.until_screen(MainScreen)
        await screen.until_commands(("stop", "api"), ("restart", "vllm"))


@slow
async def test_keys_that_come_before_the_palette_is_there_or_after_it_was_closed_end_no_screen(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        screen.app.action_command_palette()
        screen.app.screen._action_escape()  # type: ignore[attr-defined]
        await screen.until_screen(MainScreen)
        await screen.press("ctrl+p")
        await screen.until_screen(CommandPalette)
        palette = screen.app.screen
        assert palette.get_widget_at(500, 500)[0] is palette  # a click before the terminal became smaller
        typed = Input.Changed(palette.query_one(Input), "zz")
        await palette.dismiss()
        await palette._on_message(typed)
        await screen.press("2")
        await screen.until_screen(GpusScreen)


@slow
async def test_the_palette_matches_words_of_a_help_text_and_not_its_letters(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        palette = RunCommands(screen.app.screen)

        async def found(query: str) -> list[str | None]:
            hits = [hit async for hit in palette.search(query)]
            return [hit.text for hit in sorted(hits, key=lambda hit: -hit.score)]

        assert not [text for text in await found("rest") if text is None or text.startswith(("theme", "crash"))]
        assert "gpus  (2)" in await found("mem proc")  # memory by service and process
        assert (await found("theme li"))[0] == "theme light"
        assert "theme nord" in await found("colours")


# --- a read-only screen, and preferences -----------------------------------------------------------------------------


@slow
async def test_a_read_only_screen_refuses_with_a_message_and_sends_no_command(tmp_path: Path) -> None:
    async with shown(tmp_path, options={"is_read_only": True}) as screen:
        assert "read-only" in screen.text(HeaderLine)
        assert "restart vLLM" not in screen.text(KeysBar)
        assert "q detach" in screen.text(KeysBar)
        for key in ("v", "r", "s", "K", "D", "space"):
            await screen.press(key)
            await screen.until_text(ActivityLine, "read-only screen")
            assert isinstance(screen.app.screen, MainScreen)
            await screen.press("c")  # replaces the message
            await screen.until_text(ActivityLine, "no crash report")
        assert screen.connection.commands == []


@slow
async def test_a_new_user_sees_three_keys_until_the_first_key_and_preferences_are_saved_if_they_can_be(
    tmp_path: Path,
) -> None:
    saved: list[Preferences] = []
    is_writable = True

    def save(preferences: Preferences) -> None:
        if not is_writable:
            raise PermissionError(13, "Permission denied", "screen.json")
        saved.append(preferences)

    async with shown(tmp_path, options={"preferences": Preferences(), "remember": save}) as screen:
        assert "v restarts vLLM" in screen.text(ActivityLine)
        await screen.press("up")
        await screen.until(lambda: "New here" not in screen.text(ActivityLine))
        assert saved == [Preferences(has_read_hint=True)]
        screen.app.choose_theme("light")
        assert screen.app.theme == "light"
        assert saved[-1] == Preferences(has_read_hint=True, theme="light")
        is_writable = False
        screen.app.choose_theme("dark")
        await screen.until_text(ActivityLine, "preferences are not saved")
        assert screen.app.theme == "dark"


@pytest.mark.parametrize("width", [78, 38, 22])
def test_the_last_line_has_whole_keys_and_always_those_for_help_and_leaving(width: int) -> None:
    board = Board()
    for row in (
        *drawn(KeysBar(ON_MAIN), state_after(), width),
        *(line.plain for line in KeysLine(ON_BOARD).lines(board, width, 1)),
    ):
        assert row.rstrip() == row
        assert row.endswith(("q detach", "D end"))
        assert "? help" in row


def test_the_hints_for_new_users_fit_into_80_columns() -> None:
    assert max(map(len, (FIRST_WORDS, FIRST_WATCHING_WORDS))) <= SMALL[0] - 2


# --- the size of the terminal ----------------------------------------------------------------------------------------


@slow
async def test_the_layout_follows_the_size_of_the_terminal_down_to_one_that_is_too_small(tmp_path: Path) -> None:
    async with shown(tmp_path, LARGE, num_steps=40) as screen:
        down = [(200 - 20 * step, 50 - 5 * step) for step in (0, 2, 4, 7)]
        for sizes in (down, down[::-1]):
            for size in sizes:
                await screen.pilot.resize_terminal(*size)
            await screen.resize(sizes[-1])
            await screen.until(lambda: screen.app.main.has_class("-wide") is (screen.app.main.size == LARGE))
            await screen.until(lambda: (screen.part(LogLines).region.x > 100) is (screen.app.main.size == LARGE))
            await screen.until_text(LogLines, "step 39")
            await screen.check_widths()
        for width, height in ((39, 24), (80, 9)):
            await screen.pilot.resize_terminal(width, height)
            await screen.until_text(HeaderLine, f"needs 40x10: {width}x{height} is too small")
            assert not screen.app.main.query_one("#body").display
        await screen.resize(SMALL)
        await screen.until_text(HeaderLine, "● running")
        assert screen.app.main.query_one("#body").display


# --- what is sent to the terminal ------------------------------------------------------------------------------------


async def test_a_screen_whose_errors_go_to_a_file_is_drawn_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with (tmp_path / "errors").open("w+") as errors:
        monkeypatch.setattr(sys, "__stderr__", errors)
        monkeypatch.setattr(sys, "__stdin__", errors)
        assert ResumableDriver(App())._file is sys.__stdout__


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
