"""The cells that the terminal shows, so that only cells that differ are sent.

Textual (8.2) paints a whole screen for every layout, and several when a key opens another screen: 50 to 110 kB at
120×36, two seconds on a slow connection, most of it unchanged.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.color import Color, ColorSystem
from rich.console import Console
from rich.style import Style
from textual._compositor import ChopsUpdate, CompositorUpdate, LayoutUpdate
from textual.geometry import Size
from textual.strip import Strip

from grpo_engine.wire.terminal_text import printable
from grpo_tui.ui.terminal.line_pace import LinePace

log = logging.getLogger(__name__)
WORTH_A_MOVE = 5
"""Up to this many equal cells between two that differ are sent again: moving the cursor costs more."""


class Pen(NamedTuple):
    """How characters are written, each part as the parameters of an SGR sequence; empty is the terminal's own."""

    attributes: str = ""
    """Bold, reverse and so on; SGR can only reset all of them at once."""
    foreground: str = ""
    background: str = ""


PLAIN = Pen()
UNKNOWN = "\0"
"""Differs from every character that is painted."""


@dataclass(slots=True)
class Row:
    """The cells of one row, as two lists of shared objects: many small objects would trigger the garbage collector."""

    texts: list[str]
    """A character, or a few that combine; empty in the further cells of a wide one."""
    pens: list[Pen]


class TerminalCells:
    """What was sent last to each cell of a terminal."""

    def __init__(self) -> None:
        self._size = Size()
        self._rows: list[Row] = []

    def forget(self) -> None:
        """Send every cell next time: another size or program may have changed the terminal."""
        self._size = Size()

    def sent_for(self, update: LayoutUpdate | ChopsUpdate, size: Size, console: Console) -> str:
        """The characters to send for an update; records its cells as shown."""
        if size != self._size:
            self._size = size
            self._rows = [Row([UNKNOWN] * size.width, [PLAIN] * size.width) for _ in range(size.height)]
        colours = console._color_system or ColorSystem.TRUECOLOR
        pieces: list[str] = []
        for y, x, strips in _painted(update):
            if y < size.height and x < size.width:  # an update may still be of the size before a resize
                pieces += _row_update(self._rows[y], _cells(strips, colours, size.width - x), x, y)
        return "".join(pieces)


class ChangedCells(CompositorUpdate):
    """An update of Textual, reduced to the cells that differ."""

    def __init__(
        self,
        update: LayoutUpdate | ChopsUpdate,
        terminal: TerminalCells,
        size: Size,
        pace: LinePace,
        on_error: Callable[[], None],
    ) -> None:
        self._update, self._terminal, self._size, self._pace = update, terminal, size, pace
        self._on_error = on_error

    def render_segments(self, console: Console) -> str:
        """The characters that Textual writes; called only when it writes.

        Textual ends the app on an exception here, so a frame that fails is left out and `on_error` paints a whole one.
        """
        try:
            sent = self._terminal.sent_for(self._update, self._size, console)
        except Exception:
            log.exception("a frame of the screen could not be painted (bug); painting all of it")
            self._terminal.forget()
            self._on_error()
            return ""
        return sent + self._pace.painted(len(sent), time.monotonic())


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


def _cells(strips: Iterable[Strip], colours: ColorSystem, width: int) -> Row:
    row = Row([], [])
    for strip in strips:
        for segment in strip:
            _put(row, segment.text, _pen(segment.style, colours) if segment.style else PLAIN)
    del row.texts[width:], row.pens[width:]
    return row


def _put(row: Row, text: str, pen: Pen) -> None:
    """Append text to a row, without what the terminal would obey; as many cells as Textual counted."""
    if not text.isprintable():
        text = set_cell_size(printable(text), cell_len(text))
    if text.isascii() or all(cell_len(character) == 1 for character in text):
        row.texts += text
        if pen.attributes or not pen.foreground or " " not in text:
            row.pens += [pen] * len(text)
        else:
            blank = _without_ink(pen)
            row.pens += [blank if character == " " else pen for character in text]
        return
    widths = [cell_len(character) for character in text]
    width = cell_len(text)
    if 0 in widths or sum(widths) != width:  # what combines is one piece, like a very wide character
        row.texts += [text, *[""] * (width - 1)]
    else:
        for character, columns in zip(text, widths, strict=True):
            row.texts += [character, *[""] * (columns - 1)]
    row.pens += [pen] * width


@lru_cache(maxsize=4096)
def _pen(style: Style, colours: ColorSystem) -> Pen:
    def codes(colour: Color | None, *, foreground: bool) -> str:
        return ";".join(colour.downgrade(colours).get_ansi_codes(foreground)) if colour is not None else ""

    background = codes(style.bgcolor, foreground=False)
    attributes = Strip.render_ansi(style.without_color, colours)
    return Pen(attributes, codes(style.color, foreground=True), background)


@lru_cache(maxsize=4096)
def _without_ink(pen: Pen) -> Pen:
    """The pen of a space, which shows no foreground."""
    return pen._replace(foreground="")


def _row_update(row: Row, painted: Row, x: int, y: int) -> Iterator[str]:
    """The characters for one row; updates its recorded cells."""
    size = len(painted.texts)
    texts, pens = row.texts[x : x + size], row.pens[x : x + size]
    if texts == painted.texts and pens == painted.pens:
        return
    row.texts[x : x + size], row.pens[x : x + size] = painted.texts, painted.pens
    pairs = zip(texts, painted.texts, pens, painted.pens, strict=True)
    differing = [place for place, (a, b, c, d) in enumerate(pairs) if a != b or c != d]
    sent_to = 0
    for place in differing:
        if place < sent_to:
            continue
        begin, end = place, _last_of_run(differing, place) + 1
        # Half of a wide character that is written over takes the other half with it.
        while begin and not (texts[begin] and painted.texts[begin]):
            begin -= 1
        while end < size and not (texts[end] and painted.texts[end]):
            end += 1
        sent_to = end
        yield f"\x1b[{y + 1};{x + begin + 1}H"
        yield from _written(painted.texts[begin:end], painted.pens[begin:end])


def _last_of_run(differing: Sequence[int], first: int) -> int:
    """The last place of the run of nearby places that begins at `first`."""
    last = first
    for place in differing[bisect_left(differing, first) :]:
        if place - last > WORTH_A_MOVE:
            break
        last = place
    return last


def _written(texts: Sequence[str], pens: Sequence[Pen]) -> Iterator[str]:
    """Characters with the SGR codes that change between them; reset at the end."""
    held, begin = PLAIN, 0
    for pen, run in groupby(pens):
        end = begin + len(list(run))
        text = "".join(texts[begin:end])
        begin = end
        codes: list[str] = []
        if pen.attributes != held.attributes:
            codes, held = ["0", *filter(None, [pen.attributes])], Pen(attributes=pen.attributes)
        # A space shows no ink: the colour of that may stay.
        foreground = held.foreground if not pen.attributes and text.isspace() else pen.foreground
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
