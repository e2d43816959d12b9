"""The moments of the GPU screen laid out in the columns of a chart. Pure.

A column is a round number of seconds and begins at a multiple of it, so that columns stay as they are while the run
grows, and only the last ones are redrawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from grpo_tui.view.gpus.state import GpuFigures, GpuMoment

COLUMN_S = (
    2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300, 450, 600, 900, 1200, 1800, 2700, 3600,
    5400, 7200, 10800, 14400, 21600, 43200, 86400,
)  # fmt: skip
"""Each new column sends a line of the chart to the terminal: two seconds keep that below 4 kB/s."""
MOST_CELLS = 4
"""Of a column: the first samples of a run do not fill the screen."""
Figures = TypeVar("Figures")
HELD_S = 15.0
"""How long a sample counts: three sampling intervals of a run without an open screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The history as columns, the oldest first; an empty one has nothing that was sampled."""

    start: float
    column_s: int
    moments: tuple[tuple[GpuMoment, ...], ...]
    """Each column as often as it has cells."""
    cells: int = 1
    """How many cells wide a column is drawn."""

    @property
    def end(self) -> float:
        """When the last column ends."""
        return self.start + self.column_s * (len(self.moments) // self.cells)


def laid_out(moments: Sequence[GpuMoment], num_columns: int, span_s: float | None = None) -> Columns:
    """Share out the moments of the last `span_s` seconds, or all, over at most `num_columns` cells.

    Where these are more than columns, as in the first minutes of a run, a column is several cells wide.
    """
    if not moments or num_columns <= 0:
        return Columns(start=0.0, column_s=COLUMN_S[0], moments=())
    last = moments[-1].time
    first = moments[0].time if span_s is None else max(moments[0].time, last - span_s)
    lasts = last - first if span_s is None else span_s
    column_s = next((each for each in COLUMN_S if lasts / each <= num_columns - 1), COLUMN_S[-1])
    start = math.floor(first / column_s) * column_s
    num = min(num_columns, math.floor((last - start) / column_s) + 1)
    start = max(start, (math.floor(last / column_s) - num + 1) * column_s)
    columns: list[list[GpuMoment]] = [[] for _ in range(num)]
    held: GpuMoment | None = None
    for moment in moments:
        place = math.floor((moment.time - start) / column_s)
        if place < 0:
            held = moment
        elif place < num:
            columns[place].append(moment)
    for place, column in enumerate(columns):
        if column:
            held = column[-1]
        elif held is not None and start + place * column_s - held.time <= max(HELD_S, column_s):
            column.append(held)
    cells = min(MOST_CELLS, num_columns // num)
    wide = tuple(tuple(column) for column in columns for _ in range(cells))
    return Columns(start=start, column_s=column_s, moments=wide, cells=cells)


def figures_of(columns: Columns, index: int, machine: str | None = None) -> list[list[GpuFigures]]:
    """What each column has of one GPU."""
    return [[figures for moment in column if (figures := moment.gpu(index, machine))] for column in columns.moments]


def means(columns: Iterable[Sequence[Figures]], value: Callable[[Figures], float | None]) -> list[float | None]:
    """The mean of a figure in each column; None where it was not told."""
    found: list[float | None] = []
    for column in columns:
        known = [told for each in column if (told := value(each)) is not None]
        found.append(sum(known) / len(known) if known else None)
    return found


def peaks(columns: Iterable[Sequence[Figures]], size: Callable[[Figures], int | None]) -> list[Figures | None]:
    """What each column has where `size` was greatest; None where it was never told."""
    found: list[Figures | None] = []
    for column in columns:
        known = [(told, place) for place, each in enumerate(column) if (told := size(each)) is not None]
        found.append(column[max(known)[1]] if known else None)
    return found
