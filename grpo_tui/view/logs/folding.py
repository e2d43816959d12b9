"""Where a long line of a log goes on in the next row: at a blank, or anywhere within a word that fills a row itself.

Only as much of it is looked at as there are rows: a line may have a megabyte.
"""

from __future__ import annotations

from rich.cells import cell_len, chop_cells

from grpo_tui.view.logs.tail import COLOUR

CHARACTERS_A_CELL = 8
"""More than this hardly ever combine in one cell; of those that do, a row takes fewer."""


def fold(text: str, columns: int, most: int) -> list[slice]:
    """The rows of a line, in order; one at least, and one more than `most` where there are more.

    A row is at most `columns` cells wide, but for one blank after it, which is not to be shown.
    """
    rows: list[slice] = []
    start = 0
    is_plain = text.isascii()
    while start < len(text) and len(rows) <= most:
        end = _row_end(text, start, columns, is_plain=is_plain)
        rows.append(slice(start, end))
        start = end
    return rows or [slice(0, 0)]


def beginning(text: str, num_cells: int) -> str:
    """As much of a line as fills so many cells, or more, with the colours in it: what is beyond is not looked at."""
    num_left = num_cells if text.isascii() else CHARACTERS_A_CELL * num_cells
    if len(text) <= num_left:
        return text
    end = 0
    for colour in COLOUR.finditer(text):
        if colour.start() - end >= num_left:
            break
        num_left -= colour.start() - end
        end = colour.end()
    return text[: end + num_left]


def _row_end(text: str, start: int, columns: int, *, is_plain: bool) -> int:
    full = _full_row_end(text, start, columns, is_plain=is_plain)
    if full >= len(text):
        return full
    if text[full] == " ":
        return full + 1
    word = text.rfind(" ", start, full) + 1
    if not text[start:word].strip():
        return full  # one word, or nothing but what it is indented by
    following = text[word : word + CHARACTERS_A_CELL * columns].partition(" ")[0]
    return word if cell_len(following) <= columns else full


def _full_row_end(text: str, start: int, columns: int, *, is_plain: bool) -> int:
    """Behind the last character that still fits; one is taken at least."""
    if is_plain:
        return min(start + columns, len(text))
    window = text[start : start + CHARACTERS_A_CELL * columns]
    if cell_len(window) <= columns:
        return start + len(window)
    return start + max(1, len(chop_cells(window, columns)[0]))
