"""Charts of block characters with labelled axes, as lines of styled text: columns over an axis, and bars in a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from textual.content import Content

from grpo_tui.ui.glyphs import SPARK_BARS
from grpo_tui.ui.widgets.lines import Styled, fit, line

LEVELS = len(SPARK_BARS)
AXIS_WIDTH = 7
"""Columns of the numbers at the left, their stroke included."""


def log_share(count: int, most: int) -> float:
    """How high a count stands on a logarithmic scale from 0 to `most`, as a share of it."""
    return math.log1p(count) / math.log1p(most) if most > 0 else 0.0


def columns_chart(
    shares: Sequence[float],
    styles: Sequence[str],
    height: int,
    labels: Mapping[int, str],
    *,
    marks: Mapping[int, str] | None = None,
) -> list[Content]:
    """`height` rows of columns, without what stands below the axis.

    Args:
        shares: height of each column, 0 to 1; what is not 0 shows at least its lowest block.
        styles: of each column.
        labels: text at the left by row, 0 the topmost.
        marks: columns with an upright stroke where no block stands, and its style.
    """
    marks = marks or {}
    levels = [max(1, round(share * height * LEVELS)) if share > 0 else 0 for share in shares]
    rows: list[Content] = []
    for row in range(height):
        floor = (height - 1 - row) * LEVELS
        pieces: list[Styled] = []
        for place, level in enumerate(levels):
            inside = min(LEVELS, level - floor)
            if inside > 0:
                piece = (SPARK_BARS[inside - 1], styles[place])
            elif place in marks:
                piece = ("│", marks[place])
            else:
                piece = (" ", "")
            _append(pieces, piece)
        label = labels.get(row, "")
        stroke = "┤" if label else "│"
        rows.append(line((fit(label, AXIS_WIDTH - 1, right=True), ".muted"), (stroke, ".faint"), *pieces))
    return rows


def axis_lines(num_columns: int, ticks: Mapping[int, str]) -> list[Content]:
    """The axis below columns, and the words at its ticks, each centred; one that would meet an end's is left out."""
    strokes = "".join("┴" if place in ticks else "─" for place in range(num_columns))
    words = " " * (AXIS_WIDTH + num_columns)
    ends = (min(ticks, default=0), max(ticks, default=0))
    for place in sorted(ticks, key=lambda place: (place not in ends, place)):
        text = ticks[place]
        start = max(0, min(AXIS_WIDTH + place - len(text) // 2, len(words) - len(text)))
        end = start + len(text)
        if not words[max(0, start - 1) : end + 1].strip() and end <= len(words):
            words = words[:start] + text + words[end:]
    return [
        line((" " * (AXIS_WIDTH - 1) + "└" + strokes, ".faint")),
        line((words, ".muted")),
    ]


def count_labels(most: int, height: int) -> dict[int, str]:
    """Counts of a logarithmic axis: the greatest at the top, some below, each where a column of it would end."""
    labels = {0: short_count(most)}
    if height < 4:
        return labels
    for power in range(int(math.log10(most)) if most > 1 else 0, -1, -1):
        row = height - max(1, round(log_share(10**power, most) * height))
        if row > 0 and row - 1 not in labels and row not in labels:
            labels[row] = short_count(10**power)
    return labels


def short_count(count: int) -> str:
    """At most five characters: `812`, `9.5k`, `36k`, `1.2M`."""
    if count < 1000:
        return str(count)
    value, unit = (count / 1000, "k") if count < 1_000_000 else (count / 1_000_000, "M")
    return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"


def bar(share: float, width: int) -> str:
    """A bar to the right, of at most `width` cells; what is not 0 shows at least half a cell."""
    halves = round(min(1.0, max(0.0, share)) * width * 2)
    halves = max(halves, 1) if share > 0 and width > 0 else halves
    return "█" * (halves // 2) + ("▌" if halves % 2 else "")


def side_by_side(left: Sequence[Content], right: Sequence[Content], left_width: int, gap: int) -> list[Content]:
    """Lines of two columns as one column of lines."""
    empty = Content("")
    joined = []
    for number in range(max(len(left), len(right))):
        one = left[number] if number < len(left) else empty
        other = right[number] if number < len(right) else empty
        joined.append(one.truncate(left_width, pad=True) + Content(" " * gap) + other)
    return joined


def place_of(value: float, low: float, high: float, num_columns: int) -> int:
    """The column in which a value between `low` and `high` lies."""
    share = (value - low) / (high - low)
    return min(num_columns - 1, max(0, int(share * num_columns)))


def edges_between(low: float, high: float, num_columns: int) -> list[float]:
    """The ends of equal columns from `low` to `high`."""
    return [low + (high - low) * place / num_columns for place in range(num_columns + 1)]


def styles_of(edges: Sequence[float], style_at: Callable[[float], str]) -> list[str]:
    """The style of each column by the value in its middle."""
    return [style_at((low + high) / 2) for low, high in pairwise(edges)]


def _append(pieces: list[Styled], piece: Styled) -> None:
    """Add a piece, to the last one where both look alike."""
    if pieces and pieces[-1][1] == piece[1]:
        pieces[-1] = (pieces[-1][0] + piece[0], piece[1])
    else:
        pieces.append(piece)
