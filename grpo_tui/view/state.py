"""The state of the screen, and how it changes: `reduce(state, change) -> state`. Pure; the screen draws from it.

A change is an event of the supervisor (`grpo_engine.wire.supervisor`), something read from the run's files, a key, or
a clock tick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Literal, assert_never

from grpo_engine.diagnosis.evidence import RunSettings
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.supervisor import (
    ENDED_RUN_STATES,
    Bye,
    Notice,
    RunChanged,
    RunState,
    RunStatus,
    ServiceChanged,
    ServiceState,
    ServiceStatus,
    Snapshot,
    UsageSampled,
    Warning,
)
from grpo_tui.run_files.timeline import after_event
from grpo_tui.services.base import Launch
from grpo_tui.view import machine_selection, viewer
from grpo_tui.view.alignment import state as alignment_view
from grpo_tui.view.diagnosis import UNKNOWN_SETTINGS, diagnose, merged_warnings
from grpo_tui.view.folder_watch import FolderState, folder_warnings
from grpo_tui.view.gpus import state as gpu_view
from grpo_tui.view.logs import state as log_view
from grpo_tui.view.logs.tail import LogView
from grpo_tui.view.machine_selection import MachineFolded, MachineSelected
from grpo_tui.view.machines import MachineRow, shown_rows
from grpo_tui.view.metrics import state as plot_view
from grpo_tui.view.metrics.history import MetricHistory, extended
from grpo_tui.view.metrics.names import bands_of
from grpo_tui.view.phases import StartPhases, Transition, Transitions, last_restart, with_service, with_services
from grpo_tui.view.progress import Progress, progress_of
from grpo_tui.view.rollouts import state as rollout_view
from grpo_tui.view.timeline import state as travel
from grpo_tui.view.timeline.state import Known

MAX_LOG_LINES = 5000
MAX_MESSAGES = 100
VISIBLE_MEMORY_SHARE = 0.002
"""Smaller changes of host memory are not visible in a bar, and are not redrawn."""
INFERENCE_KIND = "inference"
CONVENTIONAL_INFERENCE_NAME = "vllm"
"""A profile of plain commands calls its inference server so."""

Do = Literal["start", "stop", "restart", "kill", "down"]


class Connection(StrEnum):
    """State of the connection to the supervisor."""

    CONNECTING = "connecting"
    LIVE = "live"
    LOST = "lost"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory of the whole machine."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A command, an answer or a notice; the newest stands in the line above the keys."""

    severity: Literal["info", "warning", "error"]
    text: str
    time: float
    is_answer: bool = False
    """Whether it answers a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewState:
    """What the screen shows."""

    run_folder: Path
    now: float
    connection: Connection = Connection.CONNECTING
    connection_note: str = ""
    """Shown while there is no connection."""
    last_number: int = -1
    """Of the newest event."""
    status: RunStatus | None = None
    launches: Mapping[str, Launch] = field(default_factory=lambda: MappingProxyType({}))
    """What the plan says of each service: needs, probes, limits; empty until it is read."""
    settings: RunSettings = UNKNOWN_SETTINGS
    """By which its metrics are judged; unknown until they are read."""
    transitions: Transitions = field(default_factory=lambda: MappingProxyType({}))
    """The latest states of each service, the newest last."""
    start_phases: StartPhases = field(default_factory=lambda: MappingProxyType({}))
    """The phases of each service's latest start, from its log, the newest last."""
    history: MetricHistory = field(default_factory=MetricHistory)
    num_bad_metric_lines: int = 0
    folder_state: FolderState = FolderState.THERE
    selected: str | None = None
    has_chosen: bool = False
    """Whether the user selected it; otherwise the selection follows the starting service until the run is up."""
    is_following: bool = True
    log: LogView = field(default_factory=LogView)
    host_memory: HostMemory | None = None
    messages: tuple[Outcome, ...] = ()
    """The newest last."""
    metric_warnings: tuple[Warning, ...] = ()
    """Warnings from metrics alone; recomputed after each step, not each second."""
    warnings: tuple[Warning, ...] = ()
    """Warnings of the supervisor and of the rules here, each id once, the most severe first."""
    gpus: gpu_view.GpuView = field(default_factory=gpu_view.GpuView)
    alignment: alignment_view.AlignmentView = field(default_factory=alignment_view.AlignmentView)
    rollouts: rollout_view.RolloutView = field(default_factory=rollout_view.RolloutView)
    plots: plot_view.PlotView = field(default_factory=plot_view.PlotView)
    logs: log_view.LogsView = field(default_factory=log_view.LogsView)
    travel: travel.Travel = field(default_factory=travel.Travel)
    viewer: viewer.Viewer = field(default_factory=viewer.Viewer)
    """The states of the other screens; each has a module that changes it."""

    @property
    def run(self) -> str:
        """The run's id: the name of its folder."""
        return self.run_folder.name

    @property
    def services(self) -> tuple[ServiceStatus, ...]:
        """In the order of the plan."""
        return tuple(self.status.services) if self.status else ()

    @property
    def outcome(self) -> Outcome | None:
        """The newest message."""
        return self.messages[-1] if self.messages else None

    @property
    def until(self) -> float | None:
        """The moment that the screen shows, in Unix seconds; None while it shows the present."""
        return self.travel.until

    @property
    def known_time(self) -> Known:
        """The known times of the run, for the timeline."""
        started_at, ended_at = (self.status.started_at, self.status.ended_at) if self.status else (None, None)
        return Known(
            now=self.now,
            is_over=self.has_ended,
            started_at=started_at,
            ended_at=ended_at,
            steps=self.history.lines,
        )

    @property
    def has_ended(self) -> bool:
        """Whether the run is over."""
        return self.status is not None and self.status.state in ENDED_RUN_STATES

    @property
    def progress(self) -> Progress:
        """How far the run is; how long it will take is told of the present only."""
        is_live = self.status is not None and not self.has_ended and self.until is None
        return progress_of(self.history.lines, self.settings.training_steps, is_live=is_live)

    @property
    def folder_warnings(self) -> tuple[Warning, ...]:
        """The warning about the run's folder if it was deleted or replaced."""
        is_supervised = self.connection is Connection.LIVE
        told = folder_warnings(self.folder_state, self.run_folder, is_over=self.has_ended, is_supervised=is_supervised)
        return tuple(told)

    @property
    def may_act(self) -> bool:
        """Whether keys may act on the run: not if it is over, unreachable, shown in the past, or read-only."""
        is_there = not self.has_ended and self.connection not in (Connection.LOST, Connection.ENDED)
        return is_there and not self.travel.is_open and not self.viewer.is_read_only

    @property
    def chosen(self) -> tuple[ServiceStatus, ...]:
        """The services that keys act on: the tagged ones, else the selected one; none where a machine is selected."""
        tagged = tuple(service for service in self.services if service.name in self.viewer.tagged)
        if tagged or self.viewer.machine is not None:
            return tagged
        return tuple(service for service in self.services if service.name == self.selected)

    @property
    def rows(self) -> tuple[MachineRow | ServiceStatus, ...]:
        """The rows of the table: services, and above them their machines where the run is on several."""
        return shown_rows(self.status, self.viewer.folded)

    @property
    def selected_row(self) -> int:
        """The place of the selected row in `rows`; 0 where nothing is selected."""
        return next((place for place, row in enumerate(self.rows) if self.is_selected(row)), 0)

    def is_selected(self, row: MachineRow | ServiceStatus) -> bool:
        """Whether this row is the selected one: that of a machine, or of the service whose log is shown."""
        if isinstance(row, MachineRow) or self.viewer.machine is not None:
            return isinstance(row, MachineRow) and row.name == self.viewer.machine
        return row.name == self.selected

    def service(self, name: str | None) -> ServiceStatus | None:
        """The service of that name, if the run has one."""
        return next((service for service in self.services if service.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """A clock tick."""

    now: float
    host_memory: HostMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLost:
    """The supervisor does not answer."""

    note: str
    is_over: bool = False
    """Whether the run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRead:
    """`state.json` was read, because no supervisor answers."""

    status: RunStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchesRead:
    """The plan of the run was read."""

    launches: Mapping[str, Launch]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsRead:
    """The settings of the run were read."""

    settings: RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRead:
    """Lines of `metrics.jsonl`."""

    lines: tuple[MetricsLine, ...]
    is_restarted: bool = False
    num_bad_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderChecked:
    """The run's folder was checked."""

    state: FolderState


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRead:
    """Lines of a service's log."""

    service: str
    lines: tuple[str, ...]
    open_line: str = ""
    is_restarted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSelected:
    """A service was clicked."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionMoved:
    """A key moved the selection by so many rows."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowChanged:
    """The log began or ceased to follow its end."""

    is_following: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSent:
    """A command was sent to the supervisor."""

    do: Do
    service: str | None
    time: float
    takes_ports: bool = False
    """Whether foreign processes on the service's ports are to be ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRefused:
    """The supervisor refused the command, or could not be reached."""

    do: Do
    service: str | None
    error: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageShown:
    """The screen answers a key with a message."""

    severity: Literal["info", "warning", "error"]
    text: str
    time: float | None = None
    """None: now."""


Change = (
    Snapshot | ServiceChanged | RunChanged | UsageSampled | Notice | Bye
    | Ticked | ConnectionLost | StatusRead | LaunchesRead | SettingsRead | MetricsRead | FolderChecked | LogRead
    | ServiceSelected | MachineSelected | MachineFolded | SelectionMoved | FollowChanged
    | CommandSent | CommandRefused | MessageShown
    | gpu_view.GpuChange | alignment_view.AlignmentChange | rollout_view.RolloutChange
    | plot_view.PlotChange | log_view.LogChange | travel.TravelChange | viewer.ViewerChange
)  # fmt: skip


def reduce(state: ViewState, change: Change) -> ViewState:
    """The state after `change`; events that a snapshot already holds change nothing."""
    match change:
        case Snapshot():
            connected = replace(state, connection=Connection.LIVE, connection_note="", last_number=change.number)
            return _with_status(connected, change.status)
        case ServiceChanged() | RunChanged() | UsageSampled() | Notice():
            if change.number <= state.last_number:
                return state
            return _after_event(replace(state, last_number=change.number), change)
        case Bye():
            status = state.status and state.status.model_copy(update={"state": change.state})
            note = f"the run is over: {change.state}"
            return _rediagnosed(replace(state, connection=Connection.ENDED, connection_note=note, status=status))
        case Ticked():
            memory = _visible_memory(state.host_memory, change.host_memory)
            return _rediagnosed(replace(state, now=change.now, host_memory=memory))
        case ConnectionLost():
            connection = Connection.ENDED if change.is_over else Connection.LOST
            return _rediagnosed(replace(state, connection=connection, connection_note=change.note))
        case StatusRead():
            return _with_status(state, change.status)
        case LaunchesRead():
            return replace(state, launches=change.launches)
        case SettingsRead():
            bands = bands_of(change.settings)
            judged = replace(state, settings=change.settings, history=replace(state.history, bands=bands))
            return _with_history(judged, judged.history)
        case MetricsRead():
            return _with_metrics(state, change)
        case FolderChecked():
            return _rediagnosed(replace(state, folder_state=change.state))
        case LogRead():
            return _with_log(state, change)
        case ServiceSelected():
            return _selecting(state, change.name)
        case MachineSelected():
            return _at_machine(state, change.name)
        case MachineFolded():
            viewer_then = machine_selection.folded(state.viewer, state.status, change, state.selected)
            return replace(state, viewer=viewer_then)
        case SelectionMoved():
            return _moved(state, change.by)
        case FollowChanged():
            return replace(state, is_following=change.is_following)
        case CommandSent():
            taking = ", ending the process on its port" if change.takes_ports else ""
            text = f"{_asked(change.do, change.service)}{taking} …"
            return _told(state, Outcome(severity="info", text=text, time=change.time))
        case CommandRefused():
            text = f"{_asked(change.do, change.service)} refused: {change.error}"
            return _told(state, Outcome(severity="error", text=text, time=change.time, is_answer=True))
        case MessageShown():
            at = state.now if change.time is None else change.time
            answer = Outcome(severity=change.severity, text=change.text, time=at, is_answer=True)
            return _told(state, answer)
        case gpu_view.GpuChange():
            return replace(state, gpus=gpu_view.after(state.gpus, change))
        case alignment_view.AlignmentChange():
            return replace(state, alignment=alignment_view.after(state.alignment, change))
        case rollout_view.RolloutChange():
            return replace(state, rollouts=rollout_view.after(state.rollouts, change))
        case plot_view.PlotChange():
            return replace(state, plots=plot_view.after(state.plots, change))
        case log_view.LogChange():
            return replace(state, logs=log_view.after(state.logs, change))
        case travel.TravelChange():
            return replace(state, travel=travel.after(state.travel, change, state.known_time))
        case viewer.ViewerChange():
            return replace(state, viewer=viewer.after(state.viewer, change))
        case _:
            assert_never(change)


def phases_of_restart(state: ViewState, service: str) -> tuple[Transition, ...]:
    """The states of a service's last restart, with their times; empty if it was started only once."""
    return last_restart(state.transitions.get(service, ()))


def outcome_of(notice: Notice) -> Outcome:
    """A notice as a message."""
    is_named = not notice.service or notice.text.startswith((f"{notice.service} ", f"{notice.service}:"))
    subject = "" if is_named else f"{notice.service}: "
    return Outcome(severity=notice.severity, text=subject + notice.text, time=notice.time)


def inference_service(state: ViewState) -> str | None:
    """The service that `v` restarts: the selected inference server, else the first one."""
    servers = [service.name for service in state.services if service.kind == INFERENCE_KIND]
    if not servers and state.service(CONVENTIONAL_INFERENCE_NAME):
        return CONVENTIONAL_INFERENCE_NAME
    return state.selected if state.selected in servers else next(iter(servers), None)


def _after_event(state: ViewState, event: ServiceChanged | RunChanged | UsageSampled | Notice) -> ViewState:
    match event:
        case ServiceChanged():
            at = event.time
            transitions, phases = with_service(state.transitions, state.start_phases, event.service, at, phase_since=at)
            return _after_status_event(replace(state, transitions=transitions, start_phases=phases), event)
        case RunChanged():
            return _after_status_event(state, event)
        case UsageSampled():
            if state.status is None:
                return state
            return _after_status_event(replace(state, gpus=gpu_view.sampled(state.gpus, event)), event)
        case Notice():
            return _told(state, outcome_of(event))
        case _:
            assert_never(event)


def _after_status_event(state: ViewState, event: ServiceChanged | RunChanged | UsageSampled) -> ViewState:
    if state.status is None:
        return state
    after = replace(state, status=after_event(state.status, event))
    return _rediagnosed(_at_known_machine(_selecting_what_starts(after)))


def _at_known_machine(state: ViewState) -> ViewState:
    return replace(state, viewer=machine_selection.at_known_machine(state.viewer, state.status))


def _with_status(state: ViewState, status: RunStatus) -> ViewState:
    """Take over a whole status document, and keep the selection where that service still exists."""
    names = [service.name for service in status.services]
    selected = state.selected if state.selected in names else _first_choice(status)
    log = state.log if state.selected == selected else LogView(service=selected)
    transitions, phases = with_services(state.transitions, state.start_phases, status.services, state.now)
    known = replace(state, status=status, selected=selected, log=log, transitions=transitions, start_phases=phases)
    return _rediagnosed(_at_known_machine(known))


def _first_choice(status: RunStatus) -> str | None:
    """The service whose log is shown first: one that failed, else one that starts while the run is not up, else the
    trainer, else the last of the plan."""
    failed = [service.name for service in status.services if service.state is ServiceState.FAILED]
    starting = [
        service.name
        for service in status.services
        if status.state is RunState.STARTING and service.state is ServiceState.STARTING
    ]
    trainers = [service.name for service in status.services if service.kind == "trainer"]
    last = [service.name for service in status.services[-1:]]
    return next(iter([*failed, *starting, *trainers, *last]), None)


def _selecting_what_starts(state: ViewState) -> ViewState:
    """Select the service that is starting; once the run is up the selection stays, since keys act on it."""
    if state.has_chosen or state.status is None or state.status.state is not RunState.STARTING:
        return state
    return _showing(state, _first_choice(state.status))


def _rediagnosed(state: ViewState) -> ViewState:
    """Merge the supervisor's warnings and our own."""
    own = (*state.folder_warnings, *state.metric_warnings)
    warnings = merged_warnings(state.status, own, state.history.lines, state.now)
    return state if warnings == state.warnings else replace(state, warnings=warnings)


def _with_metrics(state: ViewState, read: MetricsRead) -> ViewState:
    before = MetricHistory(bands=state.history.bands) if read.is_restarted else state.history
    num_bad = read.num_bad_lines + (0 if read.is_restarted else state.num_bad_metric_lines)
    return _with_history(replace(state, num_bad_metric_lines=num_bad), extended(before, read.lines))


def _with_history(state: ViewState, history: MetricHistory) -> ViewState:
    found = tuple(diagnose(history.lines, None, state.settings))
    return _rediagnosed(replace(state, history=history, metric_warnings=found))


def _with_log(state: ViewState, read: LogRead) -> ViewState:
    if read.service != state.selected:
        return state
    is_fresh = read.is_restarted or state.log.service != read.service
    before = () if is_fresh else state.log.lines
    dropped = 0 if is_fresh else state.log.num_dropped
    lines = (*before, *read.lines)
    surplus = max(0, len(lines) - MAX_LOG_LINES)
    log = LogView(service=read.service, lines=lines[surplus:], open_line=read.open_line, num_dropped=dropped + surplus)
    return replace(state, log=log)


def _selecting(state: ViewState, name: str) -> ViewState:
    if state.service(name) is None:
        return state
    viewer_there = machine_selection.at_service(state.viewer, state.status, name)
    return _showing(replace(state, has_chosen=True, viewer=viewer_there), name)


def _at_machine(state: ViewState, name: str) -> ViewState:
    return replace(state, viewer=machine_selection.at_machine(state.viewer, state.status, name))


def _showing(state: ViewState, name: str | None) -> ViewState:
    if name == state.selected:
        return state
    return replace(state, selected=name, log=LogView(service=name), is_following=True)


def _moved(state: ViewState, by: int) -> ViewState:
    rows = state.rows
    if not rows:
        return state
    is_anywhere = any(map(state.is_selected, rows))
    place = state.selected_row + by if is_anywhere else 0
    row = rows[min(max(place, 0), len(rows) - 1)]
    return _at_machine(state, row.name) if isinstance(row, MachineRow) else _selecting(state, row.name)


def _visible_memory(before: HostMemory | None, now: HostMemory | None) -> HostMemory | None:
    """The newer measurement, or the old one if the difference is not visible, so that nothing is redrawn."""
    if before is None or now is None:
        return now or before
    is_same = abs(now.available_bytes - before.available_bytes) < VISIBLE_MEMORY_SHARE * before.total_bytes
    return before if is_same else now


def _asked(do: Do, service: str | None) -> str:
    return f"{do} {service}" if service else {"down": "ending the run"}.get(do, do)


def _told(state: ViewState, outcome: Outcome) -> ViewState:
    return replace(state, messages=(*state.messages, outcome)[-MAX_MESSAGES:])
