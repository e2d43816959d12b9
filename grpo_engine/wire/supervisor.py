"""What the supervisor says: states, the status document, and the lines on its unix socket.

Written by `grpo_tui.supervisor`; read by the command line, the screen, and scripts (`status --json`). Unknown is null.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import Message

PROTOCOL_VERSION = 1
RUN_FOLDER_VARIABLE, SERVICE_VARIABLE = "GRPO_TUI_RUN_FOLDER", "GRPO_TUI_INFERENCE"
"""In the environment of services: the folder of their run, and for a trainer the name of the inference service."""
MAX_TEMPORARY_FOLDER_BYTES = 107 - len("/v-12345678/123e4567-e89b-12d3-a456-426614174000")
"""How long the name of a service's TMPDIR may be: the kernel takes 107 bytes for a socket's path, and vLLM's sockets
lie in a folder that our server makes there for those of one start."""
ADDRESS_FILE = "daemon.json"
"""In the run folder: an `Address`."""


class ServiceState(StrEnum):
    """Where a service stands."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"


class ProbeOutcome(StrEnum):
    """What came of asking a service how it is. `grpo_tui.supervisor.probes` says it; people and scripts read it."""

    PASSED = "passed"
    CLOSED = "closed"
    """Nobody listens on its port."""
    BAD_STATUS = "bad-status"
    """It answers, but not with a status that is wanted; 503 while it loads."""
    NO_HTTP = "no-http"
    """Something else than HTTP answers."""
    HUNG_UP = "hung-up"
    """It accepts a connection and closes it without an answer."""
    SILENT = "silent"
    """It accepts a connection, or starts to, and gives no answer in time: it hangs."""
    ENGINE_STALLED = "engine-stalled"
    """Its web server answers, and the engine behind it gives no tokens."""
    NOT_YET = "not-yet"
    """The line is not in its log, the file is not there, the command does not exit 0."""
    UNASKABLE = "unaskable"
    """The question could not be put: no such host, no such command."""


class RunState(StrEnum):
    """Where a run stands."""

    STARTING = "starting"
    RUNNING = "running"
    DEGRADED = "degraded"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


ENDED_RUN_STATES = frozenset({RunState.FINISHED, RunState.FAILED, RunState.STOPPED})


class SupervisorInfo(Message):
    """The daemon's process."""

    pid: int
    started_at: float


class ServiceStatus(Message):
    """One service as `status --json` shows it."""

    name: str
    kind: str
    state: ServiceState
    health: str | None = None
    """The last answer of its probe, in words; null without a probe."""
    probe: ProbeOutcome | None = None
    """The same for programs."""
    phase: str | None = None
    """What its start-up is at, in words, where its log tells."""
    pid: int | None = None
    pgid: int | None = None
    started_at: float | None = None
    ready_at: float | None = None
    attempt: int = 0
    restarts: int = 0
    exit_code: int | None = None
    """Of the last attempt; negative is the signal that ended it."""
    ports: list[int] = []
    gpus: list[int] = []
    cpu_percent: float | None = None
    """Of one core."""
    rss_bytes: int | None = None
    """Of the service and all its descendants."""
    gpu_memory_bytes: int | None = None
    log: str
    """Path of its log file."""
    why: str | None = None
    """In words, why it is not running (or what it is waiting for); null when there is nothing to explain."""
    is_refused: bool = False
    """Whether it was not started because a stranger holds what it needs, e.g. a port."""


class GpuProcess(Message):
    """A process that the driver lists for a GPU."""

    pid: int
    """As the driver tells it; in a container it may be that of the machine outside."""
    is_visible: bool = True
    """Whether it can be looked at; one of another container, or under the pid of another namespace, cannot."""
    command: str = ""
    """Its command line, shortened, with secrets masked; empty where it cannot be seen."""
    user: str | None = None
    service: str | None = None
    """Ours; with `run` the service of that other run."""
    attempt: int | None = None
    """Of a service of this run; null where only the service's own status tells it."""
    run: str | None = None
    """The run that it was started for, where it is not below a keeper of this one."""
    memory_bytes: int | None = None
    gpu_instance: int | None = None
    """With MIG: the instance that it runs on."""


class MigInstance(Message):
    """A slice of a GPU that MIG divides."""

    name: str
    uuid: str
    gpu_instance: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


class GpuStatus(Message):
    """One GPU."""

    index: int
    uuid: str
    name: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    utilization_percent: float | None
    by_service: dict[str, int] = {}
    other_bytes: int | None = None
    other_by_user: dict[str, int] = {}
    """The part of `other_bytes` that goes to processes which can be seen, by the name of their user."""
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    processes: list[GpuProcess] = []
    """All that the driver lists, those that hold most first."""
    are_shares_known: bool = True
    """Whether the driver tells who holds what; in a container it may list pids of the machine outside, or no shares."""
    has_mig: bool = False
    mig: list[MigInstance] = []
    stale_s: float | None = None
    """Seconds since the driver last answered, while it does not; null when the figures are fresh."""


class Warning(Message):
    """Something a person should know, and what to do about it."""

    id: str
    severity: Literal["info", "warning", "error"]
    text: str
    hint: str | None = None


class RunStatus(Message):
    """The document of `status --json` and of `state.json`."""

    run: str
    profile: str
    state: RunState
    is_ending: bool = False
    """Whether it is being taken down; `state` is what it was before, until it is over."""
    supervisor: SupervisorInfo | None
    services: list[ServiceStatus]
    gpus: list[GpuStatus] = []
    gpu_note: str | None = None
    """Why there are no GPUs to show, e.g. `no NVIDIA driver`."""
    metrics: dict[str, float] = {}
    warnings: list[Warning] = []
    started_at: float | None = None
    ended_at: float | None = None


class Address(Message):
    """Where a daemon listens; in a file, since `$XDG_RUNTIME_DIR` may be another one when somebody comes back."""

    pid: int
    socket: str


# --- daemon → client -----------------------------------------------------------------------------------------------


class Hello(Message):
    """First line in each direction."""

    type: Literal["hello"] = "hello"
    version: int = PROTOCOL_VERSION
    run: str
    pid: int
    program: str = ""
    """Version of the package that speaks."""


class Snapshot(Message):
    """The whole state; `number` is that of the last event in it."""

    type: Literal["snapshot"] = "snapshot"
    number: int
    time: float | None = None
    """When it was taken; said in a timeline alone."""
    status: RunStatus


class ServiceChanged(Message):
    """A service changed state, health or explanation."""

    type: Literal["service"] = "service"
    number: int
    time: float
    service: ServiceStatus


class RunChanged(Message):
    """The run changed state."""

    type: Literal["run"] = "run"
    number: int
    time: float
    state: RunState


class UsageSampled(Message):
    """CPU and memory, sampled every second or so; replaces the one before it."""

    type: Literal["usage"] = "usage"
    number: int
    time: float
    cpu_percent: dict[str, float]
    rss_bytes: dict[str, int]
    gpu_memory_bytes: dict[str, int]
    gpus: list[GpuStatus]
    gpu_note: str | None = None
    log_bytes: dict[str, int] = {}
    """How far each service's log went then: the absolute offset of its end, as `grpo_tui.supervisor.capped_log` counts.
    """


class Notice(Message):
    """Something happened that a person should read, e.g. a stage of the teardown with its seconds."""

    type: Literal["notice"] = "notice"
    number: int
    time: float
    severity: Literal["info", "warning", "error"]
    service: str | None = None
    text: str


class Reply(Message):
    """Answer to a `Command`, by its id."""

    type: Literal["reply"] = "reply"
    id: int
    ok: bool
    error: str | None = None
    exit_code: int = 0
    """What a command line should exit with when not ok."""
    status: RunStatus | None = None


class Bye(Message):
    """The daemon ends; nothing follows."""

    type: Literal["bye"] = "bye"
    state: RunState


Event = ServiceChanged | RunChanged | UsageSampled | Notice
FromDaemon = Annotated[
    Hello | Snapshot | ServiceChanged | RunChanged | UsageSampled | Notice | Reply | Bye, Field(discriminator="type")
]


# --- client → daemon -----------------------------------------------------------------------------------------------


class Subscribe(Message):
    """Ask for a `Snapshot` and every `Event` after it."""

    type: Literal["subscribe"] = "subscribe"


class Command(Message):
    """Ask for an action; answered by one `Reply`, at once, or when done if `wait`."""

    type: Literal["command"] = "command"
    id: int
    do: Literal["status", "start", "stop", "restart", "kill", "down"]
    service: str | None = None
    wait: bool = False
    timeout_s: float | None = None
    take_ports: bool = False
    """The word to end strangers of our own user that hold a declared port (start, restart, down)."""


FromClient = Annotated[Hello | Subscribe | Command, Field(discriminator="type")]

_FROM_DAEMON: TypeAdapter[Any] = TypeAdapter(FromDaemon)
_FROM_CLIENT: TypeAdapter[Any] = TypeAdapter(FromClient)


def read_from_daemon(
    line: bytes,
) -> Hello | Snapshot | ServiceChanged | RunChanged | UsageSampled | Notice | Reply | Bye:
    """Read a line that a daemon wrote; raises `PeerError` on anything else."""
    return _read(_FROM_DAEMON, line, "supervisor")  # type: ignore[no-any-return]


def read_from_client(line: bytes) -> Hello | Subscribe | Command:
    """Read a line that a client wrote; raises `PeerError` on anything else."""
    return _read(_FROM_CLIENT, line, "client")  # type: ignore[no-any-return]


def _read(adapter: TypeAdapter[Any], line: bytes, peer: str) -> Any:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        raise PeerError(f"{peer}: not a line of protocol {PROTOCOL_VERSION}: {line[:120]!r}: {error}") from None
