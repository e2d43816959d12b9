"""The row of a machine in the services table: its state, its figures in the columns of the services, and its GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from textual.content import Content

from grpo_tui.ui.glyphs import FOLDED, MACHINE_GLYPHS, MACHINE_STYLES, UNFOLDED
from grpo_tui.ui.widgets.lines import Styled, fit, line
from grpo_tui.view.format import UNKNOWN, bytes_text, count_text, percent_text
from grpo_tui.view.machines import (
    MachineRow,
    cpu_of_one_core,
    gpu_sums,
    gpu_words,
    memory_words,
    ready_words,
    state_words,
)
from grpo_tui.view.state import ViewState
from grpo_tui.view.timeline.state import clock_at

FIGURES = ("up", "cpu", "memory", "gpu")
"""Columns of services that a machine has something in, or leaves empty to align the others."""
GAP = 2


def machine_line(
    row: MachineRow,
    state: ViewState,
    columns: Sequence[tuple[str, int]],
    *,
    name_width: int,
    state_width: int,
    width: int,
) -> Content:
    """`− machine-2  ● ready  …  1 of 1 ready · 1 GPU 36.0G of 80.0G, 97% busy`.

    Args:
        columns: title and width of each column behind the state. A machine has figures in the first ones; its words
            take the room of all others, and of all where it does not answer.
        width: of the whole row.
    """
    kind = state_of(row)
    cells: list[str | Styled] = [
        ("▌" if state.is_selected(row) else " ", ".busy"),
        (FOLDED if row.name in state.viewer.folded else UNFOLDED, ".muted"),
        (fit(f" {row.name}", name_width), ".title" if row.machine is None else ".strong"),
        " ",
        (fit(f"{MACHINE_GLYPHS[kind]} {state_words(row, state.now)}", state_width), MACHINE_STYLES[kind]),
    ]
    if kind == "ready":
        own = [each for each in columns if each[0] in FIGURES]
        cells += [(" " + fit(_figure(title, row, state), wide, right=True), ".muted") for title, wide in own]
    words, style = _note(row, state, width - line(*cells).cell_length - GAP)
    return line(*cells, (" " * GAP + words, style))


def state_of(row: MachineRow) -> str:
    """One of `MACHINE_GLYPHS`."""
    machine = row.machine
    if row.is_over:
        return "released"
    if machine is None:
        return "ready"
    return "joining" if machine.is_joining else machine.state


def _figure(title: str, row: MachineRow, state: ViewState) -> str:
    machine = row.machine
    match title:
        case "cpu":
            return percent_text(cpu_of_one_core(machine))
        case "memory" if machine is None and state.host_memory is not None:
            return bytes_text(state.host_memory.total_bytes - state.host_memory.available_bytes)
        case "memory":
            return bytes_text(machine.memory_used_bytes if machine else None)
        case "gpu":
            return bytes_text(gpu_sums(row)[0]) if row.gpus else UNKNOWN
    return ""


def _note(row: MachineRow, state: ViewState, room: int) -> Styled:
    """What is wrong and what happens next; of a machine that is well, what is ready and how busy it is."""
    machine = row.machine
    if row.is_over:
        return fit(ready_words(row), room), ".muted"
    if machine is not None and machine.state != "ready":
        names = machine.lost_services if machine.state == "lost" else list(machine.services)
        ran = f"{'ran' if machine.state == 'lost' else 'runs'} {', '.join(names)}" if names else ""
        said = [f"since {clock_at(machine.since)}", "" if machine.is_joining else ran, machine.next or ""]
        return fit(" · ".join(filter(None, said)), room), ".muted" if machine.is_joining else ".warning"
    is_short = row.num_ready < len(row.services)
    return fit(_longest(_ways_to_say(row), room), room), ".warning" if is_short else ".muted"


def _ways_to_say(row: MachineRow) -> Iterator[str]:
    """The longest first."""
    ready, gpus, busy = ready_words(row), gpu_words(row), gpu_sums(row)[2]
    memory = (
        "" if row.machine is None or row.machine.memory_used_bytes is None else f"memory {memory_words(row.machine)}"
    )
    yield " · ".join(filter(None, (ready, gpus, memory)))
    yield " · ".join(filter(None, (ready, gpus)))
    if busy is not None:
        yield f"{ready} · {count_text(len(row.gpus), 'GPU')} {percent_text(busy)} busy"
        yield f"{row.num_ready}/{len(row.services)} ready, {percent_text(busy)} busy"
        yield f"{row.num_ready}/{len(row.services)} · {percent_text(busy)} busy"
    yield ready


def _longest(ways: Iterator[str], room: int) -> str:
    words = ""
    for words in ways:
        if cell_len(words) <= room:
            break
    return words
