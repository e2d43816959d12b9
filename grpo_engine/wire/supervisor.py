"""The protocol of the supervisor: states, the status document, and the lines on its unix socket.

Written by `grpo_tui.supervisor`; read by the command line, the screen, and scripts (`status --json`). Unknown is null.
"""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import Message, Time, Whole, first_fault, shortened
from grpo_engine.wire.run_folder import CHECKPOINTS, SETTINGS_FILE, checkpoint_steps

PROTOCOL_VERSION = 1
MAX_SERVICES = 4096
"""Of a run, and of its machines, GPUs, disks and the like: a document with more is damaged. A screen looks through all
several times a second, for some in time in proportion to the square."""
MAX_TEMPORARY_FOLDER_BYTES = 107 - len("/v-12345678/123e4567-e89b-12d3-a456-426614174000")
"""How long the name of a service's TMPDIR may be: the kernel takes 107 bytes for a socket's path, and vLLM's sockets
lie in a folder that our server makes there for those of one start."""


Words = Annotated[str, AfterValidator(partial(shortened, most=16_384))]
"""For people; screens lay them out again each second."""


class ServiceState(StrEnum):
    """The state of a service."""

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
    """The result of a probe. Written by `grpo_tui.supervisor.probes`; read by people and scripts."""

    PASSED = "passed"
    CLOSED = "closed"
    """No process listens on its port."""
    FOREIGN_LISTENER = "foreign-listener"
    """A process of another user listens on its port."""
    BAD_STATUS = "bad-status"
    """It answers with another status than the expected one; 503 while it loads."""
    NO_HTTP = "no-http"
    """The answer is not HTTP."""
    HUNG_UP = "hung-up"
    """It accepts a connection and closes it without an answer."""
    SILENT = "silent"
    """It accepts a connection, or starts to, and does not answer in time: it hangs."""
    ENGINE_STALLED = "engine-stalled"
    """Its web server answers, and the engine behind it produces no tokens."""
    NOT_YET = "not-yet"
    """The line is not in its log, the file does not exist, or the command does not exit with 0."""
    UNASKABLE = "unaskable"
    """The probe could not be sent: no such host, no such command."""


class RunState(StrEnum):
    """The state of a run."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    """Services that were ready restart by request, and those that follow them; nothing else is missing."""
    DEGRADED = "degraded"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


ENDED_RUN_STATES = frozenset({RunState.FINISHED, RunState.FAILED, RunState.STOPPED})


def how_to_go_on(run_folder: Path) -> str:
    """For people, about a run that is over: one of an earlier version has no settings to be resumed with."""
    if (run_folder / SETTINGS_FILE).exists():
        return f"`grpo-tui resume {run_folder.name}` goes on with it"
    return "`grpo-tui up` starts another"


def how_it_ended(run_folder: Path, state: RunState) -> str:
    """For people, about a run that is over: its state, and how to go on with it."""
    return f"run {run_folder.name} has ended: {state}; {how_to_go_on(run_folder)}"


def what_comes_next(run_folder: Path) -> str:
    """For people, about a run that has finished: the commands that go on with what it has trained."""
    run, export = run_folder.name, ""
    with suppress(OSError):
        if checkpoint_steps(run_folder / CHECKPOINTS):
            export = f", `grpo-tui export {run} FOLDER` writes its newest checkpoint for transformers and vLLM"
    further = f"`grpo-tui resume {run} --steps +100` trains on"
    return f"`grpo-tui compare {run} RUN` puts it beside another run, {further}{export}"


class ResourceHolder(Message):
    """A process that holds a port or memory of a GPU."""

    pid: Whole | None = None
    """None where the kernel does not say, e.g. for a process of another user."""
    user: str | None = None
    command: str = ""
    """Its command line, shortened, on one line; empty where it cannot be read."""
    is_ours: bool = False
    """Whether it was started by a run of this project; `grpo-tui down` ends it."""


class Refusal(Message):
    """Why a service was not started: one port that is taken, or one GPU with too little free memory.

    Written by `grpo_tui.supervisor.preflight`; read by the screen and by scripts. Example: port 9001, held by pid 4242
    of user ann, `python app.py`, not ours.
    """

    resource: Literal["port", "gpu"]
    port: Whole | None = None
    gpu: Whole | None = None
    holders: list[ResourceHolder] = []
    text: Words
    """The same for a person, with what to do; part of `ServiceStatus.why`."""

    def foreign_holder(self) -> ResourceHolder | None:
        """The process on a port that no run started; such a one is ended with `take_ports` if its user is ours."""
        foreign = (each for each in self.holders if each.pid is not None and not each.is_ours)
        return next(foreign, None) if self.resource == "port" else None


class WaitsFor(StrEnum):
    """What a service waits for, as it reports itself. Read by the screen and by scripts."""

    BATCH = "batch"
    """A trainer, for groups."""
    EVALUATION = "evaluation"
    """A trainer, for the answers of environments."""
    REHEARSAL = "rehearsal"
    """A trainer, for kernels of its first step, which it tries and drops."""
    UPDATE = "update"
    """A trainer, for the inference server to take new weights or to come back."""
    INFERENCE = "inference"
    """An environment, for completions."""
    REWARDS = "rewards"
    """An environment, for its reward function."""
    ROLLOUT_API = "rollout-api"
    """For an answer of the rollout API, or room in its queue."""
    TRAINER = "trainer"
    """An environment that has sampled as far ahead as it may, or has no trainer yet."""
    STEP = "step"
    """An inference server that sleeps, for the end of the trainer's step."""


class DiskSpace(Message):
    """Space of one file system."""

    folder: str
    """A folder on it that the run writes to."""
    device: Whole
    """As in `stat`: which file system it is."""
    free_bytes: Whole
    """For this user."""
    total_bytes: Whole
    is_full: bool
    """No space, or no inodes, are left."""


class WriteFault(Message):
    """A file or folder that cannot be written, as long as that is so."""

    path: str
    error: str
    """As the system calls it."""
    effect: str
    """What does not happen meanwhile, for people."""
    since: Time
    disk: DiskSpace | None = None
    """Measured when it was reported; null where that is impossible."""


class SupervisorInfo(Message):
    """The daemon's process."""

    pid: Whole
    started_at: Time


class RankStatus(Message):
    """One process of a trainer of several ranks; its figures include the processes below it.

    Written by the launcher of the ranks, and completed by the supervisor with GPU and figures; in a cluster, with
    machine and GPU by the broker.
    """

    rank: Whole
    pid: Whole
    machine: str | None = None
    """The machine of the cluster that it is on; null on that of the supervisor."""
    gpu: Whole | None = None
    """As its service's `gpus`, and in a cluster as its machine numbers it; null on a CPU."""
    place: str | None = None
    """Where it has been since `since`, for people; null while it moves."""
    since: Time | None = None
    is_waiting: bool = False
    """Whether it waits there for other ranks, or for its GPU."""
    cpu_percent: float | None = None
    rss_bytes: Whole | None = None
    gpu_memory_bytes: Whole | None = None


class RankStall(Message):
    """Ranks that make no progress while others wait for them."""

    ranks: list[Whole]
    """Those that are behind all others on this machine; empty where all wait in the same operation."""
    since: Time
    text: Words
    """For people: each rank with its place."""


class VersionsInFlight(Message):
    """Policy versions of the groups on the way from sampling to training, as the rollout API has them."""

    newest: Whole
    """The version that inference serves, as the trainer said last; before it did, the newest of any group."""
    queued: dict[Whole, Whole] = {}
    """Queued groups by the oldest version that sampled any of their tokens; of the `MAX_VERSIONS` newest ones."""
    num_older: Whole = 0
    """Queued groups of older versions than those."""
    num_unversioned: Whole = 0
    """Queued groups that carry no versions, as those of stock environments."""
    num_sampled: Whole = 0
    """Groups that environments sample or have yet to post, as they said last; stock ones do not."""


MAX_VERSIONS = 64


class ServiceStatus(Message):
    """One service as `status --json` shows it."""

    name: str
    kind: str
    state: ServiceState
    health: Words | None = None
    """The last answer of its probe, for people; null without a probe."""
    probe: ProbeOutcome | None = None
    """The same for programs."""
    phase: Words | None = None
    """The phase of its start-up, for people, where its log shows one."""
    pid: Whole | None = None
    pgid: Whole | None = None
    started_at: Time | None = None
    """When the process of this attempt was started, or its restart in place was."""
    prepared_at: Time | None = None
    """Of a service that was started before its turn (`prepare`): when it had done what it can do before it, also where
    its turn came meanwhile. Null where it was started at its turn, or does not log it."""
    begun_at: Time | None = None
    """When its turn came: what it needs was ready, and its ports and GPU memory were free. While it waits, null."""
    ready_at: Time | None = None
    attempt: Whole = 0
    restarts: Whole = 0
    """For whatever reason, also by request."""
    failures: Whole = 0
    """Those that its restart policy counts: within `restart_window_s`, and since it was last started by request."""
    exit_code: Whole | None = None
    """Of the last attempt; negative is the signal that ended it."""
    oom_kills: Whole | None = None
    """Processes that the out-of-memory killer killed on its machine during that attempt; null where unknown."""
    ports: Annotated[list[Whole], Field(max_length=MAX_SERVICES)] = []
    gpus: list[Whole] = []
    cpu_percent: float | None = None
    """Of one core."""
    rss_bytes: Whole | None = None
    """Of the service and all its descendants."""
    gpu_memory_bytes: Whole | None = None
    log: str
    """Path of its log file."""
    why: Words | None = None
    """Why it is not running or what it waits for, for people; null when it is ready."""
    is_refused: bool = False
    """Whether it was not started because another process holds what it needs."""
    refusals: list[Refusal] = []
    """What it needs and who holds it, while `is_refused`."""
    waits_for: WaitsFor | None = None
    """What it waits for since `waits_since`, as it reports itself; null where it works, or reports nothing."""
    waits_since: Time | None = None
    note: Words | None = None
    """What it reports of itself besides, for people."""
    write_faults: list[WriteFault] = []
    """What it cannot write, as it reports itself."""
    ranks: list[RankStatus] = []
    """Of a trainer of several processes."""
    rank_stall: RankStall | None = None
    machine: str | None = None
    """The machine of the cluster that it runs on, of several the first; null where that is the supervisor's own."""
    machines: Annotated[list[str], Field(max_length=MAX_SERVICES)] = []
    """All machines of the cluster that it runs on."""
    versions: VersionsInFlight | None = None
    """Of a rollout API that a trainer has registered at, as it reports itself."""


class GpuProcess(Message):
    """A process that the driver lists for a GPU."""

    pid: Whole
    """As the driver reports it; in a container it may be that of the host."""
    is_visible: bool = True
    """Whether it can be inspected; one of another container, or with a pid of another namespace, cannot."""
    command: str = ""
    """Its command line, shortened, with secrets masked; empty where it cannot be seen."""
    user: str | None = None
    service: str | None = None
    """Of this run; with `run` the service of that other run."""
    attempt: Whole | None = None
    """Of a service of this run; null where only the service's own status has it."""
    rank: Whole | None = None
    """Of a service of several ranks: the one that it is, or belongs to."""
    run: str | None = None
    """The run that it was started for, where it is not below a keeper of this one."""
    memory_bytes: Whole | None = None
    gpu_instance: Whole | None = None
    """With MIG: the instance that it runs on."""


class MigInstance(Message):
    """A slice of a GPU that MIG divides."""

    name: str
    uuid: str
    gpu_instance: Whole | None = None
    memory_used_bytes: Whole | None = None
    memory_total_bytes: Whole | None = None


class GpuStatus(Message):
    """One GPU."""

    index: Whole
    uuid: str
    name: str
    memory_used_bytes: Whole | None
    memory_total_bytes: Whole | None
    utilization_percent: float | None
    by_service: dict[str, Whole] = {}
    other_bytes: Whole | None = None
    other_by_user: dict[str, Whole] = {}
    """The part of `other_bytes` that goes to processes which can be seen, by the name of their user."""
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    processes: list[GpuProcess] = []
    """All that the driver lists, the largest first."""
    are_shares_known: bool = True
    """Whether the driver reports memory by process; in a container it may list pids of the host, or no memory."""
    has_mig: bool = False
    mig: list[MigInstance] = []
    stale_s: float | None = None
    """Seconds since the driver last answered, while it does not; null when the figures are fresh."""


class RankUsage(Message):
    """The figures of one rank, as in `RankStatus`."""

    rank: Whole
    cpu_percent: float | None = None
    rss_bytes: Whole | None = None
    gpu_memory_bytes: Whole | None = None


class PlacedUsage(Message):
    """What a service uses on its machine."""

    cpu_percent: float | None = None
    rss_bytes: Whole | None = None
    gpu_memory_bytes: Whole | None = None
    ranks: list[RankUsage] = []
    """Of those of its ranks that are there."""


class MachineStatus(Message):
    """A machine of the run's cluster."""

    name: str
    address: str
    state: Literal["ready", "silent", "lost"]
    """Silent: it has not answered since `since`; lost: the cluster has given it up, and what ran there."""
    since: Time
    is_joining: bool = False
    """Whether it is silent because it is new: it was reserved, or has come back, and has not answered yet."""
    answered_at: Time | None = None
    """When it answered last; where nothing of the run is there, when the cluster last listed it."""
    num_devices: Whole = 0
    """Devices of it that the run has reserved."""
    num_free: Whole | None = None
    """Devices that nobody has reserved; null where the cluster does not say."""
    services: dict[str, PlacedUsage] = {}
    """What runs there."""
    lost_services: list[str] = []
    """What ran there when it was last lost."""
    lost_at: Time | None = None
    """When it was last lost; also after it has come back."""
    next: Words | None = None
    """What happens next with what runs or ran there, for people; null where nothing is awaited."""
    gpus: list[GpuStatus] = []
    cpu_percent: float | None = None
    """Of all its cores together."""
    num_cpus: Whole | None = None
    memory_used_bytes: Whole | None = None
    memory_total_bytes: Whole | None = None


class Warning(Message):
    """A finding for people, and what to do about it."""

    id: str
    severity: Literal["info", "warning", "error"]
    text: Words
    hint: Words | None = None


class RunStatus(Message):
    """The document of `status --json` and of `state.json`."""

    run: str
    profile: str
    tags: Annotated[list[str], Field(max_length=MAX_SERVICES)] = []
    """Words that a person gave the run."""
    state: RunState
    is_ending: bool = False
    """Whether it is being taken down; `state` is the state before, until it is over."""
    supervisor: SupervisorInfo | None
    services: Annotated[list[ServiceStatus], Field(max_length=MAX_SERVICES)]
    gpus: Annotated[list[GpuStatus], Field(max_length=MAX_SERVICES)] = []
    gpu_note: Words | None = None
    """Why there are no GPUs to show, e.g. `no NVIDIA driver`."""
    metrics: dict[str, float] = {}
    warnings: Annotated[list[Warning], Field(max_length=MAX_SERVICES)] = []
    low_disks: Annotated[list[DiskSpace], Field(max_length=MAX_SERVICES)] = []
    """File systems on which little space is left; the run writes to each."""
    write_faults: Annotated[list[WriteFault], Field(max_length=MAX_SERVICES)] = []
    """What the supervisor cannot write."""
    machines: Annotated[list[MachineStatus], Field(max_length=MAX_SERVICES)] = []
    """Of a run on a cluster."""
    started_at: Time | None = None
    ended_at: Time | None = None


class Address(Message):
    """Where a supervisor listens; in a file, since `$XDG_RUNTIME_DIR` may differ in a later session."""

    pid: Whole
    socket: str


# --- supervisor → client ---------------------------------------------------------------------------------------------


class Hello(Message):
    """First line in each direction."""

    type: Literal["hello"] = "hello"
    version: Whole = PROTOCOL_VERSION
    run: str
    pid: Whole
    program: str = ""
    """Version of the sender's package."""


class Snapshot(Message):
    """The whole state; `number` is that of the last event in it."""

    type: Literal["snapshot"] = "snapshot"
    number: Whole
    time: Time | None = None
    """When it was taken; set in a timeline only."""
    status: RunStatus


class ServiceChanged(Message):
    """A service changed state, health or explanation."""

    type: Literal["service"] = "service"
    number: Whole
    time: Time
    service: ServiceStatus


class RunChanged(Message):
    """The run changed state."""

    type: Literal["run"] = "run"
    number: Whole
    time: Time
    state: RunState


class UsageSampled(Message):
    """CPU and memory, sampled every second or so; replaces the one before it."""

    type: Literal["usage"] = "usage"
    number: Whole
    time: Time
    cpu_percent: dict[str, float]
    rss_bytes: dict[str, Whole]
    gpu_memory_bytes: dict[str, Whole]
    gpus: Annotated[list[GpuStatus], Field(max_length=MAX_SERVICES)]
    gpu_note: Words | None = None
    log_bytes: dict[str, Whole] = {}
    """The absolute offset of the end of each service's log at that time, as `grpo_tui.run_files.log_file` counts.
    """
    low_disks: Annotated[list[DiskSpace], Field(max_length=MAX_SERVICES)] = []
    write_faults: Annotated[list[WriteFault], Field(max_length=MAX_SERVICES)] = []
    """Of the supervisor; both as in `RunStatus`."""
    ranks: dict[str, list[RankUsage]] = {}
    """Of services of several ranks."""
    machines: Annotated[list[MachineStatus], Field(max_length=MAX_SERVICES)] | None = None
    """As in `RunStatus`; null without a cluster, and from supervisors that did not send them."""


class Notice(Message):
    """A line for people, e.g. a stage of the teardown with its seconds."""

    type: Literal["notice"] = "notice"
    number: Whole
    time: Time
    severity: Literal["info", "warning", "error"]
    service: str | None = None
    text: Words


class Reply(Message):
    """Answer to a `Command`, by its id."""

    type: Literal["reply"] = "reply"
    id: Whole
    ok: bool
    error: str | None = None
    exit_code: Whole = 0
    """The exit code of the command line when not ok."""
    status: RunStatus | None = None


class Bye(Message):
    """The run is over; nothing follows."""

    type: Literal["bye"] = "bye"
    state: RunState


Event = ServiceChanged | RunChanged | UsageSampled | Notice
FromDaemon = Annotated[
    Hello | Snapshot | ServiceChanged | RunChanged | UsageSampled | Notice | Reply | Bye, Field(discriminator="type")
]


# --- client → supervisor ---------------------------------------------------------------------------------------------


class Subscribe(Message):
    """Requests a `Snapshot` and every `Event` after it."""

    type: Literal["subscribe"] = "subscribe"


class Command(Message):
    """Requests an action; answered by one `Reply`, at once, or when done if `wait`."""

    type: Literal["command"] = "command"
    id: Whole
    do: Literal["status", "start", "stop", "restart", "kill", "down"]
    service: str | None = None
    wait: bool = False
    timeout_s: float | None = None
    take_ports: bool = False
    """Whether to end foreign processes of our own user that hold a declared port (start, restart, down)."""


class ServiceReport(Message):
    """What a service says of itself; not answered. Sent over a connection of its own by
    `grpo_engine.serving.reporting`, again every few seconds: it is forgotten `REPORT_VALID_S` later."""

    type: Literal["report"] = "report"
    service: str
    attempt: Whole
    waits_for: WaitsFor | None = None
    waits_since: Time | None = None
    note: Words | None = None
    write_faults: list[WriteFault] = []
    versions: VersionsInFlight | None = None


class RanksReport(Message):
    """What the launcher of a trainer's ranks says of them; as a `ServiceReport`, not answered, and sent again.

    Written by `grpo_engine.ranks.watching`.
    """

    type: Literal["ranks"] = "ranks"
    service: str = ""
    attempt: Whole = 0
    ranks: list[RankStatus] = []
    stall: RankStall | None = None
    end: str | None = None
    """Why the ranks have ended, for people; null while they run."""


class MachinesReport(Message):
    """What the broker of a cluster says of its machines; as a `ServiceReport`, not answered, and sent again.

    Written by `grpo_tui.supervisor.placement.broker`.
    """

    type: Literal["machines"] = "machines"
    machines: Annotated[list[MachineStatus], Field(max_length=MAX_SERVICES)] = []


REPORT_VALID_S = 30.0

FromClient = Annotated[
    Hello | Subscribe | Command | ServiceReport | RanksReport | MachinesReport, Field(discriminator="type")
]

_FROM_DAEMON: TypeAdapter[Any] = TypeAdapter(FromDaemon)
_FROM_CLIENT: TypeAdapter[Any] = TypeAdapter(FromClient)


def read_from_daemon(
    line: bytes,
) -> Hello | Snapshot | ServiceChanged | RunChanged | UsageSampled | Notice | Reply | Bye:
    """Read a line of a supervisor; raises `PeerError` if it is invalid."""
    return _read(_FROM_DAEMON, line, "supervisor")  # type: ignore[no-any-return]


def read_from_client(line: bytes) -> Hello | Subscribe | Command | ServiceReport | RanksReport | MachinesReport:
    """Read a line of a client; raises `PeerError` if it is invalid."""
    return _read(_FROM_CLIENT, line, "client")  # type: ignore[no-any-return]


def _read(adapter: TypeAdapter[Any], line: bytes, peer: str) -> Any:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        raise PeerError(
            f"{peer}: not a valid line of protocol {PROTOCOL_VERSION}: {line[:120]!r}: {first_fault(error)}"
        ) from None
