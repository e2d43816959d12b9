"""What stands on the terminal, cell by cell, so that only cells that differ are sent.

Textual (8.2) paints a whole screen for every layout, and several for a key that opens another screen: 50 to 110 kB at
120×36, two seconds of a poor line, most of it what stands there already.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

from rich.cells import cell_len
from rich.color import Color, ColorSystem
from rich.console import Console
from rich.style import Style
from textual._compositor import ChopsUpdate, CompositorUpdate, LayoutUpdate
from textual.geometry import Size
from textual.strip import Strip

WORTH_A_MOVE = 5
"""So many cells that are the same are sent again between two that differ: moving the cursor costs more."""


class Pen(NamedTuple):
    """How characters are written, each part as the parameters of an SGR sequence; empty is the terminal's own."""

    attributes: str = ""
    """Bold, reverse and so on; they can only be taken away all at once."""
    foreground: str = ""
    background: str = ""


PLAIN = Pen()


Cell = tuple[str, Pen]
"""One column of one row: a character, or a few that combine, empty in the further cells of a wide one."""
UNKNOWN: Cell = ("\0", PLAIN)
"""Differs from every cell that is painted."""


class TerminalCells:
    """What was sent last to each cell of a terminal."""

    def __init__(self) -> None:
        self._size = Size()
        self._rows: list[list[Cell]] = []

    def forget(self) -> None:
        """Send every cell anew: another size, or another program, may have changed what stands there."""
        self._size = Size()

    def sent_for(self, update: LayoutUpdate | ChopsUpdate, size: Size, console: Console) -> str:
        """The characters that make the terminal so; from now on it is."""
        if size != self._size:
            self._size = size
            self._rows = [[UNKNOWN] * size.width for _ in range(size.height)]
        colours = console._color_system or ColorSystem.TRUECOLOR
        pieces: list[str] = []
        for y, x, strips in _painted(update):
            if y < size.height:
                painted = [cell for strip in strips for cell in _cells(strip, colours)]
                pieces += _brought(self._rows[y], painted[: size.width - x], x, y)
        return "".join(pieces)


class ChangedCells(CompositorUpdate):
    """An update of Textual's, of which only what differs is sent."""

    def __init__(self, update: LayoutUpdate | ChopsUpdate, terminal: TerminalCells, size: Size) -> None:
        self._update, self._terminal, self._size = update, terminal, size

    def render_segments(self, console: Console) -> str:
        """What Textual writes; it asks only when it does write."""
        return self._terminal.sent_for(self._update, self._size, console)


def _painted(update: LayoutUpdate | ChopsUpdate) -> Iterator[tuple[int, int, Sequence[Strip]]]:
    """Row, column, and what is painted from there on."""
    if isinstance(update, LayoutUpdate):
        for y, strips in enumerate(update.strips, update.region.y):
            yield y, update.region.x, list(strips)
        return
    for y, begin, end in update.spans:
        for strip_end, (x, strip) in zip(update.chop_ends[y], update.chops[y].items(), strict=False):
            if strip is not None and x < end and strip_end > begin:
                yield y, max(x, begin), [strip.crop(max(0, begin - x), min(end, strip_end) - x)]


def _cells(strip: Strip, colours: ColorSystem) -> list[Cell]:
    cells: list[Cell] = []
    for segment in strip:
        cells += _cells_of(segment.text, _pen(segment.style, colours) if segment.style else PLAIN)
    return cells


@lru_cache(maxsize=4096)
def _pen(style: Style, colours: ColorSystem) -> Pen:
    def codes(colour: Color | None, *, foreground: bool) -> str:
        return ";".join(colour.downgrade(colours).get_ansi_codes(foreground)) if colour is not None else ""

    background = codes(style.bgcolor, foreground=False)
    attributes = Strip.render_ansi(style.without_color, colours)
    return Pen(attributes, codes(style.color, foreground=True), background)


@lru_cache(maxsize=4096)
def _cells_of(text: str, pen: Pen) -> tuple[Cell, ...]:
    if text.isascii() or all(cell_len(character) == 1 for character in text):
        if pen.attributes or not pen.foreground or " " not in text:
            return tuple(zip(text, repeat(pen)))
        blank = (" ", pen._replace(foreground=""))  # a space shows no ink
        return tuple([blank if character == " " else (character, pen) for character in text])
    widths = [cell_len(character) for character in text]
    if 0 in widths or sum(widths) != cell_len(text):  # what combines is one piece, like a very wide character
        return ((text, pen), *[("", pen)] * (cell_len(text) - 1))
    return tuple(
        cell
        for character, width in zip(text, widths, strict=True)
        for cell in ((character, pen), *[("", pen)] * (width - 1))
    )


def _brought(row: list[Cell], painted: list[Cell], x: int, y: int) -> Iterator[str]:
    """What is sent for one row, which then holds what was painted."""
    before = row[x : x + len(painted)]
    if before == painted:
        return
    row[x : x + len(painted)] = painted
    differing = [place for place, (old, new) in enumerate(zip(before, painted, strict=True)) if old != new]
    sent_to = 0
    for place in differing:
        if place < sent_to:
            continue
        begin, end = place, _last_of_run(differing, place) + 1
        # Half of a wide character that is written over takes the other half with it.
        while begin and not (before[begin][0] and painted[begin][0]):
            begin -= 1
        while end < len(painted) and not (before[end][0] and painted[end][0]):
            end += 1
        sent_to = end
        yield f"\x1b[{y + 1};{x + begin + 1}H"
        yield from _written(painted[begin:end])


def _last_of_run(differing: Sequence[int], first: int) -> int:
    """The last of the places from the first on that have no more than a few between them."""
    last = first
    for place in differing[bisect_left(differing, first) :]:
        if place - last > WORTH_A_MOVE:
            break
        last = place
    return last


def _written(cells: Sequence[Cell]) -> Iterator[str]:
    """Characters, and before each what changes of the pen; it is put away at the end."""
    held = PLAIN
    for text, pen in cells:
        codes: list[str] = []
        if pen.attributes != held.attributes:
            codes, held = ["0", *filter(None, [pen.attributes])], Pen(attributes=pen.attributes)
        # A space shows no ink: the colour of that may stay.
        foreground = held.foreground if text == " " and not pen.attributes else pen.foreground
        if foreground != held.foreground:
            codes.append(foreground or "39")
        if pen.background != held.background:
            codes.append(pen.background or "49")
        if codes:
            held = Pen(pen.attributes, foreground, pen.background)
            yield f"\x1b[{';'.join(codes)}m"
        yield text
    if held != PLAIN:
        yield "\x1b[0m"
