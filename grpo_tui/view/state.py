"""All that the screen knows, and how it changes: `reduce(state, change) -> state`. Pure; the screen draws from it.

A change is something the daemon said (`grpo_engine.wire.supervisor`), something read from the run's files, a key, or
the clock. Paths, sockets and terminals are elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Literal, assert_never

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
from grpo_tui.supervisor.timeline import after_event
from grpo_tui.view import alignment_view, gpu_view, log_view, plot_view, rollout_view, travel, viewer
from grpo_tui.view.diagnosis import GRAVITY, diagnose
from grpo_tui.view.folder_watch import FolderFate, folder_warnings
from grpo_tui.view.history import MetricHistory, extended
from grpo_tui.view.phases import StartPhases, Transition, Transitions, after_hearing, after_looking, last_restart
from grpo_tui.view.travel import Known

MAX_LOG_LINES = 5000
MAX_NOTICES = 100
FELT_SHARE = 0.002
"""Changes of the host's memory below this share of it are not seen in a bar."""
INFERENCE_KIND = "inference"
CONVENTIONAL_INFERENCE_NAME = "vllm"
"""A profile of plain commands calls its inference server so."""

Do = Literal["start", "stop", "restart", "kill", "down"]


class Connection(StrEnum):
    """How things stand between the screen and the run's daemon."""

    CONNECTING = "connecting"
    LIVE = "live"
    LOST = "lost"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """The end of one service's log."""

    service: str | None = None
    lines: tuple[str, ...] = ()
    open_line: str = ""
    """The line that is being written; a progress bar rewrites it."""
    num_dropped: int = 0
    """Lines that went out of memory; the number of `lines[0]`, counted from where reading began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory of the whole machine."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The last thing that was asked for or that happened, in words, for the line above the keys."""

    severity: Literal["info", "warning", "error"]
    text: str
    time: float
    is_answer: bool = False
    """Whether it answers a key, and is not news."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewState:
    """What the screen shows."""

    run_folder: Path
    now: float
    connection: Connection = Connection.CONNECTING
    connection_note: str = ""
    """In words, while there is no connection."""
    last_number: int = -1
    """Of the newest event."""
    status: RunStatus | None = None
    transitions: Transitions = field(default_factory=lambda: MappingProxyType({}))
    """The latest states of each service, the newest last."""
    start_phases: StartPhases = field(default_factory=lambda: MappingProxyType({}))
    """What the latest start of each service was at, as its log tells, the newest last."""
    history: MetricHistory = field(default_factory=MetricHistory)
    num_bad_metric_lines: int = 0
    folder_fate: FolderFate = FolderFate.THERE
    selected: str | None = None
    has_chosen: bool = False
    """Whether a person selected it; until the run is up, the selection else goes with what starts."""
    is_following: bool = True
    log: LogView = LogView()
    host_memory: HostMemory | None = None
    notices: tuple[Notice, ...] = ()
    outcome: Outcome | None = None
    metric_warnings: tuple[Warning, ...] = ()
    """Those found in the metrics alone; made anew when a step arrives, not when the clock ticks."""
    warnings: tuple[Warning, ...] = ()
    """The daemon's and those found here, each id once, the gravest first."""
    gpus: gpu_view.GpuView = field(default_factory=gpu_view.GpuView)
    alignment: alignment_view.AlignmentView = field(default_factory=alignment_view.AlignmentView)
    rollouts: rollout_view.RolloutView = field(default_factory=rollout_view.RolloutView)
    plots: plot_view.PlotView = field(default_factory=plot_view.PlotView)
    logs: log_view.LogsView = field(default_factory=log_view.LogsView)
    travel: travel.Travel = field(default_factory=travel.Travel)
    viewer: viewer.Viewer = field(default_factory=viewer.Viewer)
    """What the other screens know, each in a module of its own that says how it changes."""

    @property
    def run(self) -> str:
        """The run's id: the name of its folder."""
        return self.run_folder.name

    @property
    def services(self) -> tuple[ServiceStatus, ...]:
        """In the order of the plan."""
        return tuple(self.status.services) if self.status else ()

    @property
    def until(self) -> float | None:
        """Up to when data counts, in Unix seconds; None while the screen shows the present."""
        return self.travel.until

    @property
    def known_time(self) -> Known:
        """What is known of the run's time, for travelling in it."""
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
    def folder_warnings(self) -> tuple[Warning, ...]:
        """What is to be said of the run's folder; nothing while it is as it was."""
        is_supervised = self.connection is Connection.LIVE
        told = folder_warnings(self.folder_fate, self.run_folder, is_over=self.has_ended, is_supervised=is_supervised)
        return tuple(told)

    @property
    def may_act(self) -> bool:
        """Whether a key can do something to the run: to none that is over, past, out of reach or only watched."""
        is_there = not self.has_ended and self.connection not in (Connection.LOST, Connection.ENDED)
        return is_there and not self.travel.is_open and not self.viewer.is_read_only

    @property
    def chosen(self) -> tuple[ServiceStatus, ...]:
        """The services that a key is for: those that are tagged, else the selected one."""
        tagged = tuple(service for service in self.services if service.name in self.viewer.tagged)
        return tagged or tuple(service for service in self.services if service.name == self.selected)

    def service(self, name: str | None) -> ServiceStatus | None:
        """The service of that name, if the run has one."""
        return next((service for service in self.services if service.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """The clock moved on."""

    now: float
    host_memory: HostMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLost:
    """The daemon does not answer."""

    note: str
    is_over: bool = False
    """Whether it said goodbye, or its last state is that of an ended run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRead:
    """`state.json` was read, because no daemon answers."""

    status: RunStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRead:
    """Lines of `metrics.jsonl`."""

    lines: tuple[MetricsLine, ...]
    is_restarted: bool = False
    num_bad_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLooked:
    """The run's folder was looked for."""

    fate: FolderFate


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
    """A key asked the daemon for something."""

    do: Do
    service: str | None
    time: float
    takes_ports: bool = False
    """Whether strangers on the service's ports are to be ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRefused:
    """The daemon said no, or could not be reached."""

    do: Do
    service: str | None
    error: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The screen has something to say to the person before it."""

    severity: Literal["info", "warning", "error"]
    text: str
    time: float


Change = (
    Snapshot | ServiceChanged | RunChanged | UsageSampled | Notice | Bye
    | Ticked | ConnectionLost | StatusRead | MetricsRead | FolderLooked | LogRead
    | ServiceSelected | SelectionMoved | FollowChanged | CommandSent | CommandRefused | Told
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
            return replace(state, now=change.now, host_memory=_felt(state.host_memory, change.host_memory))
        case ConnectionLost():
            connection = Connection.ENDED if change.is_over else Connection.LOST
            return _rediagnosed(replace(state, connection=connection, connection_note=change.note))
        case StatusRead():
            return _with_status(state, change.status)
        case MetricsRead():
            return _with_metrics(state, change)
        case FolderLooked():
            return _rediagnosed(replace(state, folder_fate=change.fate))
        case LogRead():
            return _with_log(state, change)
        case ServiceSelected():
            return _selecting(state, change.name)
        case SelectionMoved():
            return _moved(state, change.by)
        case FollowChanged():
            return replace(state, is_following=change.is_following)
        case CommandSent():
            taking = ", ending who holds its port" if change.takes_ports else ""
            return _with_outcome(state, "info", f"{_asked(change.do, change.service)}{taking} …", change.time)
        case CommandRefused():
            text = f"{_asked(change.do, change.service)} was refused: {change.error}"
            return _with_answer(state, "error", text, change.time)
        case Told():
            return _with_answer(state, change.severity, change.text, change.time)
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
    """The states of a service's last restart, with their times; none of one that was only ever started once."""
    return last_restart(state.transitions.get(service, ()))


def inference_service(state: ViewState) -> str | None:
    """The service that the restart key is for: the selected inference server, else the first one."""
    servers = [service.name for service in state.services if service.kind == INFERENCE_KIND]
    if not servers and state.service(CONVENTIONAL_INFERENCE_NAME):
        return CONVENTIONAL_INFERENCE_NAME
    return state.selected if state.selected in servers else next(iter(servers), None)


def _after_event(state: ViewState, event: ServiceChanged | RunChanged | UsageSampled | Notice) -> ViewState:
    match event:
        case ServiceChanged():
            at = event.time
            transitions, phases = after_hearing(state.transitions, state.start_phases, event.service, at, told_at=at)
            return _told(replace(state, transitions=transitions, start_phases=phases), event)
        case RunChanged():
            return _told(state, event)
        case UsageSampled():
            if state.status is None:
                return state
            return _told(replace(state, gpus=gpu_view.sampled(state.gpus, event)), event)
        case Notice():
            noted = replace(state, notices=(*state.notices, event)[-MAX_NOTICES:])
            subject = f"{event.service}: " if event.service else ""
            return _with_outcome(noted, event.severity, subject + event.text, event.time)
        case _:
            assert_never(event)


def _told(state: ViewState, event: ServiceChanged | RunChanged | UsageSampled) -> ViewState:
    if state.status is None:
        return state
    return _rediagnosed(_selecting_what_starts(replace(state, status=after_event(state.status, event))))


def _with_status(state: ViewState, status: RunStatus) -> ViewState:
    """Take over a whole status document, and keep the selection where that service still exists."""
    names = [service.name for service in status.services]
    selected = state.selected if state.selected in names else _first_choice(status)
    log = state.log if state.selected == selected else LogView(service=selected)
    transitions, phases = after_looking(state.transitions, state.start_phases, status.services, state.now)
    known = replace(state, status=status, selected=selected, log=log, transitions=transitions, start_phases=phases)
    return _rediagnosed(known)


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
    """Show the log of what the run waits for; once it is up, keys act on what stands there, so it stays."""
    if state.has_chosen or state.status is None or state.status.state is not RunState.STARTING:
        return state
    return _showing(state, _first_choice(state.status))


def _rediagnosed(state: ViewState) -> ViewState:
    """Put the daemon's warnings and our own into one list, each id once, the gravest first."""
    warnings = merged_warnings(state.status, (*state.folder_warnings, *state.metric_warnings))
    return state if warnings == state.warnings else replace(state, warnings=warnings)


def merged_warnings(status: RunStatus | None, own: tuple[Warning, ...]) -> tuple[Warning, ...]:
    """The daemon's warnings and our own, each id once, the gravest first."""
    by_id = {warning.id: warning for warning in (status.warnings if status else [])}
    for warning in (*diagnose((), status), *own):
        by_id.setdefault(warning.id, warning)
    return tuple(sorted(by_id.values(), key=lambda warning: GRAVITY[warning.severity]))


def _with_metrics(state: ViewState, read: MetricsRead) -> ViewState:
    history = extended(MetricHistory() if read.is_restarted else state.history, read.lines)
    num_bad = read.num_bad_lines + (0 if read.is_restarted else state.num_bad_metric_lines)
    found = tuple(diagnose(history.lines, None))
    return _rediagnosed(replace(state, history=history, num_bad_metric_lines=num_bad, metric_warnings=found))


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
    return _showing(replace(state, has_chosen=True), name) if state.service(name) is not None else state


def _showing(state: ViewState, name: str | None) -> ViewState:
    if name == state.selected:
        return state
    return replace(state, selected=name, log=LogView(service=name), is_following=True)


def _moved(state: ViewState, by: int) -> ViewState:
    names = [service.name for service in state.services]
    if not names:
        return state
    place = names.index(state.selected) + by if state.selected in names else 0
    return _selecting(state, names[min(max(place, 0), len(names) - 1)])


def _felt(before: HostMemory | None, now: HostMemory | None) -> HostMemory | None:
    """The newer measurement, unless it is the same to the eye: then the old one, so that nothing is drawn anew."""
    if before is None or now is None:
        return now or before
    is_same = abs(now.available_bytes - before.available_bytes) < FELT_SHARE * before.total_bytes
    return before if is_same else now


def _asked(do: Do, service: str | None) -> str:
    return f"{do} {service}" if service else {"down": "ending the run"}.get(do, do)


def _with_outcome(state: ViewState, severity: Literal["info", "warning", "error"], text: str, time: float) -> ViewState:
    return replace(state, outcome=Outcome(severity=severity, text=text, time=time))


def _with_answer(state: ViewState, severity: Literal["info", "warning", "error"], text: str, time: float) -> ViewState:
    return replace(state, outcome=Outcome(severity=severity, text=text, time=time, is_answer=True))
