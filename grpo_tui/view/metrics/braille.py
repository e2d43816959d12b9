"""A canvas of two by four dots a cell, in braille: lines, dashed lines, and who drew each cell last. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

COLUMNS, ROWS = 2, 4
"""Dots a cell."""
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
DASH = 4
"""Columns of dots that a dashed line draws, and leaves out."""


class Canvas:
    """Dots from the top left; what lies outside is not drawn."""

    def __init__(self, width: int, height: int) -> None:
        """Args are in cells."""
        self.width, self.height = width, height
        self._dots = [[0] * width for _ in range(height)]
        self._owners: list[list[str]] = [[""] * width for _ in range(height)]

    @property
    def num_columns(self) -> int:
        """Of dots."""
        return self.width * COLUMNS

    @property
    def num_rows(self) -> int:
        """Of dots."""
        return self.height * ROWS

    def dot(self, x: int, y: int, owner: str) -> None:
        """Set one dot; a cell has the style of its last dot."""
        if 0 <= x < self.num_columns and 0 <= y < self.num_rows:
            self._dots[y // ROWS][x // COLUMNS] |= _BITS[y % ROWS][x % COLUMNS]
            self._owners[y // ROWS][x // COLUMNS] = owner

    def polyline(self, points: Sequence[tuple[int, int]], owner: str, *, is_dashed: bool = False) -> None:
        """Join points by straight lines; one point alone is a dot."""
        if len(points) == 1:
            self.dot(*points[0], owner)
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            length = max(abs(x1 - x0), abs(y1 - y0))
            for place in range(length + 1):
                x = x0 + round((x1 - x0) * place / length) if length else x0
                if is_dashed and x // DASH % 2:
                    continue
                self.dot(x, y0 + round((y1 - y0) * place / length) if length else y0, owner)

    def cell(self, column: int, row: int) -> tuple[str, str]:
        """The character of a cell and its owner; a space where nothing was drawn."""
        dots = self._dots[row][column]
        return (chr(_BLANK + dots) if dots else " "), self._owners[row][column]


def thinned(dots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same line with at most four points a column: where it enters and leaves, its highest and its lowest."""
    kept: list[tuple[int, int]] = []
    for _, column in itertools.groupby(dots, key=lambda dot: dot[0]):
        inside = list(column)
        if len(inside) > 4:
            ends = (min(inside, key=lambda dot: dot[1]), max(inside, key=lambda dot: dot[1]))
            inside = [inside[0], *ends, inside[-1]]
        kept += inside
    return kept
