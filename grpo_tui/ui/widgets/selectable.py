"""Selecting text with the mouse in widgets that draw their own rows.

Textual (8.2) finds the text under the pointer by a mark on every piece that is painted; such marks would make every
piece a style of its own. Rows and cells are enough here: a selection is from one cell of a row to one of another.
"""

from __future__ import annotations

from rich.cells import cell_len, chop_cells
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Offset
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

SELECTED = Style(reverse=True)
"""Seen in every theme, and without colours."""


class Selectable(Widget):
    """Base of widgets whose text is rows of cells."""

    ALLOW_SELECT = True

    @property
    def num_text_rows(self) -> int:
        """Rows, also those that are scrolled out of sight."""
        raise NotImplementedError

    def text_row(self, row: int) -> str:
        """The text of a row as it is read."""
        raise NotImplementedError

    def text_offset(self, x: int, y: int) -> Offset:
        """The cell and the row of the text at a place of the widget's content."""
        offset = self.scroll_offset
        return Offset(max(0, x + offset.x), max(0, y + offset.y))

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text; Textual joins that of several widgets."""
        first = 0 if selection.start is None else selection.start.y
        last = self.num_text_rows - 1 if selection.end is None else min(selection.end.y, self.num_text_rows - 1)
        rows = []
        for row in range(first, last + 1):
            if (span := selection.get_span(row)) is not None:
                rows.append(_cells_between(self.text_row(row), *span).rstrip())
        return "\n".join(rows), "\n"

    def with_selection(self, strip: Strip, row: int, first_cell: int = 0) -> Strip:
        """A painted row with its selected part marked; it begins at `first_cell` of the text."""
        selection = self.text_selection
        span = None if selection is None else selection.get_span(row)
        if span is None:
            return strip
        length = strip.cell_length
        start = min(max(0, span[0] - first_cell), length)
        end = length if span[1] == -1 else min(max(start, span[1] - first_cell), length)
        marked = [*Segment.apply_style(strip.crop(start, end), post_style=SELECTED)]
        return Strip.join([strip.crop(0, start), Strip(marked, end - start), strip.crop(end, length)])


def _cells_between(text: str, start: int, end: int) -> str:
    """The characters from one cell on, up to another; -1 is the end."""
    before = chop_cells(text, start)[0] if 0 < start < cell_len(text) else "" if start == 0 else text
    rest = text[len(before) :]
    if end == -1 or end - start >= cell_len(rest):
        return rest
    return chop_cells(rest, end - start)[0] if end > start and rest else ""
