"""Sharing out the cells of a bar. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def split_cells(parts: Sequence[int], total: int, num_cells: int) -> list[int]:
    """Cells for each part of `total`, together at most `num_cells`; no part that is there vanishes.

    For example parts 36, 22 and 1 of 80 in 40 cells: 18, 11, 1; the other 10 are free.
    """
    if total <= 0 or num_cells <= 0:
        return [0] * len(parts)
    cells: list[int] = []
    sum_so_far = 0
    for part in parts:
        sum_so_far += max(0, part)
        end = min(num_cells, round(sum_so_far * num_cells / total))
        cells.append(max(0, end - sum(cells)))
    for place, part in enumerate(parts):
        if part > 0 and cells[place] == 0:
            largest = max(range(len(cells)), key=cells.__getitem__)
            if sum(cells) < num_cells:
                cells[place] = 1
            elif cells[largest] > 1:
                cells[place], cells[largest] = 1, cells[largest] - 1
    return cells
