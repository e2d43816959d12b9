"""The services table: state, uptime, load, memory, ports and explanation, as many columns as fit.

On several machines there is a row for each machine, and its services stand below it.

Columns have a rank; a narrow terminal shows the first ranks, and the last column takes what is left. Rows that do not
fit scroll with the selection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.cells import cell_len
from textual import events
from textual.content import Content

from grpo_engine.wire.supervisor import ServiceState, ServiceStatus
from grpo_tui.ui.glyphs import PROBE_SIGNS, SERVICE_GLYPHS
from grpo_tui.ui.messages import ServiceClicked
from grpo_tui.ui.widgets.lines import Lines, Styled, Wheel, fit, line
from grpo_tui.ui.widgets.main.machine_cells import machine_line
from grpo_tui.view.format import UNKNOWN, age_text, bytes_text, clock_text, names_text, percent_text
from grpo_tui.view.machine_selection import MachineFolded, MachineSelected
from grpo_tui.view.machines import MachineRow
from grpo_tui.view.service_rules import TOLD_WAITS, reason
from grpo_tui.view.starting import missing_needs, preparation
from grpo_tui.view.state import ServiceSelected, ViewState

STATE_STYLES = {
    ServiceState.WAITING: ".muted",
    ServiceState.STARTING: ".busy",
    ServiceState.READY: ".ok",
    ServiceState.UNHEALTHY: ".warning",
    ServiceState.BACKOFF: ".warning",
    ServiceState.STOPPING: ".busy",
    ServiceState.STOPPED: ".muted",
    ServiceState.FINISHED: ".ok",
    ServiceState.FAILED: ".error",
}
PASSING_STATES = frozenset({ServiceState.STARTING, ServiceState.STOPPING, ServiceState.BACKOFF})
"""Transitional states: they show their seconds."""
DOWN_STATES = frozenset({ServiceState.WAITING, ServiceState.STOPPED, ServiceState.FINISHED, ServiceState.FAILED})
TAG = "◆"
INDENT = 3
"""Of services below their machine."""
MIN_NAME, MAX_NAME, MAX_WIDE_NAME = 7, 16, 26
WIDE_TABLE = 100
"""Width from which long names get more room."""
MIN_NOTE = 18
"""Narrowest last column that is worth more than another number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column between the name and the explanation."""

    title: str
    width: int
    rank: int
    """Columns of a lower rank are shown first when there is little room."""
    text: Callable[[ServiceStatus, ViewState], str]
    style: str = ""
    is_for_gpus: bool = False


COLUMNS = (
    Column(title="up", width=6, rank=1, text=lambda service, state: age_text(_uptime_s(service, state))),
    Column(title="cpu", width=5, rank=2, text=lambda service, _: percent_text(service.cpu_percent)),
    Column(title="memory", width=6, rank=3, text=lambda service, _: bytes_text(service.rss_bytes)),
    Column(
        title="gpu", width=6, rank=4, text=lambda service, _: bytes_text(service.gpu_memory_bytes), is_for_gpus=True
    ),
    Column(title="port", width=5, rank=5, text=lambda service, _: _ports(service), style=".muted"),
    Column(title="restarts", width=8, rank=6, text=lambda service, _: str(service.restarts), style=".muted"),
    Column(title="pid", width=7, rank=7, text=lambda service, _: _number(service.pid), style=".muted"),
)


class ServicesTable(Lines, Wheel):
    """One row a service, and one a machine where there are several; a click selects."""

    ON_WHEEL = ("app.select(-1)", "app.select(1)")

    DEFAULT_CSS = """
    ServicesTable { padding: 0 1; }
    """

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """The titles, then the rows around the selected one."""
        rows = state.rows
        indent = INDENT if any(isinstance(row, MachineRow) for row in rows) else 0
        longest = MAX_WIDE_NAME if width >= WIDE_TABLE else MAX_NAME
        name_width = min(longest, max([MIN_NAME, *(cell_len(row.name) + indent for row in rows)]))
        columns = _columns_for(width - name_width - STATE_WIDTH - 4, has_gpus=_has_gpus(state))
        note_width = width - name_width - STATE_WIDTH - 4 - sum(column.width + 1 for column in columns) - 1
        titles = [("  " + fit("service", name_width) + " " + fit("state", STATE_WIDTH), ".title")]
        titles += [(" " + fit(column.title, column.width, right=True), ".title") for column in columns]
        if not rows:
            words = "no service yet" if state.status else "waiting for the supervisor"
            return [line(*titles), line((f"  {words}", ".muted"))]
        first = self._first_row(state, height - 1)
        hidden = len(rows) - (height - 1)
        note = f"{hidden} more: ↑↓" if hidden > 0 else "health"
        titles.append(("  " + fit(note, note_width), ".title"))
        drawn = [line(*titles)]
        for row in rows[first : first + height - 1]:
            if isinstance(row, MachineRow):
                told = [(column.title, column.width) for column in columns]
                content = machine_line(row, state, told, name_width=name_width, state_width=STATE_WIDTH, width=width)
            else:
                content = _service_line(row, state, columns, name_width, note_width, indent)
            drawn.append(self._marked(content) if state.is_selected(row) else content)
        return drawn

    def on_click(self, event: events.Click) -> None:
        """Select the row under the pointer; a click on a machine that is selected folds or unfolds it."""
        if self._state is None:
            return
        state, rows = self._state, self._state.rows
        place = event.y - 1 + self._first_row(state, self.size.height - 1)
        if event.y < 1 or place >= len(rows):
            return
        row = rows[place]
        if not isinstance(row, MachineRow):
            self.post_message(ServiceClicked(ServiceSelected(name=row.name)))
        elif state.is_selected(row):
            self.post_message(ServiceClicked(MachineFolded(name=row.name)))
        else:
            self.post_message(ServiceClicked(MachineSelected(name=row.name)))

    def _first_row(self, state: ViewState, num_rows: int) -> int:
        """Scroll so far that the selected row is among the rows."""
        return max(0, min(state.selected_row - num_rows // 2, len(state.rows) - num_rows))

    def _marked(self, row: Content) -> Content:
        return row.pad_right(max(0, self.size.width - row.cell_length)).stylize(".selected")


def _has_gpus(state: ViewState) -> bool:
    status = state.status
    return status is not None and bool(status.gpus or any(machine.gpus for machine in status.machines))


def _service_line(
    service: ServiceStatus, state: ViewState, columns: list[Column], name_width: int, note_width: int, indent: int
) -> Content:
    quiet = ".muted" if service.state in DOWN_STATES else ""
    cells: list[str | tuple[str, str]] = [
        ("▌" if state.is_selected(service) else " ", ".busy"),
        (TAG if service.name in state.viewer.tagged else " ", ".accent"),
        (fit(" " * indent + service.name, name_width), ".strong" if not indent else ""),
        " ",
        (fit(state_text(service, state), STATE_WIDTH), state_style(service)),
    ]
    cells += [
        (" " + fit(column.text(service, state), column.width, right=True), column.style or quiet) for column in columns
    ]
    words, style = explanation(service, state)
    return line(*cells, ("  " + fit(_whole_clause(words, note_width), note_width), style))


def _whole_clause(words: str, width: int) -> str:
    """The first clause alone where it just fits: an ellipsis would take the place of its last letter."""
    clause, comma, _ = words.partition(", ")
    return clause if comma and cell_len(clause) == width else words


STATE_WIDTH = 16
LONG_WAIT_S = 600
"""From here on the seconds of a passing state are left out."""


def state_text(service: ServiceStatus, state: ViewState) -> str:
    """`● ready`; transitional states with seconds: `◐ starting 12s`; unhealthy ones with the probe outcome."""
    if service.state is ServiceState.UNHEALTHY and service.probe in PROBE_SIGNS:
        return " ".join(PROBE_SIGNS[service.probe])
    text = f"{SERVICE_GLYPHS[service.state]} {service.state}"
    transitions = state.transitions.get(service.name, ())
    if service.state in PASSING_STATES and transitions:
        waited_s = state.now - transitions[-1].time
        return f"{text} {clock_text(waited_s) if waited_s < LONG_WAIT_S else age_text(waited_s)}"
    if service.state is ServiceState.FAILED and service.exit_code is not None:
        return f"{text} ({service.exit_code})"
    return text


def state_style(service: ServiceStatus) -> str:
    """The colour of its state."""
    is_hanging = service.state is ServiceState.UNHEALTHY and service.probe in PROBE_SIGNS
    return ".error" if is_hanging else STATE_STYLES[service.state]


def explanation(service: ServiceStatus, state: ViewState) -> Styled:
    """Why a service is in its state: start phase or probe answer, what it waits for, else the supervisor's reason.

    A service that is still ready but no longer answers shows that here first: `◌ hanging: /health: no answer in 10 s`.
    """
    match service.state:
        case ServiceState.STARTING if service.phase is not None and service.rank_stall is None:
            return service.phase, ".muted"
        case ServiceState.STARTING | ServiceState.READY if service.probe in PROBE_SIGNS:
            sign, word = PROBE_SIGNS[service.probe]
            return f"{sign} {word}: {service.health}", ".warning"
        case ServiceState.STARTING | ServiceState.READY if service.rank_stall is not None:
            return service.rank_stall.text, ".warning"
        case ServiceState.READY if service.waits_for in TOLD_WAITS:
            return TOLD_WAITS[service.waits_for], ".muted"
        case ServiceState.STARTING if service.health is not None:
            return service.health, ".muted"
        case ServiceState.WAITING if missing := missing_needs(service, state):
            done = preparation(service)
            return f"{done}, waits for {names_text(missing)}" if done else f"waits for {names_text(missing)}", ".muted"
        case ServiceState.UNHEALTHY if service.probe in PROBE_SIGNS and service.health:
            return service.health, ".warning"
        case ServiceState.UNHEALTHY:
            return reason(service) or service.health or "", ".warning"
        case ServiceState.FAILED:
            return reason(service) or "", ".error"
        case _:
            return reason(service) or service.health or "", ".muted"


def _columns_for(room: int, *, has_gpus: bool) -> list[Column]:
    """The columns of the lowest ranks that leave the explanation its room, in their order."""
    wanted = [column for column in COLUMNS if has_gpus or not column.is_for_gpus]
    chosen: list[Column] = []
    for column in sorted(wanted, key=lambda column: column.rank):
        if room - column.width - 1 < MIN_NOTE:
            break
        room -= column.width + 1
        chosen.append(column)
    return [column for column in wanted if column in chosen]


def _uptime_s(service: ServiceStatus, state: ViewState) -> float | None:
    if service.started_at is None or service.state in DOWN_STATES:
        return None
    return max(0.0, state.now - service.started_at)


def _ports(service: ServiceStatus) -> str:
    return str(service.ports[0]) + ("+" if len(service.ports) > 1 else "") if service.ports else UNKNOWN


def _number(number: int | None) -> str:
    return UNKNOWN if number is None else str(number)
