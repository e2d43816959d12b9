"""Text is selected with the mouse and copied: the log, warnings, pages; ctrl+c with a selection never leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from screen_fakes import run_status, service
from shown_screen import LARGE, Shown, shown
from textual.containers import VerticalScroll
from textual.geometry import Offset
from textual.widget import Widget
from textual.widgets import Static

from grpo_engine.wire.supervisor import Warning
from grpo_tui.ui.screens.confirm import ConfirmScreen
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.widgets.log_page import LogPage
from grpo_tui.ui.widgets.main.log_panel import LogLines
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.ui.widgets.main.warnings_bar import WarningsBar
from grpo_tui.ui.widgets.selectable import _cells_between

FAILED = service("vllm", state="failed", pid=None, why="exited with code 7")


async def drag(screen: Shown, widget: Widget, start: tuple[int, int], end: tuple[int, int]) -> None:
    """Over cells of its content: from one up to another, which is not selected."""
    edge, end = (widget.gutter.left, widget.gutter.top), (end[0] - 1, end[1])
    await screen.pilot.mouse_down(widget, offset=Offset(*start) + edge)
    await screen.pilot.hover(widget, offset=Offset(*end) + edge)
    await screen.pilot.mouse_up(widget, offset=Offset(*end) + edge)
    await screen.pilot.pause()


@pytest.mark.slow
async def test_a_part_of_the_log_is_copied_by_ctrl_c_which_does_not_leave(tmp_path: Path) -> None:
    async with shown(tmp_path, LARGE) as screen:
        log = screen.app.main.query_one(LogLines)
        row = next(place for place, text in enumerate(log.plain_lines) if "step 20 " in text)
        begin = log.plain_lines[row].index("step 20")
        await drag(screen, log, (begin, row), (begin + len("step 20"), row))
        await screen.press("ctrl+c")
        assert screen.app.clipboard == "step 20"
        assert not screen.app._exit
        await screen.press("ctrl+c")
        assert not screen.app._exit
        await screen.press("escape", "ctrl+c")
        await screen.until(lambda: screen.app._exit)


@pytest.mark.slow
async def test_lines_of_a_log_that_scrolls_are_copied_whole_where_the_screen_cuts_them(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        log = screen.app.main.query_one(LogLines)
        await screen.press("pageup")
        await screen.until(lambda: not screen.app.state.is_following)
        told = log.plain_lines[2:4]
        await drag(screen, log, (0, 2), (4, 3))
        await screen.press("y")
        line, start = screen.app.clipboard.splitlines()
        assert told[0].endswith("…")
        assert line.startswith(told[0].removesuffix("…"))
        assert " ratio 1.00" in line
        assert start == "INFO"


@pytest.mark.slow
async def test_a_warning_is_selected_without_being_opened_and_a_click_still_opens_it(tmp_path: Path) -> None:
    status = run_status(run=tmp_path.name, services=[service("api"), FAILED, service("trainer")])
    async with shown(tmp_path, LARGE, status) as screen:
        bar = screen.app.main.query_one(WarningsBar)
        await screen.until(lambda: "exited with code 7" in screen.text(WarningsBar))
        begin = bar.plain_lines[0].index("exited")
        await drag(screen, bar, (begin, 0), (begin + len("exited with code 7"), 0))
        assert screen.app.screen is screen.app.main
        await screen.press("y")
        assert screen.app.clipboard == "exited with code 7"
        await screen.pilot.click(WarningsBar, offset=(4, 0))
        await screen.until(lambda: isinstance(screen.app.screen, ReadingScreen))


@pytest.mark.slow
async def test_the_selected_cells_are_marked_and_a_click_ends_the_selection(tmp_path: Path) -> None:
    async with shown(tmp_path, LARGE) as screen:
        table = screen.app.main.query_one(ServicesTable)
        await drag(screen, table, (2, 2), (6, 2))
        marked = [part.text for part in table.render_line(2) if part.style is not None and part.style.reverse]
        assert "".join(marked) == screen.lines(ServicesTable)[2][2:6]
        await screen.pilot.click(table, offset=(4, 1))
        assert not [part for part in table.render_line(2) if part.style is not None and part.style.reverse]


@pytest.mark.slow
async def test_a_log_that_follows_holds_still_while_text_in_it_is_selected(tmp_path: Path) -> None:
    async with shown(tmp_path, LARGE) as screen:
        await screen.press("6")
        await screen.until(
            lambda: any("step 39" in row for page in screen.app.screen.query(LogPage) for row in page.plain_lines)
        )
        page = screen.app.screen.query_one(LogPage)
        assert screen.app.state.logs.is_following
        told = page.plain_lines[3]
        await drag(screen, page, (0, 3), (len(told), 3))
        await screen.until(lambda: not screen.app.state.logs.is_following)
        await screen.press("ctrl+c")
        assert screen.app.clipboard == told.rstrip()


@pytest.mark.slow
async def test_y_on_a_page_copies_all_of_it_and_ctrl_c_what_is_selected(tmp_path: Path) -> None:
    status = run_status(run=tmp_path.name, services=[service("api"), FAILED])
    async with shown(tmp_path, LARGE, status) as screen:
        await screen.press("w")
        await screen.until(lambda: isinstance(screen.app.screen, ReadingScreen))
        await screen.press("y")
        assert "vllm failed: exited with code 7" in screen.app.clipboard
        page = screen.app.screen.query_one(Static)
        await drag(screen, page, (2, 0), (6, 0))
        await screen.press("ctrl+c")
        assert screen.app.clipboard == "vllm"
        assert isinstance(screen.app.screen, ReadingScreen)
        await screen.press("escape", "w")
        await screen.until(lambda: isinstance(screen.app.screen, ReadingScreen))
        await screen.press("ctrl+c")
        await screen.until(lambda: screen.app.screen is screen.app.main)


@pytest.mark.slow
async def test_a_number_on_the_page_of_warnings_copies_a_command_of_a_hint_on_one_line(tmp_path: Path) -> None:
    hints = (
        "`grpo-tui start env` starts it; or `grpo-tui down r`",
        "lower --lr",
        "`grpo-tui start env` or `a\nb\x1b[2J`",
    )
    warnings = [Warning(id=str(number), severity="warning", text="w", hint=hint) for number, hint in enumerate(hints)]
    async with shown(tmp_path, LARGE, run_status(run=tmp_path.name, warnings=warnings)) as screen:
        await screen.press("w")
        await screen.until(lambda: isinstance(screen.app.screen, ReadingScreen))
        for key, command in (("1", "grpo-tui start env"), ("2", "grpo-tui down r"), ("3", "ab[2J"), ("9", "ab[2J")):
            await screen.press(key)
            assert screen.app.clipboard == command
        page = screen.app.screen
        assert isinstance(page, ReadingScreen)
        assert "    2 copies grpo-tui down r" in page._page.plain
        assert page.query_one(VerticalScroll).border_subtitle == "copied command 3 · esc closes"


@pytest.mark.slow
async def test_ctrl_c_closes_a_question_and_does_not_leave(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.press("D")
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmScreen))
        await screen.press("ctrl+c")
        await screen.until(lambda: screen.app.screen is screen.app.main)
        assert not screen.app._exit
        assert screen.connection.commands == []


@pytest.mark.slow
async def test_y_without_a_selection_says_how_to_select(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await screen.press("y")
        await screen.until(lambda: screen.app.state.outcome is not None)
        assert screen.app.state.outcome is not None
        assert screen.app.state.outcome.text.startswith("nothing is selected")


@pytest.mark.parametrize(
    ("start", "end", "cut"),
    [(0, -1, "ab語d"), (1, 3, "b"), (1, 4, "b語"), (4, -1, "d"), (9, -1, ""), (2, 2, ""), (0, 99, "ab語d")],
)
def test_cells_are_cut_at_whole_characters(start: int, end: int, cut: str) -> None:
    assert _cells_between("ab語d", start, end) == cut
