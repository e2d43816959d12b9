"""The GPU report: a block per GPU with bar, plan, processes, history, and the likely cause when it is full.

Host memory has a block of the same kind, the only one on a machine without GPUs.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from textual.content import Content

from grpo_engine.wire.supervisor import GpuProcess, GpuStatus, ServiceState
from grpo_tui.ui.widgets.gpu_bars import (
    Part,
    bar,
    gpu_parts,
    legend,
    others_part,
    rest_part,
    service_parts,
    spark,
    split_cells,
    stacked,
)
from grpo_tui.ui.widgets.lines import Lines, Styled, are_same, fit, line, rule
from grpo_tui.ui.widgets.main.gpu_panel import NO_GPU_WORDS, host_parts
from grpo_tui.view.format import bytes_text, clock_text, count_text, duration_text, percent_text
from grpo_tui.view.gpus.history import Columns, figures_of, laid_out, means, peaks
from grpo_tui.view.gpus.rules import blame, compared, planned_on
from grpo_tui.view.gpus.state import OTHERS, UNKNOWN_HOLDER, GpuFigures, GpuMoment, moments_of, moments_until
from grpo_tui.view.machines import PlacedGpu, all_gpus, gpu_words, machine_rows, services_elsewhere, state_words
from grpo_tui.view.rank_rows import rank_name, rank_rows
from grpo_tui.view.state import ViewState
from grpo_tui.view.timeline.state import clock_at

INDENT = 2
GUTTER = 18
"""Columns left of a chart: a name, a number, and the axis."""
PID_WIDTH = 9
MEMORY_WIDTH = 8
MAX_WHO = 36
TWO_COLUMNS = 180
"""Width from which blocks stand in two columns."""
COLUMN_GAP = 2
HOTTEST = 100.0
"""Degrees at the top of the sparkline."""
UNTOLD_BYTES = 1 << 30
IDLE_SHARE = 0.02
"""Of a GPU: a history that never held more needs no chart."""
NO_HISTORY = "  no history yet: one sample a second is added while the run is watched"
DOWN_STATES = frozenset({ServiceState.FAILED, ServiceState.BACKOFF, ServiceState.STOPPED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The lines of all blocks, and where each begins; two blocks side by side count as one."""

    lines: list[Content]
    starts: list[int]
    blocks: list[list[Content]]
    form: tuple[object, ...]
    """What the number of rows depends on: blocks that are scrolled out are kept while this is the same."""

    def numbers_in_sight(self, rows: range) -> range:
        """The numbers of the blocks in these rows."""
        ends = [*self.starts[1:], len(self.lines) + 1]
        spans = enumerate(zip(self.starts, ends, strict=True))
        seen = [place for place, (start, end) in spans if start < rows.stop and end > rows.start]
        return range(seen[0], seen[-1] + 1) if seen else range(0)


class GpuReport(Lines):
    """The report in full height; the screen scrolls it."""

    DEFAULT_CSS = """
    GpuReport { height: 1; padding: 0 1; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.chart_rows = 6
        self.in_sight: range | None = None
        """The rows that the screen shows; None: perhaps all."""
        self.starts: list[int] = []
        """The row on which each block begins."""
        self._made: Made | None = None
        self._made_of: tuple[object, ...] = ()

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Rebuilt with each sample; host memory is updated with the next one."""
        seen = range(0) if self._made is None or self.in_sight is None else self._made.numbers_in_sight(self.in_sight)
        what = (state.status, state.gpus, state.host_memory is None, state.until, self.chart_rows)
        return (*what, seen.start, seen.stop)

    def draw(self, state: ViewState) -> None:
        """Build the lines, and set the height to their number."""
        width = self.size.width
        if width:
            inputs = (*self.inputs(state), width)
            if self._made is None or not are_same(inputs, self._made_of):
                self._made = made = report(state, width, self.chart_rows, self._made, self.in_sight)
                self._made_of, self.starts = (*self.inputs(state), width), made.starts
                self.styles.height = max(1, len(made.lines))
        super().draw(state)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """The lines that were built."""
        return self._made.lines if self._made is not None else []

    def look_again(self) -> None:
        """Rebuild the blocks that were scrolled in."""
        if self._state is not None:
            self.draw(self._state)


def report(
    state: ViewState, width: int, chart_rows: int, before: Made | None = None, in_sight: range | None = None
) -> Made:
    """A block for each GPU and one for the machine, in two columns where there is room for two.

    Args:
        before: the last report; its blocks out of sight are reused if they have as many rows.
        in_sight: the rows that the screen shows; None: perhaps all.
    """
    if state.status is None:
        words = line(("waiting for the supervisor", ".muted"))
        return Made(lines=[words], starts=[0], blocks=[[words]], form=())
    gpus = all_gpus(state.status)
    is_wide = width >= TWO_COLUMNS and bool(gpus)
    block_width = (width - COLUMN_GAP) // 2 if is_wide else width
    moments = moments_until(state.gpus, state.until)
    columns = laid_out(moments, block_width - GUTTER, state.gpus.span_s)
    form = _form(state, width, chart_rows)
    kept = before if before is not None and in_sight is not None and before.form == form else None
    fresh = kept.numbers_in_sight(in_sight) if kept is not None and in_sight is not None else range(0)

    of_machine: dict[str | None, Sequence[GpuMoment]] = {}

    def made(placed: PlacedGpu | None) -> list[Content]:
        if placed is None:
            return _host_block(state, block_width, chart_rows, columns)
        if placed.machine not in of_machine:
            of_machine[placed.machine] = moments_of(moments, placed.machine)
        return _gpu_block(placed, state, block_width, chart_rows, columns, of_machine[placed.machine])

    lines, starts, blocks = (
        _all_together(gpus, width) + _machine_lines(state, width),
        list[int](),
        list[list[Content]](),
    )
    whose = [*gpus, None]
    a_row = 2 if is_wide else 1
    for number, place in enumerate(range(0, len(whose), a_row)):
        starts.append(len(lines) if starts else 0)
        if kept is not None and number not in fresh:
            block = kept.blocks[number]
        else:
            parts = [made(gpu) for gpu in whose[place : place + a_row]]
            block = [*(_beside(*parts, width=block_width) if is_wide else parts[0]), Content("")]
        blocks.append(block)
        lines += block
    return Made(lines=lines[:-1], starts=starts, blocks=blocks, form=form)


def _form(state: ViewState, width: int, chart_rows: int) -> tuple[object, ...]:
    assert state.status is not None
    what = (width, chart_rows, state.until, state.gpus.span_s, state.gpus.has_whole_commands, state.gpus.plan)
    shown = tuple((service.name, len(service.ranks)) for service in state.services)
    return (
        *what,
        shown,
        *(
            (each.machine, gpu.index, gpu.stale_s is None, len(gpu.processes), len(gpu.mig), tuple(gpu.by_service))
            for each in all_gpus(state.status)
            for gpu in (each.gpu,)
        ),
        len(state.status.machines),
    )


def _all_together(placed: Sequence[PlacedGpu], width: int) -> list[Content]:
    """A summary of several GPUs: memory used, mean utilisation, and the fullest one."""
    gpus = [each.gpu for each in placed]
    known = [(each.gpu.memory_used_bytes, each.gpu.memory_total_bytes, each) for each in placed]
    told = [(used, total, gpu) for used, total, gpu in known if used is not None and total]
    if len(gpus) < 2 or not told:
        return []
    used, _, fullest = max(told, key=lambda each: each[0] / each[1])
    words = f"{bytes_text(sum(each[0] for each in told))} of {bytes_text(sum(each[1] for each in told))} used"
    busy = [gpu.utilization_percent for gpu in gpus if gpu.utilization_percent is not None]
    if busy:
        words += f" · {percent_text(sum(busy) / len(busy))} busy on average"
    words += f" · fullest {fullest.label} ({bytes_text(used)})"
    return [line((f" {len(gpus)} GPUs: ", ".strong"), words).truncate(width, ellipsis=True)]


def _machine_lines(state: ViewState, width: int) -> list[Content]:
    """A line for each machine of a cluster: its GPUs together, or why there are none to show."""
    rows = machine_rows(state.status)
    if not rows:
        return []
    name_width = max(len(row.name) for row in rows)
    told = []
    for row in rows:
        words, style = gpu_words(row) or "no GPU reported", ".muted"
        if row.machine is not None and row.machine.state != "ready" and not row.is_over:
            since = clock_at(row.machine.since)
            words, style = f"{state_words(row, state.now)}, since {since}: its GPUs are unknown", ".warning"
        told.append(line(f" {fit(row.name, name_width)}  ", (words, style)).truncate(width, ellipsis=True))
    return [*told, Content("")]


# --- a GPU ---------------------------------------------------------------------------------------------------------


def _gpu_block(
    placed: PlacedGpu, state: ViewState, width: int, chart_rows: int, columns: Columns, moments: Sequence[GpuMoment]
) -> list[Content]:
    gpu = placed.gpu
    rows = [rule(width, f"{placed.label} · {gpu.name}", _condition(gpu))]
    if gpu.stale_s is not None:
        words = f"  ▲ these figures are {clock_text(gpu.stale_s)} old: the driver does not answer"
        rows.append(line((words, ".warning")).truncate(width, ellipsis=True))
    history = figures_of(columns, gpu.index, placed.machine)
    fullest = peaks(history, lambda figures: figures.used_bytes)
    held = [None if figures is None else _held_parts(figures.by_holder, state) for figures in fullest]
    rows += _memory_now(gpu, state, width, held)
    rows += _mig_lines(gpu, width)
    rows += [Content(""), *_process_table(gpu, state, width), Content("")]
    if any(history):
        rows += [*_history(gpu, history, held, chart_rows), _time_axis(columns, state)]
    else:
        rows.append(line((NO_HISTORY, ".muted")).truncate(width, ellipsis=True))
    rows += _blame_lines(gpu, state, width, moments)
    return rows


def _condition(gpu: GpuStatus) -> str:
    """`97% busy · 512 of 700 W · 61°C`, of what is known."""
    if gpu.stale_s is not None:
        return f"stale {clock_text(gpu.stale_s)}"
    parts = [f"{percent_text(gpu.utilization_percent)} busy"] if gpu.utilization_percent is not None else []
    if gpu.has_mig:
        parts.append(f"MIG, {count_text(len(gpu.mig), 'instance')}")
    if gpu.power_watts is not None:
        most = "" if gpu.power_limit_watts is None else f" of {gpu.power_limit_watts:.0f}"
        parts.append(f"{gpu.power_watts:.0f}{most} W")
    if gpu.temperature_celsius is not None:
        parts.append(f"{gpu.temperature_celsius:.0f}°C")
    return " · ".join(parts)


def _memory_now(gpu: GpuStatus, state: ViewState, width: int, held: Sequence[Sequence[Part] | None]) -> list[Content]:
    """The bar, the plan under it, and the legend."""
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    if used is None or not total:
        return [line(("  the driver does not report how much memory is used", ".muted"))]
    amounts = f"  {bytes_text(used)} of {bytes_text(total)} used, {bytes_text(max(0, total - used))} free"
    bar_width = max(0, width - INDENT - len(amounts))
    parts = gpu_parts(gpu, state)
    return [
        line(" " * INDENT, *bar(parts, total, bar_width), amounts),
        *_plan_lines(gpu, parts, state, bar_width, width),
        *_wrapped_pieces(_whole_legend(parts, held, state), width, INDENT),
    ]


def _whole_legend(now: Sequence[Part], history: Iterable[Sequence[Part] | None], state: ViewState) -> list[Content]:
    """The legend of bar and chart, with holders that only the history shows, in the order of the services."""
    order = {service.name: place for place, service in enumerate(state.services)}
    seen = {part.name: part for parts in history for part in parts or ()}
    shown = dict(sorted(seen.items(), key=lambda each: order.get(each[0], len(order))))
    gone = [part for name, part in shown.items() if name not in {each.name for each in now} | {OTHERS}]
    return [*legend(now), *(line((part.fill, part.style), f" {part.name} ", ("none now", ".muted")) for part in gone)]


def _plan_lines(gpu: GpuStatus, parts: Sequence[Part], state: ViewState, bar_width: int, width: int) -> list[Content]:
    """A mark under the bar where each planned share would end."""
    total = gpu.memory_total_bytes or 0
    cells = split_cells([part.num_bytes for part in parts], total, bar_width)
    begins = {part.name: sum(cells[:place]) for place, part in enumerate(parts)}
    rows = []
    for name, planned in planned_on(gpu, state.gpus.plan).items():
        held = gpu.by_service.get(name, 0) if gpu.are_shares_known else None
        words = f"{name}: {bytes_text(planned)} planned, {compared(planned, held, total)}"
        mark = INDENT + min(max(0, bar_width - 1), begins.get(name, 0) + round(planned * bar_width / total))
        if mark + 2 + len(words) <= width:
            rows.append(line(" " * mark, ("↑ ", ".accent"), (words, ".muted")))
        elif len(words) + 1 + INDENT <= mark:
            rows.append(line(" " * (mark - len(words) - 1), (f"{words} ", ".muted"), ("↑", ".accent")))
        else:
            rows.append(line(" " * mark, ("↑", ".accent")))
            rows += _wrapped(words, width, INDENT, ".muted")
    return rows


def _mig_lines(gpu: GpuStatus, width: int) -> list[Content]:
    if not gpu.has_mig:
        return []
    if not gpu.mig:
        return [line(("  MIG is on without any instance: nvidia-smi mig -cgi creates them", ".warning"))]
    told = [
        line(
            (f"{each.name.rpartition('MIG ')[2]}", ".strong"),
            ("" if each.gpu_instance is None else f" (MIG {each.gpu_instance})", ".muted"),
            (f" {bytes_text(each.memory_used_bytes)} of {bytes_text(each.memory_total_bytes)}", ".muted"),
        )
        for each in gpu.mig
    ]
    return _wrapped_pieces([line(("parts", ".muted")), *told], width, INDENT)


# --- its processes -------------------------------------------------------------------------------------------------


def _process_table(gpu: GpuStatus, state: ViewState, width: int) -> list[Content]:
    if not gpu.processes:
        return _wrapped(_no_processes(gpu), width, INDENT, ".muted")
    whose = [_who(process, state, are_shares_known=gpu.are_shares_known) for process in gpu.processes]
    who_width = min(MAX_WHO, max(len("owner"), *(len(text) for text, _ in whose))) + 2
    part_width = 7 if gpu.has_mig else 0
    head = f"{'pid':<{PID_WIDTH}}{'owner':<{who_width}}{'memory':>{MEMORY_WIDTH - 1}} " + fit("  MIG", part_width)
    rows = [line(" " * INDENT, (f"{head} command", ".title")).truncate(width)]
    before = INDENT + PID_WIDTH + who_width + MEMORY_WIDTH + part_width + 1
    room = max(0, width - before)
    for process, (text, style) in zip(gpu.processes, whose, strict=True):
        part = f"  MIG {process.gpu_instance}" if process.gpu_instance is not None else ""
        command = process.command if process.is_visible else "not visible from here"
        folded = [fit(command, room)]
        if state.gpus.has_whole_commands and room >= 20:
            folded = textwrap.wrap(command, room) or [""]
        rows.append(
            line(
                " " * INDENT,
                (f"{process.pid:<{PID_WIDTH}}", ".muted"),
                (fit(text, who_width), style),
                fit(bytes_text(process.memory_bytes), MEMORY_WIDTH - 1, right=True),
                (fit(part, part_width), ".muted"),
                (f"  {folded[0]}", ".muted"),
            ).truncate(width)
        )
        rows += [line(" " * (before + 1), (more, ".muted")).truncate(width) for more in folded[1:]]
    if not gpu.are_shares_known:
        words = "▲ the driver lists pids of the host: which of them belong to this run is unknown"
        if any(process.is_visible for process in gpu.processes):
            words = "▲ the driver does not report the memory of each process"
        rows += _wrapped(words, width, INDENT, ".warning")
    return rows


def _no_processes(gpu: GpuStatus) -> str:
    if not gpu.are_shares_known:
        return "the driver lists no processes here, so the owner of the memory is unknown"
    if (gpu.memory_used_bytes or 0) >= UNTOLD_BYTES:
        return "the driver lists no process; the memory may be held by another container"
    return "no process on this GPU"


def _who(process: GpuProcess, state: ViewState, *, are_shares_known: bool) -> tuple[str, str]:
    """The owner of a process, and its style."""
    if process.run is not None and process.run != state.run:
        return f"run {process.run}: {process.service or 'a service'}", ".others"
    if process.service is not None:
        status = state.service(process.service)
        attempt = process.attempt if process.attempt is not None else (status.attempt if status else None)
        if process.run is not None:  # has the marker of the run, but no keeper as ancestor
            return f"{process.service}, left over", ".warning"
        name = process.service if process.rank is None else rank_name(process.service, process.rank)
        return name + (f", attempt {attempt}" if attempt else ""), ".strong"
    if not process.is_visible:
        return "another container or the host" if are_shares_known else "unknown, may be ours", ".others"
    return f"user {process.user or 'unknown'}", ".others"


# --- its history ---------------------------------------------------------------------------------------------------


def _history(
    gpu: GpuStatus, history: Sequence[Sequence[GpuFigures]], held: Sequence[Sequence[Part] | None], height: int
) -> list[Content]:
    """Memory by holder as a chart, then utilisation, power and temperature."""
    rows: list[Content] = []
    total = gpu.memory_total_bytes
    if total and any(sum(part.num_bytes for part in parts) >= IDLE_SHARE * total for parts in held if parts):
        rows = _chart(held, total, height)
    elif total:
        rows = [
            _gutter("memory", bytes_text(gpu.memory_used_bytes), [("almost no memory was used in this time", ".muted")])
        ]
    for name, now, most, value in (
        ("busy", percent_text(gpu.utilization_percent), 100.0, lambda figures: figures.utilization_percent),
        ("power", _with_unit(gpu.power_watts, "W"), gpu.power_limit_watts, lambda figures: figures.power_watts),
        ("temp", _with_unit(gpu.temperature_celsius, "°C"), HOTTEST, lambda figures: figures.temperature_celsius),
    ):
        values = means(history, value)
        known = [each for each in values if each is not None]
        if known:
            rows.append(_gutter(name, now, spark(values, most or max(*known, 1.0))))
    return rows


def _held_parts(by_holder: Mapping[str, int], state: ViewState) -> list[Part]:
    parts = service_parts(by_holder, state)
    parts += [others_part(OTHERS, by_holder[OTHERS])] if OTHERS in by_holder else []
    return [*parts, *([rest_part(UNKNOWN_HOLDER, by_holder[UNKNOWN_HOLDER])] if UNKNOWN_HOLDER in by_holder else [])]


def _chart(columns: Sequence[Sequence[Part] | None], scale_bytes: int, height: int) -> list[Content]:
    """Memory by holder over time, the scale at the left."""
    rows = []
    for row, pieces in enumerate(stacked(columns, scale_bytes, height)):
        number = bytes_text(scale_bytes * (height - row) // height) if row in (0, height // 2) else ""
        rows.append(_gutter("memory" if row == 0 else "", number, pieces))
    return rows


def _gutter(name: str, number: str, pieces: list[Styled]) -> Content:
    stroke = "┤" if number else "│"
    return line(" " * INDENT, (f"{name:<7}", ".muted"), fit(number, 7, right=True), (f" {stroke}", ".faint"), *pieces)


def _time_axis(columns: Columns, state: ViewState) -> Content:
    """Start and end of the columns, and the width of one."""
    span_s = state.gpus.span_s
    what = "the whole run" if span_s is None else f"the last {_span_text(span_s)}"
    begin, end = (time.strftime("%H:%M:%S", time.localtime(each)) for each in (columns.start, columns.end))
    words = f"{what}: {begin} to {end}, a column is {duration_text(columns.column_s).removesuffix('.0s')}"
    words += "s" if columns.column_s < 10 else ""
    return line(" " * (GUTTER - 2), ("└ ", ".faint"), (words, ".muted"))


def _span_text(span_s: float) -> str:
    return {3600.0: "hour", 600.0: "10 minutes", 60.0: "minute"}.get(span_s, duration_text(span_s))


def _blame_lines(gpu: GpuStatus, state: ViewState, width: int, moments: Sequence[GpuMoment]) -> list[Content]:
    ended_at = {}
    for service in state.services:
        transitions = state.transitions.get(service.name, ())
        # For a service that was down when the screen opened, the transition has its start time: its end is unknown.
        if transitions and transitions[-1].state in DOWN_STATES and transitions[-1].time > (service.started_at or 0.0):
            ended_at[service.name] = transitions[-1].time
    found = blame(gpu, moments, state.services, state.gpus.plan, ended_at)
    sign, style = ("✗ ", ".error") if found.has_happened else ("", ".muted")
    rows = _wrapped(f"{sign}{found.text}", width, INDENT, style)
    return rows + (_wrapped(f"→ {found.hint}", width, INDENT, "") if found.hint else [])


# --- the machine ---------------------------------------------------------------------------------------------------


def _host_block(state: ViewState, width: int, chart_rows: int, columns: Columns) -> list[Content]:
    """Host memory by service, and why no GPU is shown."""
    assert state.status is not None
    rows = [rule(width, "host memory")]
    if not all_gpus(state.status):
        rows += _wrapped(f"no GPU figures: {state.status.gpu_note or NO_GPU_WORDS}", width, INDENT, ".warning")
        rows += _wrapped("→ `grpo-tui doctor` checks what is missing", width, INDENT, ".muted")
    parts = host_parts(state)
    memory = state.host_memory
    if memory is not None:
        used = memory.total_bytes - memory.available_bytes
        amounts = (
            f"  {bytes_text(used)} of {bytes_text(memory.total_bytes)} used, {bytes_text(memory.available_bytes)} free"
        )
        drawn = bar(parts, memory.total_bytes, max(0, width - INDENT - len(amounts)))
        rows.append(line(" " * INDENT, *drawn, amounts))
    fullest = peaks(columns.moments, lambda moment: sum(moment.rss_bytes.values()))
    far = services_elsewhere(state.status)
    shown = [None if moment is None else service_parts(_without(moment.rss_bytes, far), state) for moment in fullest]
    rows += [*_wrapped_pieces(_whole_legend(parts, shown, state), width, INDENT), Content("")]
    if ranks := rank_rows(state.services, state.now):
        styles = [".title", *(".muted" for _ in ranks[1:])]
        rows += [line(" " * INDENT, each).truncate(width, ellipsis=True) for each in zip(ranks, styles, strict=True)]
        rows.append(Content(""))
    most = max((sum(part.num_bytes for part in parts) for parts in shown if parts), default=0)
    if not most:
        return [*rows, line((NO_HISTORY, ".muted")).truncate(width, ellipsis=True)]
    rows += _chart(shown, most, chart_rows)
    return [*rows, _time_axis(columns, state)]


def _without(num_bytes: Mapping[str, int], names: Collection[str]) -> Mapping[str, int]:
    return {name: each for name, each in num_bytes.items() if name not in names} if names else num_bytes


# --- lines ---------------------------------------------------------------------------------------------------------


def _with_unit(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:.0f}{unit}"


def _wrapped(text: str, width: int, indent: int, style: str) -> list[Content]:
    hanging = "  " if text.startswith(("→ ", "✗ ")) else ""
    folded = textwrap.wrap(text, max(10, width - indent), break_on_hyphens=False, subsequent_indent=hanging)
    return [line(" " * indent, (each, style)) for each in folded]


def _wrapped_pieces(pieces: Sequence[Content], width: int, indent: int) -> list[Content]:
    """Pieces two spaces apart, on as many lines as they need."""
    rows: list[Content] = []
    for piece in pieces:
        if rows and rows[-1].cell_length + 2 + piece.cell_length <= width:
            rows[-1] = rows[-1] + Content("  ") + piece
        else:
            rows.append((Content(" " * indent) + piece).truncate(width, ellipsis=True))
    return rows


def _beside(left: Sequence[Content], right: Sequence[Content] = (), *, width: int) -> list[Content]:
    """Two blocks in two columns."""
    rows = []
    for row in range(max(len(left), len(right))):
        first = left[row] if row < len(left) else Content("")
        second = right[row] if row < len(right) else Content("")
        rows.append(first.pad_right(max(0, width + COLUMN_GAP - first.cell_length)) + second)
    return rows
