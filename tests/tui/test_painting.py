"""What the painter sends: nothing that a terminal obeys, nothing beyond its edge; and no error ends the app."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from shown_screen import shown
from textual import timer
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.geometry import Region, Size
from textual.strip import Strip

from grpo_engine.wire.terminal_text import printable
from grpo_tui.ui.terminal.changed_cells import ChangedCells, TerminalCells
from grpo_tui.ui.terminal.line_pace import LinePace

CONSOLE = Console(color_system="truecolor", force_terminal=True)
HOSTILE = ["a\x1b]0;owned\x07b", "a\x9b2Jb", "a\u202eb\u2066c", "a\u200bb\ufeff", "a\x00\x7fb", "a\u00adb"]


def sent(text: str, size: Size, at: tuple[int, int] = (0, 0)) -> str:
    """What is sent for a text at a row and column."""
    row, column = at
    strip = Strip([Segment(text)])
    update = LayoutUpdate([[strip]], Region(column, row, cell_len(text), 1))
    return TerminalCells().sent_for(update, size, CONSOLE)


@pytest.mark.parametrize("text", HOSTILE, ids=[ascii(text) for text in HOSTILE])
def test_control_characters_are_not_sent_and_take_no_cell(text: str) -> None:
    shown_text = sent(text, Size(20, 2)).removeprefix("\x1b[1;1H")
    assert not [each for each in shown_text if not each.isprintable()]
    assert cell_len(shown_text) == cell_len(text)


def test_text_without_control_characters_is_unchanged() -> None:
    for text in ("reward/mean 0.5", "奖励 é שלום", "a\u00a0b", ""):
        assert printable(text) == text
    assert printable("a\x1b[31m\nb\tc", keep="\n\t") == "a[31m\nb\tc"


def test_an_update_of_a_larger_screen_sends_nothing_beyond_the_edge() -> None:
    assert sent("wide", Size(80, 24), at=(3, 100)) == ""
    assert sent("wide", Size(80, 24), at=(30, 0)) == ""
    assert sent("wide", Size(80, 24), at=(3, 78)).endswith("wi")


def test_a_frame_that_cannot_be_painted_is_left_out_and_a_whole_one_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(TerminalCells):
        num_forgotten = 0

        def sent_for(self, update: LayoutUpdate | ChopsUpdate, size: Size, console: Console) -> str:
            raise ValueError("a bug in the painter")

        def forget(self) -> None:
            self.num_forgotten += 1

    cells, asked = Broken(), []
    update = LayoutUpdate([[Strip([Segment("text")])]], Region(0, 0, 4, 1))
    painted = ChangedCells(update, cells, Size(80, 24), LinePace(), on_error=lambda: asked.append("whole frame"))
    assert painted.render_segments(CONSOLE) == ""
    assert asked == ["whole frame"]
    assert cells.num_forgotten == 1
    assert "could not be painted" in caplog.text


async def test_a_timer_whose_time_has_passed_when_it_begins_runs_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shown(tmp_path) as screen:
        has_run = asyncio.Event()
        late = itertools.count(timer._time.get_time(), 0.1)
        monkeypatch.setattr(timer._time, "get_time", lambda: next(late))
        screen.app.set_timer(1 / 120, has_run.set)
        async with asyncio.timeout(60):
            await has_run.wait()
