"""The log screen over logs of a run without a supervisor: what each key does to the lines on the page."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import pytest
from screen_fakes import NOW, FakeConnection, run_status, service
from shown_screen import Shown, open_app

from grpo_engine.wire.supervisor import Snapshot
from grpo_tui.ui.widgets.log_page import LogNarrowing, LogPage, LogsTitle
from grpo_tui.view.logs.pager import line_at, pager_command, show
from grpo_tui.view.logs.state import LogsView

pytestmark = pytest.mark.slow
NUM_LINES = 2000


def clock_text(second: float) -> str:
    return datetime.fromtimestamp(NOW - NUM_LINES + second).strftime("%Y-%m-%d %H:%M:%S")


class Logs(Shown):
    """The open log screen."""

    @property
    def view(self) -> LogsView:
        return self.app.state.logs

    async def type(self, text: str) -> None:
        """Type into the line that a key opened, once it has the focus."""
        await self.until(lambda: self.view.prompt is not None and self.app.focused is not None)
        await self.press(*text)

    @property
    def page(self) -> list[str]:
        return [line.rstrip() for line in self.lines(LogPage)]

    @property
    def cursor_line(self) -> str:
        return next((line for line in self.page if line.startswith("▌")), "")

    async def until_cursor_at(self, words: str) -> None:
        await self.until(lambda: words in self.cursor_line)

    async def until_message(self, words: str) -> None:
        await self.until(lambda: self.app.state.outcome is not None and words in self.app.state.outcome.text)


def append(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


@asynccontextmanager
async def logs_of(run_folder: Path, size: tuple[int, int] = (100, 30)) -> AsyncIterator[Logs]:
    """The log screen of a run with two services: one wrote every second, the other an error half-way."""
    api = "".join(f"{clock_text(second)} INFO step {second}\n" for second in range(NUM_LINES))
    trainer = f"{clock_text(NUM_LINES // 2 + 0.5)} ERROR it broke\n  here\n{clock_text(NUM_LINES - 3)} INFO again\n"
    (run_folder / "api.log").write_text(api)
    (run_folder / "trainer.log").write_text(trainer)
    status = run_status(run=run_folder.name, services=[service("api"), service("trainer")])
    connection = FakeConnection()
    connection.send(Snapshot(number=1, status=status))
    async with open_app(run_folder, connection, size) as screen:
        logs = Logs(screen.app, screen.pilot, connection)
        await logs.until(lambda: bool(logs.app.state.services))
        await logs.go_to("logs")
        await logs.until_cursor_at(f"step {NUM_LINES - 1}")
        yield logs


async def test_all_logs_are_merged_by_time_each_line_with_its_service_and_new_lines_are_added(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        rows = [line.lstrip("▌ ").split()[:1] + line.split()[-1:] for line in logs.page[-4:]]
        assert rows == [["trainer", "again"], ["api", "1997"], ["api", "1998"], ["api", "1999"]] or rows == [
            ["api", "1997"], ["trainer", "again"], ["api", "1998"], ["api", "1999"],
        ]  # fmt: skip
        assert "all logs by time" in logs.text(LogsTitle)
        assert "following" in logs.text(LogsTitle)
        append(tmp_path / "trainer.log", "one more\n")
        await logs.until_cursor_at("one more")
        await logs.press("shift+tab", "shift+tab")
        await logs.until(lambda: logs.view.chosen == "trainer" and "one more" in logs.cursor_line)
        assert len(logs.page) == 4


async def test_in_the_past_an_unfinished_last_line_without_a_time_stays_below_the_line_before_it(
    tmp_path: Path,
) -> None:
    async with logs_of(tmp_path) as logs:
        append(tmp_path / "trainer.log", "half a line")
        await logs.until(lambda: logs.page[-1].endswith("half a line"))  # it may go on at any time
        await logs.press("t")
        await logs.until(lambda: "at that time" in logs.text(LogsTitle) and not logs.view.is_fresh)
        await logs.until(lambda: logs.page[-1].endswith("step 1999"))
        again = next(place for place, line in enumerate(logs.page) if line.endswith("INFO again"))
        assert logs.page[again + 1].endswith("half a line")
        assert [line.split()[-1] for line in logs.page[-2:]] == ["1998", "1999"]


async def test_a_search_goes_to_the_nearest_match_and_counts_all_of_the_chosen_logs(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        await logs.press("slash")
        await logs.type("step 10.0")
        await logs.press("enter")
        await logs.until_text(LogNarrowing, "match 10 of 10 lines")
        assert "step 1090" in logs.cursor_line
        assert "paused" in logs.text(LogsTitle)
        await logs.press("N")
        await logs.until(lambda: "step 1080" in logs.cursor_line and "match 9 of 10" in logs.text(LogNarrowing))
        await logs.press("n", "n")
        await logs.until_cursor_at("step 1090")
        await logs.press("n")
        await logs.until_message("not found below")
        await logs.press("escape")
        await logs.until(lambda: logs.view.searched == "")
        assert "step 1090" in logs.cursor_line
        await logs.press("tab", "tab", "slash")  # matches are counted anew in the logs that are chosen next
        await logs.type("o")
        await logs.press("enter")
        await logs.until(lambda: logs.view.chosen == "trainer" and "of 2 lines" in logs.text(LogNarrowing))
        await logs.press("0")
        await logs.until(lambda: logs.view.chosen is None and f"{NUM_LINES + 2:,} lines" in logs.text(LogNarrowing))
        await logs.press("tab")
        await logs.until(lambda: logs.view.chosen == "api" and f"{NUM_LINES:,} lines" in logs.text(LogNarrowing))


async def test_a_filter_applies_as_it_is_typed_and_removing_it_shows_the_lines_around_the_match(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        await logs.press("ampersand")
        await logs.type("broke(")
        await logs.until_text(LogNarrowing, "not yet a regular expression")
        await logs.press("backspace")
        await logs.until(lambda: [line.split()[-1] for line in logs.page] == ["broke"])
        await logs.press("enter", "f", "escape")
        await logs.until(lambda: logs.view.pattern == "" and "it broke" in logs.cursor_line and len(logs.page) > 20)
        place = next(place for place, line in enumerate(logs.page) if "it broke" in line)
        assert "step 1000" in logs.page[place - 1]
        assert "here" in logs.page[place + 1]


async def test_keys_go_to_errors_times_and_both_ends_and_filter_by_level(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        await logs.press("E")
        await logs.until_cursor_at("it broke")
        await logs.press("colon")
        await logs.type("25:00")
        await logs.press("enter")
        await logs.until_text(LogNarrowing, "'25:00' is not a time")
        await logs.press(*["backspace"] * 5)
        await logs.type(clock_text(1500))
        await logs.press("enter")
        await logs.until_cursor_at("step 1500")
        await logs.press("l")
        await logs.until(lambda: len(logs.page) == 2)
        assert "only warnings and errors" in logs.text(LogNarrowing)
        await logs.press("l", "l")
        await logs.until(lambda: len(logs.page) > 20)
        await logs.press("g")
        await logs.until_cursor_at("step 0")
        await logs.press("G")
        await logs.until(lambda: "step 1999" in logs.cursor_line and logs.view.is_following)


async def test_selected_lines_are_copied_without_colours(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        append(tmp_path / "trainer.log", "\x1b[31mred\x1b[0m\n\x1b[1mbold\x1b[0m\n")
        await logs.until_cursor_at("bold")
        await logs.press("m", "up", "y")
        await logs.until_message("copied 2 lines")
        assert logs.app.clipboard == "trainer: red\ntrainer: bold"


async def test_long_lines_are_cut_with_a_sign_shifted_or_folded_to_the_height_of_the_page(tmp_path: Path) -> None:
    async with logs_of(tmp_path) as logs:
        await logs.press("tab")
        append(tmp_path / "api.log", "a" * 98 + "END\n")
        await logs.until(lambda: logs.cursor_line.endswith("a…"))
        await logs.press("right")
        await logs.until(lambda: logs.cursor_line.endswith("aEND") and logs.cursor_line.startswith("▌…a"))
        await logs.press("W")
        await logs.until(lambda: logs.page[-1].startswith("▌aaaaEND") or logs.page[-1].endswith("END"))
        assert len(logs.page[-2]) == 98
        append(tmp_path / "api.log", "b" * 5000 + "END\n")
        await logs.until(lambda: logs.page[-1].endswith("b…"))
        assert len(logs.page) == logs.view.rows


def test_less_opens_the_log_at_the_line_and_another_pager_opens_the_log() -> None:
    assert pager_command("", 120) == ["less", "-R", "+120g"]
    assert pager_command("less -S", 120) == ["less", "-S", "-R", "+120g"]
    assert pager_command("most", 120) == ["most"]


def test_a_pager_gets_no_control_characters_of_a_log_and_keeps_its_lines_and_colours(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "api.log"
    hostile = (
        "first\n\x1b]52;c;Y29weQ==\x07\x1b[2Jgone\n\x1b[31mred\n\u202eright\x9bto\x00left\n\x1b[8mhidden\x1b[0m\nlast"
    )
    log.write_text(hostile)
    show(["cat"], log)
    shown = capfd.readouterr().out
    assert set(re.findall(r"\x1b[^m]*m", shown)) <= {"\x1b[31m", "\x1b[0m"}
    assert not set(re.sub(r"\x1b\[\d*m", "", shown)) & set("\x1b\x07\x00\x9b\u202e")
    assert len(shown.splitlines()) == 6
    assert shown.splitlines()[-1] == "last"
    assert [line_at(log, offset) for offset in (0, 5, 6, len(hostile.encode()))] == [1, 1, 2, 6]


def test_a_pager_that_is_closed_early_and_one_that_does_not_exist_end_nothing(tmp_path: Path) -> None:
    log = tmp_path / "api.log"
    log.write_text("a line\n" * 200_000)
    show(["head", "-c", "1"], log)
    with pytest.raises(OSError, match="No such file"):
        show(["no-such-pager"], log)
