"""What a screen sends to a terminal: only the cells that change, with the same result as a whole frame."""

from __future__ import annotations

from collections.abc import Sequence

import pyte
import pytest
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.geometry import Region, Size
from textual.strip import Strip

from grpo_tui.ui.terminal.changed_cells import TerminalCells

COLUMNS, ROWS = 12, 3
CONSOLE = Console(color_system="truecolor", force_terminal=True)
RED, BOLD, ON_BLUE = Style(color="#ff0000"), Style(bold=True), Style(bgcolor="#0000ff")


class TwoTerminals:
    """A terminal that gets only the cells that differ, and one that gets everything."""

    def __init__(self) -> None:
        self.cells = TerminalCells()
        self.screens = [pyte.Screen(COLUMNS, ROWS) for _ in range(2)]
        self._streams = [pyte.Stream(screen) for screen in self.screens]

    def paint(self, update: LayoutUpdate | ChopsUpdate) -> str:
        """Paint both, which must show the same; the characters sent to the first."""
        sent = self.cells.sent_for(update, Size(COLUMNS, ROWS), CONSOLE)
        self._streams[0].feed(sent)
        self._streams[1].feed(update.render_segments(CONSOLE))
        ours, theirs = ([[_seen(s.buffer[y][x]) for x in range(COLUMNS)] for y in range(ROWS)] for s in self.screens)
        assert ours == theirs
        return sent


def _seen(character: pyte.screens.Char) -> tuple[object, ...]:
    """A character as it is seen: a space has no foreground colour."""
    is_blank = character.data == " " and not (character.reverse or character.underscore or character.strikethrough)
    return (character.data, character.bg) if is_blank else tuple(character)


def whole(*rows: Sequence[tuple[str, Style | None]]) -> LayoutUpdate:
    """A whole screen of segments."""
    strips = [[Strip([Segment(text, style) for text, style in row])] for row in rows]
    return LayoutUpdate(list(strips), Region(0, 0, COLUMNS, ROWS))


BLANK = (" " * COLUMNS, None)
FRAMES = {
    "plain": whole([("hello world ", None)], [BLANK], [BLANK]),
    "a colour": whole([("hello ", RED), ("world ", None)], [BLANK], [BLANK]),
    "bold, then colours": whole([("he", BOLD), ("llo wor", RED + ON_BLUE), ("ld ", ON_BLUE)], [BLANK], [BLANK]),
    "wide characters": whole([("日本 x 語   ", RED)], [("a日b        ", None)], [BLANK]),
    "wide ones, one cell on": whole([("x日本 語    ", RED)], [("日ab        ", None)], [BLANK]),
    "reverse spaces": whole(
        [(" " * COLUMNS, Style(reverse=True))], [(" " * COLUMNS, ON_BLUE)], [("x" * COLUMNS, None)]
    ),
}


def test_after_any_two_frames_the_terminal_shows_the_second() -> None:
    for first in FRAMES.values():
        for second in FRAMES.values():
            terminals = TwoTerminals()
            terminals.paint(first)
            terminals.paint(second)
            assert terminals.paint(second) == ""


def test_only_a_letter_that_changes_is_sent() -> None:
    terminals = TwoTerminals()
    terminals.paint(FRAMES["plain"])
    assert terminals.paint(whole([("hello World ", None)], [BLANK], [BLANK])) == "\x1b[1;7HW"


def test_after_forget_every_cell_is_sent_again() -> None:
    terminals = TwoTerminals()
    terminals.paint(FRAMES["plain"])
    terminals.cells.forget()
    assert "hello world" in terminals.paint(FRAMES["plain"])


@pytest.mark.parametrize("span", [(0, 12), (4, 8), (6, 7)])
def test_a_part_of_a_row_is_painted_in_its_place(span: tuple[int, int]) -> None:
    terminals = TwoTerminals()
    terminals.paint(FRAMES["plain"])
    begin, end = span
    text = "hello world "[begin:end].upper()
    strip = Strip([Segment("hello world "[:begin] + text + "hello world "[end:], None)])
    terminals.paint(ChopsUpdate([{0: strip}], [(0, begin, end)], [[COLUMNS]]))
    assert terminals.screens[0].display[0][begin:end] == text
