"""Text that looks like Textual's markup: it is shown as it is, and ends no screen."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from screen_fakes import FakeConnection, run_status, service
from shown_screen import open_app
from textual.command import CommandPalette
from textual.widgets import Input, OptionList, Static

from grpo_engine.wire.supervisor import Snapshot
from grpo_tui.ui.screens.choose_run import ChooseRunScreen
from grpo_tui.ui.screens.picker import PickerApp

pytestmark = pytest.mark.slow
MARKUP = "[/]"


@pytest.mark.parametrize("typed", ["", "logofx"])
async def test_a_service_whose_name_looks_like_markup_ends_no_palette(tmp_path: Path, typed: str) -> None:
    """Of a run folder from elsewhere: a profile has no such name."""
    connection = FakeConnection()
    connection.send(Snapshot(number=1, status=run_status(services=[service(f"x{MARKUP}")])))
    async with open_app(tmp_path, connection) as screen:
        await screen.until(lambda: screen.app.state.status is not None)
        await screen.press("ctrl+p", *typed)

        def listed() -> list[str]:
            lists = screen.app.screen.query(OptionList) if isinstance(screen.app.screen, CommandPalette) else ()
            return [str(option.prompt) for each in lists for option in each.options]

        await screen.until(lambda: any(f"show log of x{MARKUP}" in line for line in listed()))


async def test_what_is_typed_into_the_picker_is_no_markup() -> None:
    app = PickerApp(list, lambda name: name)
    async with app.run_test() as pilot:
        app.screen.query_one(Input).value = MARKUP
        await pilot.pause()
        (option,) = app.screen.query_one(OptionList).options
        assert str(option.prompt) == f"no profile matches {MARKUP!r}; esc clears the filter"


async def test_a_folder_whose_path_looks_like_markup_ends_no_list_of_runs(tmp_path: Path) -> None:
    folder = tmp_path / "a[" / "b]" / "run"
    folder.mkdir(parents=True)
    connection = FakeConnection()
    connection.send(Snapshot(number=1, status=run_status()))
    async with open_app(folder, connection) as screen:
        await screen.until(lambda: screen.app.state.status is not None)
        await screen.go_to("metrics")
        await screen.press("a")
        await screen.until_screen(ChooseRunScreen)
        words = f"no other run in {folder.parent} has metrics yet"
        async with asyncio.timeout(60):
            while str(screen.app.screen.query_one(Static).visual) != words:
                await screen.pilot.pause(0.01)
