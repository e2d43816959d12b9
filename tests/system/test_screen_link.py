"""What a screen sends over a line: every frame stands as it was painted, and a key costs what it changes."""

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


class Sight:
    """A terminal that is sent only what differs, beside one that is sent everything."""

    def __init__(self) -> None:
        self.cells = TerminalCells()
        self.screens = [pyte.Screen(COLUMNS, ROWS) for _ in range(2)]
        self._streams = [pyte.Stream(screen) for screen in self.screens]

    def paint(self, update: LayoutUpdate | ChopsUpdate) -> str:
        """What was sent; both must show the same."""
        sent = self.cells.sent_for(update, Size(COLUMNS, ROWS), CONSOLE)
        self._streams[0].feed(sent)
        self._streams[1].feed(update.render_segments(CONSOLE))
        ours, theirs = ([[_seen(s.buffer[y][x]) for x in range(COLUMNS)] for y in range(ROWS)] for s in self.screens)
        assert ours == theirs
        return sent


def _seen(character: pyte.screens.Char) -> tuple[object, ...]:
    """A character as the eye has it: a space has no colour of its own."""
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


def test_whatever_follows_whatever_the_terminal_shows_what_was_painted() -> None:
    for first in FRAMES.values():
        for second in FRAMES.values():
            sight = Sight()
            sight.paint(first)
            sight.paint(second)
            assert sight.paint(second) == ""


def test_a_letter_that_changes_is_all_that_is_sent() -> None:
    sight = Sight()
    sight.paint(FRAMES["plain"])
    assert sight.paint(whole([("hello World ", None)], [BLANK], [BLANK])) == "\x1b[1;7HW"


def test_a_terminal_that_was_changed_by_others_is_painted_anew() -> None:
    sight = Sight()
    sight.paint(FRAMES["plain"])
    sight.cells.forget()
    assert "hello world" in sight.paint(FRAMES["plain"])


@pytest.mark.parametrize("span", [(0, 12), (4, 8), (6, 7)])
def test_a_part_of_a_row_is_painted_where_it_lies(span: tuple[int, int]) -> None:
    sight = Sight()
    sight.paint(FRAMES["plain"])
    begin, end = span
    text = "hello world "[begin:end].upper()
    strip = Strip([Segment("hello world "[:begin] + text + "hello world "[end:], None)])
    sight.paint(ChopsUpdate([{0: strip}], [(0, begin, end)], [[COLUMNS]]))
    assert sight.screens[0].display[0][begin:end] == text
