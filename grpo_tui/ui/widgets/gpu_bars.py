"""Memory as bars and stacked columns, with one fill and colour per holder everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from textual.content import Content

from grpo_engine.wire.supervisor import GpuStatus
from grpo_tui.ui.glyphs import FREE_FILL, OTHERS_FILL, REST_FILL, SHARE_FILLS, SPARK_BARS
from grpo_tui.ui.widgets.lines import NUM_SHARES, Styled, line
from grpo_tui.view.format import bytes_text
from grpo_tui.view.gpus.state import OTHERS, UNKNOWN_HOLDER
from grpo_tui.view.state import ViewState


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a bar."""

    name: str
    num_bytes: int
    fill: str
    style: str


def gpu_parts(gpu: GpuStatus, state: ViewState) -> list[Part]:
    """Our services in the order of the plan, then foreign processes, then memory without a known process."""
    parts = service_parts(gpu.by_service, state)
    if not gpu.are_shares_known or gpu.other_bytes is None:
        rest = (gpu.memory_used_bytes or 0) - sum(part.num_bytes for part in parts)
        return [*parts, *_kept([rest_part(UNKNOWN_HOLDER, rest)])]
    named = {f"user {user}": num_bytes for user, num_bytes in gpu.other_by_user.items()}
    hidden = sum(each.memory_bytes or 0 for each in gpu.processes if not each.is_visible)
    rest = max(0, gpu.other_bytes - sum(named.values()))
    foreign = min(hidden, rest)
    foreign_parts = {**named, "other containers": foreign, OTHERS: rest - foreign}
    return [*parts, *_kept(others_part(name, num_bytes) for name, num_bytes in foreign_parts.items())]


def service_parts(bytes_by_service: Mapping[str, int | None], state: ViewState) -> list[Part]:
    """A part for each service that holds memory; its fill and colour come from its place in the plan."""
    return [
        Part(
            name=service.name,
            num_bytes=num_bytes,
            fill=SHARE_FILLS[place % len(SHARE_FILLS)],
            style=f".share-{place % NUM_SHARES}",
        )
        for place, service in enumerate(state.services)
        if (num_bytes := bytes_by_service.get(service.name))
    ]


def others_part(name: str, num_bytes: int) -> Part:
    """Memory of processes outside the run."""
    return Part(name=name, num_bytes=num_bytes, fill=OTHERS_FILL, style=".others")


def rest_part(name: str, num_bytes: int) -> Part:
    """Memory without a known process."""
    return Part(name=name, num_bytes=max(0, num_bytes), fill=REST_FILL, style=".muted")


def bar(parts: Sequence[Part], total: int, width: int) -> list[Styled]:
    """The parts side by side, then free memory."""
    cells = split_cells([part.num_bytes for part in parts], total, max(0, width))
    drawn = [(part.fill * num_cells, part.style) for part, num_cells in zip(parts, cells, strict=True)]
    return [*drawn, (FREE_FILL * max(0, width - sum(cells)), ".faint")]


def split_cells(parts: Sequence[int], total: int, num_cells: int) -> list[int]:
    """Cells for each part of `total`, together at most `num_cells`; a part above 0 gets at least one.

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


def legend(parts: Iterable[Part]) -> list[Content]:
    """`█ vllm 36.0G`, of each name once with the sum of its parts."""
    sums: dict[str, int] = {}
    looks: dict[str, Part] = {}
    for part in parts:
        sums[part.name] = sums.get(part.name, 0) + part.num_bytes
        looks.setdefault(part.name, part)
    return [
        line((looks[name].fill, looks[name].style), f" {name} ", (bytes_text(num_bytes), ".muted"))
        for name, num_bytes in sums.items()
        if num_bytes
    ]


def stacked(columns: Sequence[Sequence[Part] | None], scale_bytes: int, height: int) -> list[list[Styled]]:
    """Rows of a chart, the topmost first: each column its parts above each other; None is one without figures.

    Heights are true: unlike in a bar, a part of less than half a row does not show. The topmost block of a column is as
    high as all parts together, to an eighth of a row.
    """
    cells = [_column(parts or (), scale_bytes, height) for parts in columns]
    rows = reversed(range(height))
    return [joined(column[row] if row < len(column) else (" ", "") for column in cells) for row in rows]


def _column(parts: Sequence[Part], scale_bytes: int, height: int) -> list[Styled]:
    """The cells of one column from below."""
    cells: list[Styled] = []
    sum_so_far = 0
    for part in parts:
        sum_so_far += part.num_bytes
        top = min(height, round(sum_so_far * height / scale_bytes))
        cells += [(part.fill, part.style)] * (top - len(cells))
    eighths = min(height * len(SPARK_BARS), round(sum_so_far * height * len(SPARK_BARS) / scale_bytes))
    whole, rest = divmod(eighths, len(SPARK_BARS))
    if not rest:
        return cells[:whole]
    middle = (whole + rest / len(SPARK_BARS) / 2) * scale_bytes / height
    ends = itertools.accumulate(part.num_bytes for part in parts)
    style = next((part.style for part, end in zip(parts, ends, strict=True) if end >= middle), parts[-1].style)
    return [*cells[:whole], (SPARK_BARS[rest - 1], style)]


def spark(values: Sequence[float | None], most: float, style: str = ".spark") -> list[Styled]:
    """A sparkline on the scale from 0 to `most`; a figure that is not known leaves a gap."""
    top = len(SPARK_BARS) - 1
    heights = [None if value is None else round(min(1.0, max(0.0, value / most)) * top) for value in values]
    return [("".join(" " if height is None else SPARK_BARS[height] for height in heights), style)]


def joined(cells: Iterable[Styled]) -> list[Styled]:
    """Neighbours of one style as one piece."""
    pieces: list[Styled] = []
    for text, style in cells:
        if pieces and pieces[-1][1] == style:
            pieces[-1] = (pieces[-1][0] + text, style)
        else:
            pieces.append((text, style))
    return pieces


def _kept(parts: Iterable[Part]) -> list[Part]:
    return [part for part in parts if part.num_bytes]
