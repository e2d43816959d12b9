"""The log screen over logs of a run without a daemon: what each key does to the lines in sight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import pytest
from screen_fakes import NOW, FakeConnection, run_status, service
from textual.pilot import Pilot

from grpo_engine.wire.supervisor import Snapshot
from grpo_tui.ui.app import GrpoScreen
from grpo_tui.ui.screens.logs import LogsScreen, pager_command
from grpo_tui.ui.widgets.log_page import LogNarrowing, LogPage, LogServices, LogsTitle
from grpo_tui.view.logs.state import LogsView

pytestmark = pytest.mark.slow
NUM_LINES = 2000


def clock_text(second: float) -> str:
    return datetime.fromtimestamp(NOW - NUM_LINES + second).strftime("%Y-%m-%d %H:%M:%S")


class Logs:
    """The screen, ways to wait for it and to read it."""

    def __init__(self, app: GrpoScreen, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def view(self) -> LogsView:
        return self.app.state.logs

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_so() or self.app._is_draw_due:
                await self.pilot.pause(0.01)
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def type(self, text: str) -> None:
        """Into the line that a key opened, once it has the focus."""
        await self.until(lambda: self.view.prompt is not None and self.app.focused is not None)
        await self.pilot.press(*text)

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.app.screen.query_one(LogPage).plain_lines]

    def row(self, part: type[LogServices | LogsTitle | LogNarrowing]) -> str:
        return "\n".join(self.app.screen.query_one(part).plain_lines)

    @property
    def cursor_line(self) -> str:
        return next((line for line in self.lines() if line.startswith("▌")), "")


@asynccontextmanager
async def logs_of(run_folder: Path, size: tuple[int, int] = (100, 30)) -> AsyncIterator[Logs]:
    """The log screen of a run with two services: one wrote every second, the other an error half-way."""
    api = "".join(f"{clock_text(second)} INFO step {second}\n" for second in range(NUM_LINES))
    trainer = f"{clock_text(NUM_LINES // 2 + 0.5)} ERROR it broke\n  here\n{clock_text(NUM_LINES - 3)} INFO again\n"
    (run_folder / "api.log").write_text(api)
    (run_folder / "trainer.log").write_text(trainer)
    status = run_status(run=run_folder.name, services=[service("api"), service("trainer")])
    connection = FakeConnection()
    connection.say(Snapshot(number=1, status=status))
    app = GrpoScreen(run_folder, connection, clock=lambda: NOW)
    async with app.run_test(size=size) as pilot:
        logs = Logs(app, pilot)
        await logs.until(lambda: bool(app.state.services))
        await logs.press("6")
        await logs.until(lambda: isinstance(app.screen, LogsScreen) and f"step {NUM_LINES - 1}" in logs.cursor_line)
        yield logs


async def test_all_logs_stand_by_time_each_line_with_its_service_and_new_lines_come(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        rows = [line.lstrip("▌ ").split()[:1] + line.split()[-1:] for line in logs.lines()[-4:]]
        assert rows == [["trainer", "again"], ["api", "1997"], ["api", "1998"], ["api", "1999"]] or rows == [
            ["api", "1997"], ["trainer", "again"], ["api", "1998"], ["api", "1999"],
        ]  # fmt: skip
        assert "all logs by time" in logs.row(LogsTitle)
        assert "following" in logs.row(LogsTitle)
        with (tmp_path / "trainer.log").open("a") as file:
            file.write("one more\n")
        await logs.until(lambda: "one more" in logs.cursor_line)
        await logs.press("shift+tab", "shift+tab")
        await logs.until(lambda: logs.view.chosen == "trainer" and "one more" in logs.cursor_line)
        assert len(logs.lines()) == 4


async def test_in_the_past_a_last_line_without_time_and_end_stands_where_it_was_written(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        with (tmp_path / "trainer.log").open("a") as file:
            file.write("half a line")
        await logs.until(lambda: logs.lines()[-1].endswith("half a line"))  # it may go on at any time
        await logs.press("t")
        await logs.until(lambda: "at that time" in logs.row(LogsTitle) and not logs.view.is_fresh)
        await logs.until(lambda: logs.lines()[-1].endswith("step 1999"))
        again = next(place for place, line in enumerate(logs.lines()) if line.endswith("INFO again"))
        assert logs.lines()[again + 1].endswith("half a line")
        assert [line.split()[-1] for line in logs.lines()[-2:]] == ["1998", "1999"]


async def test_a_search_goes_to_the_nearest_match_counts_all_and_marks_them(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        await logs.press("slash")
        await logs.type("step 10.0")
        await logs.press("enter")
        await logs.until(lambda: "match 10 of 10 lines" in logs.row(LogNarrowing))
        assert "step 1090" in logs.cursor_line
        assert "paused" in logs.row(LogsTitle)
        await logs.press("N")
        await logs.until(lambda: "step 1080" in logs.cursor_line and "match 9 of 10" in logs.row(LogNarrowing))
        await logs.press("n", "n")
        await logs.until(lambda: "step 1090" in logs.cursor_line)
        await logs.press("n")
        await logs.until(
            lambda: logs.app.state.outcome is not None and "not found below" in logs.app.state.outcome.text
        )
        await logs.press("escape")
        await logs.until(lambda: logs.view.searched == "")
        assert "step 1090" in logs.cursor_line


async def test_matches_are_counted_anew_in_the_logs_that_are_chosen_next(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        await logs.press("tab", "tab", "slash")
        await logs.type("o")
        await logs.press("enter")
        await logs.until(lambda: logs.view.chosen == "trainer" and "of 2 lines" in logs.row(LogNarrowing))
        await logs.press("a")
        await logs.until(lambda: logs.view.chosen is None and f"{NUM_LINES + 2:,} lines" in logs.row(LogNarrowing))
        await logs.press("tab")
        await logs.until(lambda: logs.view.chosen == "api" and f"{NUM_LINES:,} lines" in logs.row(LogNarrowing))


async def test_a_filter_works_as_it_is_typed_and_taking_it_away_shows_what_stood_around(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        await logs.press("ampersand")
        await logs.type("broke(")
        await logs.until(lambda: "not yet a regular expression" in logs.row(LogNarrowing))
        await logs.press("backspace")
        await logs.until(lambda: [line.split()[-1] for line in logs.lines()] == ["broke"])
        await logs.press("enter", "f", "escape")
        await logs.until(lambda: logs.view.pattern == "" and "it broke" in logs.cursor_line and len(logs.lines()) > 20)
        place = next(place for place, line in enumerate(logs.lines()) if "it broke" in line)
        assert "step 1000" in logs.lines()[place - 1]
        assert "here" in logs.lines()[place + 1]


async def test_levels_errors_and_times_lead_to_their_lines(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        await logs.press("E")
        await logs.until(lambda: "it broke" in logs.cursor_line)
        await logs.press("colon")
        await logs.type("25:00")
        await logs.press("enter")
        await logs.until(lambda: "'25:00' is not a time" in logs.row(LogNarrowing))
        await logs.press(*["backspace"] * 5)
        await logs.type(clock_text(1500))
        await logs.press("enter")
        await logs.until(lambda: "step 1500" in logs.cursor_line)
        await logs.press("l")
        await logs.until(lambda: len(logs.lines()) == 2)
        assert "only warnings and errors" in logs.row(LogNarrowing)
        await logs.press("l", "l")
        await logs.until(lambda: len(logs.lines()) > 20)
        await logs.press("g")
        await logs.until(lambda: "step 0" in logs.cursor_line)
        await logs.press("G")
        await logs.until(lambda: "step 1999" in logs.cursor_line and logs.view.is_following)


async def test_selected_lines_are_copied_without_colours(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        with (tmp_path / "trainer.log").open("a") as file:
            file.write("\x1b[31mred\x1b[0m\n\x1b[1mbold\x1b[0m\n")
        await logs.until(lambda: "bold" in logs.cursor_line)
        await logs.press("m", "up", "y")
        await logs.until(lambda: logs.app.state.outcome is not None and "copied 2 lines" in logs.app.state.outcome.text)
        assert logs.app.clipboard == "trainer: red\ntrainer: bold"


async def test_long_lines_are_cut_with_a_sign_shifted_or_folded(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        await logs.press("tab")
        with (tmp_path / "api.log").open("a") as file:
            file.write("a" * 98 + "END\n")
        await logs.until(lambda: logs.cursor_line.endswith("a…"))
        await logs.press("right")
        await logs.until(lambda: logs.cursor_line.endswith("aEND") and logs.cursor_line.startswith("▌…a"))
        await logs.press("w")
        await logs.until(lambda: logs.lines()[-1].startswith("▌aaaaEND") or logs.lines()[-1].endswith("END"))
        assert len(logs.lines()[-2]) == 98


async def test_a_folded_line_that_is_taller_than_the_page_ends_with_a_sign(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        await logs.press("tab", "w")
        with (tmp_path / "api.log").open("a") as file:
            file.write("b" * 5000 + "END\n")
        await logs.until(lambda: logs.lines()[-1].endswith("b…"))
        assert len(logs.lines()) == logs.view.rows


def test_less_opens_at_the_place_and_another_pager_at_least_opens_the_log(tmp_path: Path) -> None:
    log = tmp_path / "api.log"
    assert pager_command("", log, 120) == ["less", "-R", "+120P", str(log)]
    assert pager_command("less -S", log, 120) == ["less", "-S", "-R", "+120P", str(log)]
    assert pager_command("most", log, 120) == ["most", str(log)]
