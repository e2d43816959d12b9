"""The row of a machine in the services table: its state, its figures in the columns of the services, and its GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from grpo_engine.wire.supervisor import MachineStatus
from grpo_tui.ui.glyphs import FOLDED, MACHINE_GLYPHS, MACHINE_STYLES, UNFOLDED
from grpo_tui.ui.widgets.lines import Styled, fit, line
from grpo_tui.view.format import UNKNOWN, bytes_text, percent_text
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


def machine_line(
    row: MachineRow,
    state: ViewState,
    columns: Sequence[tuple[str, int]],
    *,
    name_width: int,
    state_width: int,
    note_width: int,
) -> Content:
    """`− machine-2  ● ready  …  1 of 1 ready · 1 GPU 36.0G of 80.0G, 97% busy`.

    Args:
        columns: title and width of each column between state and note.
    """
    kind = state_of(row.machine)
    cells: list[str | Styled] = [
        ("▌" if state.is_selected(row) else " ", ".busy"),
        (FOLDED if row.name in state.viewer.folded else UNFOLDED, ".muted"),
        (fit(f" {row.name}", name_width), ".title" if row.machine is None else ".strong"),
        " ",
        (fit(f"{MACHINE_GLYPHS[kind]} {state_words(row.machine, state.now)}", state_width), MACHINE_STYLES[kind]),
    ]
    cells += [(" " + fit(_figure(title, row, state), width, right=True), ".muted") for title, width in columns]
    words, style = _note(row, state)
    cells.append(("  " + fit(words, note_width), style))
    return line(*cells)


def state_of(machine: MachineStatus | None) -> str:
    """One of `MACHINE_GLYPHS`."""
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


def _note(row: MachineRow, state: ViewState) -> Styled:
    """What is wrong and what happens next; of a machine that is well, what is ready and how busy it is."""
    machine, ready = row.machine, ready_words(row)
    if machine is not None and machine.state != "ready":
        since = f"since {clock_at(machine.since)}"
        names = machine.lost_services if machine.state == "lost" else list(machine.services)
        ran = f"{'ran' if machine.state == 'lost' else 'runs'} {', '.join(names)}" if names else ""
        said = [since, ran] if not machine.is_joining else [since]
        return " · ".join(filter(None, (*said, machine.next))), ".warning"
    is_short = row.num_ready < len(row.services)
    memory = "" if machine is None or machine.memory_used_bytes is None else f"memory {memory_words(machine)}"
    return " · ".join(filter(None, (ready, gpu_words(row), memory))), ".warning" if is_short else ".muted"
