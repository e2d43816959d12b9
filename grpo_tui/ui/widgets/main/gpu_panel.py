"""GPU memory by service: a bar per GPU with foreign processes, utilisation, power and temperature.

Without a driver: host memory by service, and why no GPU is shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from textual.content import Content

from grpo_engine.wire.supervisor import GpuStatus
from grpo_tui.ui.widgets.gpu_bars import Part, bar, gpu_parts, legend, rest_part, service_parts, spark
from grpo_tui.ui.widgets.lines import Lines, Styled, fit, line
from grpo_tui.view.format import bytes_text, clock_text, count_text, percent_text
from grpo_tui.view.gpus.history import Columns, figures_of, laid_out, means, peaks
from grpo_tui.view.gpus.state import GpuFigures, moments_until
from grpo_tui.view.machines import PlacedGpu, all_gpus, services_elsewhere
from grpo_tui.view.state import ViewState

LABEL_WIDTH = 7
MAX_BAR = 72
NO_GPU_WORDS = "no GPU reported yet"
SHARES_UNKNOWN = "memory by process unknown: the driver does not report it"
HISTORY_WIDTH = 100
"""Width from which the figures have sparklines."""
SPARK_WIDTH = 10
NARROWEST_CELL = 17
GAP = 2
"""Columns of a GPU, and between two of them, where several share a row."""


class GpuPanel(Lines):
    """One line a GPU, and a legend."""

    DEFAULT_CSS = """
    GpuPanel { padding: 0 1; }
    """

    async def on_click(self) -> None:
        """Open the GPU screen."""
        await self.run_action("app.show('gpus')")

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Rebuilt with each memory sample; host memory is shown only without GPUs."""
        host_memory = None if state.status is not None and all_gpus(state.status) else state.host_memory
        return (state.status, host_memory, state.gpus.moments, state.until)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """Bars, then the legend with what each service holds on all of them together."""
        if state.status is None or not height:
            return []
        gpus = all_gpus(state.status)
        if not gpus:
            return _host_lines(state, width)
        parts = [gpu_parts(each.gpu, state) for each in gpus]
        if len(gpus) < height:
            columns = laid_out(moments_until(state.gpus, state.until), SPARK_WIDTH) if width >= HISTORY_WIDTH else None
            bars = [_gpu_line(gpu, width, held, columns) for gpu, held in zip(gpus, parts, strict=True)]
        else:
            bars = _packed(gpus, parts, width, max(1, height - 1))
        notes: list[Styled] = [("% = busy", ".muted")] if len(gpus) >= height else []
        if not all(each.gpu.are_shares_known for each in gpus):
            notes.append((SHARES_UNKNOWN, ".warning"))
        return [*bars, _legend(list(itertools.chain(*parts)), width, notes)]


def rows_wanted(state: ViewState) -> int:
    """Rows that show everything: the bars and the legend."""
    gpus = all_gpus(state.status) if state.status is not None else []
    if state.status is not None and not gpus:
        return 2 if host_parts(state) else 1
    return 1 + max(1, len(gpus))


def _gpu_line(placed: PlacedGpu, width: int, parts: list[Part], columns: Columns | None) -> Content:
    """One GPU; its history stands beside its figures where there are columns for it."""
    gpu = placed.gpu
    label_width = max(LABEL_WIDTH, len(placed.label) + 1)
    label = (fit(placed.label, label_width), ".strong")
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    history = None if columns is None else figures_of(columns, gpu.index, placed.machine)
    if used is None or not total:
        return line(label, ("memory unknown  ", ".muted"), *_activity(gpu, history))
    amounts: list[str | Styled] = [f"  {bytes_text(used)} of {bytes_text(total)}"]
    if history is not None:
        fullest = peaks(history, lambda figures: figures.used_bytes)
        amounts += [" ", _spark([None if each is None else each.used_bytes for each in fullest], total)]
    figures = line(*amounts, *_activity(gpu, history))
    bar_width = min(MAX_BAR, width - label_width - figures.cell_length)
    return line(label, *bar(parts, total, bar_width)) + figures


def _packed(gpus: Sequence[PlacedGpu], parts: Sequence[list[Part]], width: int, num_rows: int) -> list[Content]:
    """Several GPUs a row where there are fewer rows: number, bar and how busy each is."""
    a_row = -(-len(gpus) // num_rows)
    cell_width = (width - GAP * (a_row - 1)) // a_row
    if cell_width < NARROWEST_CELL:
        a_row, cell_width = max(1, (width + GAP) // (NARROWEST_CELL + GAP)), NARROWEST_CELL
    cells = [_cell(gpu, held, cell_width) for gpu, held in zip(gpus, parts, strict=True)]
    rows = [Content(" " * GAP).join(cells[place : place + a_row]) for place in range(0, len(cells), a_row)]
    if len(rows) > num_rows:
        rows[num_rows - 1] = line((f"  … {len(gpus)} GPUs: key 2 shows all", ".muted"))
    return rows[:num_rows]


def _cell(placed: PlacedGpu, parts: list[Part], width: int) -> Content:
    gpu = placed.gpu
    figure = "stale" if gpu.stale_s is not None else percent_text(gpu.utilization_percent)
    label, end = f"{placed.short_label} ", f" {fit(figure, 5 if gpu.stale_s is not None else 4, right=True)}"
    end_style = ".warning" if gpu.stale_s is not None else ".muted"
    room = width - len(label) - len(end)
    total = gpu.memory_total_bytes
    drawn: list[Styled] = bar(parts, total, room) if total else [(fit("unknown", room), ".muted")]
    return line((label, ".strong"), *drawn, (end, end_style))


def _activity(gpu: GpuStatus, history: Sequence[Sequence[GpuFigures]] | None) -> list[str | Styled]:
    """`97% busy  512W  61°C`, or how long the driver has not answered."""
    if gpu.stale_s is not None:
        return [(f"  stale {clock_text(gpu.stale_s)}: the driver does not answer", ".warning")]
    busy = f"{fit(percent_text(gpu.utilization_percent), 4, right=True)} busy"
    if gpu.has_mig and gpu.utilization_percent is None:
        busy = count_text(len(gpu.mig), "MIG instance")
    pieces: list[str | Styled] = [(f"  {busy}", ".muted")]
    if history is not None:
        pieces += [" ", _spark(means(history, lambda figures: figures.utilization_percent), 100)]
    if gpu.power_watts is not None:
        pieces.append((f"  {fit(f'{gpu.power_watts:.0f}W', 5, right=True)}", ".muted"))
    if gpu.temperature_celsius is not None:
        pieces.append((f"  {gpu.temperature_celsius:.0f}°C", ".muted"))
    return pieces


def _spark(values: Sequence[float | None], most: float) -> Styled:
    [(text, style)] = spark(values, most)
    return fit(text, SPARK_WIDTH), style


def _host_lines(state: ViewState, width: int) -> list[Content]:
    """Host memory by service, in place of GPUs."""
    assert state.status is not None
    why = (state.status.gpu_note or NO_GPU_WORDS, ".muted")
    label = (fit("memory", LABEL_WIDTH), ".strong")
    parts = host_parts(state)
    if state.host_memory is None:
        return [line(label, why), _legend(parts, width)]
    total = state.host_memory.total_bytes
    used = total - state.host_memory.available_bytes
    figures = line(f"  {bytes_text(used)} of {bytes_text(total)}", (f"  {why[0]}", ".muted"))
    drawn = bar(parts, total, min(MAX_BAR, width - LABEL_WIDTH - figures.cell_length))
    return [line(label, *drawn) + figures, _legend(parts, width)]


def host_parts(state: ViewState) -> list[Part]:
    """Host memory by service, and that of all other processes."""
    elsewhere = services_elsewhere(state.status)
    here = [service for service in state.services if service.name not in elsewhere]
    parts = service_parts({service.name: service.rss_bytes for service in here}, state)
    if state.host_memory is None:
        return parts
    used = state.host_memory.total_bytes - state.host_memory.available_bytes
    return [*parts, rest_part("others", used - sum(part.num_bytes for part in parts))]


def _legend(parts: list[Part], width: int, notes: Sequence[Styled] = ()) -> Content:
    """`█ vllm 36.0G  ▓ trainer 22.1G`: the sum of each over the bars above it."""
    pieces = Content("  ").join([*legend(parts), *(line(note) for note in notes)])
    indent = LABEL_WIDTH if LABEL_WIDTH + pieces.cell_length <= width else 0
    return pieces.pad_left(indent).truncate(width, ellipsis=True)
