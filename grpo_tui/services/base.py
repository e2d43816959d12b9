"""Settings that all kinds of service share (needs, probes, restart policy, ports, GPUs), and the launch made from them.

A kind is a `Service` with settings of its own and a `launch()`. Nothing here starts a process.
"""

from __future__ import annotations

import io
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from grpo_engine.config import Config, OfWorkingDirectory, read_file
from grpo_engine.errors import NO_PATTERN, ConfigError
from grpo_engine.python_command import module_command
from grpo_engine.wire.run_folder import policy_folder
from grpo_engine.wire.secrets import masked_argv, without_secrets

MAX_ENV_FILE_BYTES = 1024 * 1024
"""The kernel takes about twice as much for arguments and environment of a process together."""
PORT = Annotated[int, Field(ge=1, le=65535)]
FINAL_ERROR = 2
"""Exit code of `grpo-engine` for an error that a restart does not change."""
PLACES = frozenset(
    {
        *("save_path", "run_folder", "store", "database", "state_file", "yaml_file"),
        *("bridge_file", "config_path", "handover", "adapter_folder"),
    }
)
"""Settings of services and bridges that name a file or folder which one run alone writes; unset, it is in the run's own
folder."""
VISIBLE_DEVICES, DEVICE_ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
MPS_THREADS, MPS_PRIORITY = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_CLIENT_PRIORITY"


def _can_be_executed(argv: tuple[str, ...]) -> tuple[str, ...]:
    if not argv[0]:
        raise ValueError(f"{masked_argv(argv)} has no program: its first word is one, e.g. 'python'")
    if any("\0" in word for word in argv):
        raise ValueError(f"{masked_argv(argv)} has a NUL character, which no argument can hold: take it out")
    return argv


ARGV = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_can_be_executed)]
"""A program and its arguments."""


class NeedCondition(StrEnum):
    """What must be true of another service before this one starts."""

    STARTED = "started"
    READY = "ready"
    FINISHED = "finished"
    SETTLED = "settled"
    """Ready, or at rest without having become so: what needs it can do without it."""


class RestartPolicy(StrEnum):
    """When a service that has exited is started again."""

    NEVER = "never"
    ON_FAILURE = "on-failure"
    ALWAYS = "always"


def pattern_words(pattern: str) -> str:
    """A regular expression in quotes, for people; one that matches a text alone, as that text.

    For example `pattern_words(re.escape("is ready at"))` is `'is ready at'`.
    """
    text = re.sub(r"\\(\W)", r"\1", pattern)
    return f"'{text if re.escape(text) == pattern else pattern}'"


class Probe(Config):
    """A check that is repeated until it passes. Exactly one of http, tcp, log, file, command."""

    http: str | None = Field(None, pattern=r"^https?://")
    """URL that must answer with one of `status`."""
    status: tuple[int, ...] = (200,)
    then_http: str | None = Field(None, pattern=r"^https?://")
    """URL that is requested once `http` has passed, and must pass too: one that exercises the engine behind a web
    server, e.g. `/health_generate`."""
    tcp: str | None = Field(None, pattern=r"^[^:]+:\d+$")
    """`host:port` that must accept a connection."""
    log: str | None = None
    """Regular expression that a line of this attempt's log must match."""
    file: Annotated[Path | None, OfWorkingDirectory()] = None
    """Path that must exist, relative to the service's working directory."""
    command: ARGV | None = None
    """Command that must exit 0."""
    interval_s: float = Field(0.2, gt=0)
    """Seconds between two checks."""
    timeout_s: float = Field(5.0, gt=0)
    """Seconds after which one check has failed."""
    within_s: float = Field(600.0, gt=0)
    """Seconds after the start within which the check must pass once."""
    stalled_s: float | None = Field(None, gt=0)
    """When set, `within_s` is extended while the service makes progress (its log or GPU memory grows), until it has
    made none for this many seconds."""

    @model_validator(mode="after")
    def _has_one_check(self) -> Probe:
        asked = [name for name in ("http", "tcp", "log", "file", "command") if getattr(self, name) is not None]
        if len(asked) != 1:
            raise ValueError(f"a probe has one of http, tcp, log, file, command; this one has {asked or 'none'}")
        if self.then_http is not None and self.http is None:
            raise ValueError(f"then_http = {self.then_http!r} is requested after http, which is not set: set http too")
        try:
            re.compile(self.log or "")
        except NO_PATTERN as error:
            raise ValueError(f"log = {self.log!r} is not a regular expression: {error}") from None
        return self


class ConsoleMetric(Config):
    """A number in a program's output that becomes a metric. In TOML a bare pattern is enough."""

    pattern: str
    """Regular expression for a line of its log; its first group is the number."""
    scale: float = 1.0
    """Factor for the number, e.g. 0.01 for a percentage that is stored as a fraction."""

    @model_validator(mode="after")
    def _has_a_group(self) -> ConsoleMetric:
        try:
            groups = re.compile(self.pattern).groups
        except NO_PATTERN as error:
            raise ValueError(f"{self.pattern!r} is not a regular expression: {error}") from None
        if not groups:
            raise ValueError(f"{self.pattern!r} has no group: put brackets around the number")
        return self


class RestartInPlace(Config):
    """How to make a program restart itself, which is faster than stopping and starting it."""

    signal: str = "SIGHUP"
    """Sent to its main process only."""
    log: str | None = None
    """Regular expression for the line that it logs when its last start has ended: from there on, its probe is answered
    by the new one. Without it within `stop_grace_s`, the service is stopped and started."""
    file: Annotated[Path | None, OfWorkingDirectory()] = None
    """File whose content it changes then, instead of a line in its log; relative to the working directory."""

    @model_validator(mode="after")
    def _signal_and_pattern_are_valid(self) -> RestartInPlace:
        if self.signal not in signal.Signals.__members__:
            raise ValueError(f"signal {self.signal!r} is not a signal: write it as in SIGHUP or SIGUSR1")
        if (self.log is None) == (self.file is None):
            raise ValueError("restart_in_place needs one of log and file")
        try:
            re.compile(self.log or "")
        except NO_PATTERN as error:
            raise ValueError(f"log = {self.log!r} is not a regular expression: {error}") from None
        return self


def _pattern_alone(value: Any) -> Any:
    """`"train/loss" = 'Loss: ([0-9.]+)'` is short for a table with that pattern."""
    return {"pattern": value} if isinstance(value, str) else value


def _needs_by_name(value: Any) -> Any:
    """`needs = ["api"]` is short for `needs = { api = "ready" }`."""
    if not isinstance(value, list | tuple):
        return value
    for name in value:
        if not isinstance(name, str):
            raise ValueError(f"{str(name)[:100]} is no name of a service")
    return dict.fromkeys(value, NeedCondition.READY)


class Service(Config):
    """Settings that every kind of service has."""

    needs: Annotated[dict[str, NeedCondition], BeforeValidator(_needs_by_name)] = {}
    """Services that must be started, ready or finished first."""
    restart_with: tuple[str, ...] = ()
    """Services whose restart, by hand or by policy, restarts this one after them."""
    ready: Probe | None = None
    """When it counts as ready; without one, as soon as its process runs."""
    live: Probe | None = None
    """Checked once it is ready; it is unhealthy after `within_s` without a pass."""
    restart: RestartPolicy = RestartPolicy.NEVER
    """Whether to start it again when it exits: never, on-failure, always."""
    restart_unhealthy: bool = False
    """Whether an unhealthy service is restarted as if it had failed."""
    max_restarts: int = Field(5, ge=0)
    """Restarts within `restart_window_s`; one more and it has failed."""
    restart_window_s: float = Field(600.0, gt=0)
    backoff_s: float = Field(1.0, gt=0)
    """Seconds before the first restart; doubled for each one after it, up to a minute."""
    stop_grace_s: float = Field(10.0, ge=0)
    """Seconds between the stop signal and SIGKILL."""
    stop_signal: str = "SIGTERM"
    ports: tuple[PORT, ...] = ()
    """TCP ports it listens on: checked before a start, freed after it has ended."""
    gpus: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """GPUs it may use, by their number in nvidia-smi, as CUDA_VISIBLE_DEVICES; none with `[]`, unset: all."""
    num_devices: int | None = Field(None, ge=1, le=1024)
    """How many GPUs it takes: the next ones of this machine, in the order trainer, inference, reference, others; with a
    `[cluster]`, of one of its machines, and of a trainer also of several. `gpus` wins. Of replicas: all of them
    together."""
    gpu_memory_share: float | None = Field(None, gt=0, le=1)
    """Share of the memory of each of its GPUs that it plans to use, and that must be free before it is started."""
    gpu_memory_gb: float | None = Field(None, gt=0, le=1e9)
    """The same in 10^9 bytes, instead of a share."""
    gpu_share: float | None = Field(None, gt=0, le=1)
    """Share of the multiprocessors of its GPUs that it may use at a time where MPS lets services share a GPU; unset:
    all. CUDA's active thread percentage, here from 0 to 1."""
    gpu_priority: Literal["normal", "low"] | None = None
    """Whose kernels go first where MPS lets services share a GPU; unset: `normal`."""
    env: dict[str, str] = {}
    """Environment variables besides the inherited ones."""
    env_files: tuple[Path, ...] = ()
    """Files of `NAME=value` lines, relative to the folder of the profile, read when a run is planned; values are taken
    as they stand. `env` wins over them, a later file over an earlier one."""
    cpus: tuple[Annotated[int, Field(ge=0, lt=8192)], ...] | None = Field(None, min_length=1)
    """CPU cores that it may run on; unset: those of the supervisor."""
    nice: int = Field(0, ge=-20, le=19)
    """Priority as for `nice`: 19 is the lowest, 0 that of the supervisor; below 0 needs privileges."""
    memory_limit_gb: float | None = Field(None, gt=0, le=1e9)
    """Resident memory of the service and all below it, in 10^9 bytes, memory shared among them counted once; checked
    every second; a service above it is ended as failed."""
    log_limit_mb: float = Field(256.0, ge=1, le=1e12)
    """Size of its log, in 10^6 bytes, above which the older half is dropped."""
    console: dict[str, Annotated[ConsoleMetric, BeforeValidator(_pattern_alone)]] = {}
    """Metrics to read from its output, by name, with `step` among them, and `policy_version` where it is printed;
    written to `metrics.jsonl`."""
    cwd: Path = Path(".")
    """Working directory, relative to the folder of the profile."""
    prepare: bool = False
    """Whether its process is started before its turn, while it waits for the services that it needs: it imports its
    modules, and begins when its turn comes. On for our own kinds of service. A command must support it: it reads a byte
    from the descriptor in `GRPO_TUI_GATE`."""
    ends_run: bool | None = None
    """Whether the run is over when this service has finished; unset: the trainer ends it, else services that none
    needs."""

    @model_validator(mode="after")
    def _stop_signal_exists(self) -> Service:
        if self.stop_signal not in signal.Signals.__members__:
            raise ValueError(f"stop_signal {self.stop_signal!r} is not a signal: write it as in SIGTERM or SIGINT")
        return self

    @model_validator(mode="after")
    def _environment_can_be_set(self) -> Service:
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name:
                raise ValueError(f"env has the name {name!r}: a name is not empty and has neither '=' nor NUL")
            if "\0" in value:
                raise ValueError(f"env.{name} has a NUL character, which no variable can hold: take it out")
        return self

    @model_validator(mode="after")
    def _gpu_memory_is_set_once(self) -> Service:
        share, size_gb = self.gpu_memory_share, self.gpu_memory_gb
        if share is not None and size_gb is not None:
            raise ValueError(f"gpu_memory_share = {share} and gpu_memory_gb = {size_gb}: keep one of them")
        return self

    @model_validator(mode="after")
    def _gpus_are_set_once(self) -> Service:
        if self.gpus is not None and len(set(self.gpus)) < len(self.gpus):
            raise ValueError(f"gpus = {list(self.gpus)} names a GPU twice: name each once")
        if self.gpus is not None and VISIBLE_DEVICES in self.env:
            ours, theirs = list(self.gpus), self.env[VISIBLE_DEVICES]
            raise ValueError(
                f"gpus = {ours} and env.{VISIBLE_DEVICES} = {theirs!r} contradict each other: keep one of them"
            )
        return self

    @property
    def final_exit_codes(self) -> tuple[int, ...]:
        """Exit codes after which a restart would fail the same way."""
        return (FINAL_ERROR,)

    @property
    def num_machines(self) -> int | None:
        """On how many machines of a cluster it asks to be; None where it does not say."""
        return None

    @property
    def one_machine_because(self) -> str | None:
        """Why it cannot be on several machines of a cluster; None where it can."""
        return "only the ranks of a trainer can be on several"

    @property
    def beside_kinds(self) -> tuple[str, ...]:
        """Kinds of services, of its policy, on whose machines of a cluster it has a part; empty: it follows none."""
        return ()

    @property
    def chosen_by_cluster(self) -> tuple[str, ...]:
        """Settings of it that a cluster chooses, and that are set."""
        return ()

    @property
    def start_phases(self) -> tuple[tuple[str, str], ...]:
        """Log lines that mark its start-up phases, as in `Launch.phases`."""
        return ()

    def launch(self, name: str, place: Place) -> Launch:
        """What to start, where, and when it is ready."""
        raise NotImplementedError

    def own_token(self, profile_folder: Path) -> str | None:
        """The token that the profile sets for the whole run in this service.

        Raises:
            ConfigError: it names a file that cannot be read.
        """
        return None

    def _launch(self, name: str, kind: str, place: Place, *, engine: Sequence[str] = (), **own: Any) -> Launch:
        """The part of a launch that all kinds share, overridden by `own`.

        Args:
            engine: the command of one of our own services, with its flags: every user can read a command line, so that
                words with secrets are passed on in its environment.
        """
        shown, hidden = without_secrets(engine)
        if engine:
            own["argv"] = module_command("grpo_engine", *shown, python=place.python)
        from_files: dict[str, str] = {}
        for file in self.env_files:
            from_files |= read_env_file(place.profile_folder / file, where=f"services.{name}.env_files")
        environment = {**from_files, **(own.pop("env", None) or {}), **self.env, **hidden}
        if self.gpus is not None:
            environment[VISIBLE_DEVICES] = ",".join(str(index) for index in self.gpus)
            environment.setdefault(DEVICE_ORDER, "PCI_BUS_ID")  # as in nvidia-smi; CUDA's default is fastest first
        if self.gpu_share is not None:
            environment[MPS_THREADS] = f"{100 * self.gpu_share:g}"
        if self.gpu_priority is not None:
            environment[MPS_PRIORITY] = "1" if self.gpu_priority == "low" else "0"
        shared: dict[str, Any] = {
            "name": name,
            "kind": kind,
            "env": environment,
            "env_from_files": tuple(key for key in environment if from_files.get(key) == environment[key]),
            "cwd": Path(os.path.realpath(place.profile_folder / self.cwd)),
            "needs": self.needs,
            "phases": self.start_phases,
            "final_exit_codes": self.final_exit_codes,
            "gpu_memory_share": self.gpu_memory_share,
            "gpu_memory_bytes": None if self.gpu_memory_gb is None else int(self.gpu_memory_gb * 1e9),
            "cpus": self.cpus,
            "nice": self.nice,
            "memory_limit_bytes": None if self.memory_limit_gb is None else int(self.memory_limit_gb * 1e9),
            "log_limit_bytes": int(self.log_limit_mb * 1e6),
            "console": self.console,
            "ready": self.ready,
            "live": self.live,
            "restart": self.restart,
            "restart_unhealthy": self.restart_unhealthy,
            "max_restarts": self.max_restarts,
            "restart_window_s": self.restart_window_s,
            "backoff_s": self.backoff_s,
            "stop_grace_s": self.stop_grace_s,
            "stop_signal": signal.Signals[self.stop_signal],
            "ports": self.ports,
            "gpus": self.gpus or (),
            "prepares": self.prepare,
            "ends_run": self.ends_run,
        }
        return Launch(**{**shared, **own})


def access_text(*, allow_without_token: bool, routes: str) -> str:
    """`Launch.access` of a service whose routes require the token of the run."""
    if allow_without_token:
        return f"{routes}: open to every user of this machine (allow_without_token)"
    return f"{routes}: only with the token of the run"


class OfPolicy(Config):
    """Setting of services that belong to a policy."""

    policy: str | None = Field(None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$")
    """Name of the policy that it belongs to, in a run that trains several: trainers, inference servers and rollout APIs
    of one name are connected to each other, and their files are in `policies/NAME` of the run's folder. Unset: the
    first policy, whose files are in the run's folder, and whose metrics are those of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Folders and interpreter of a launch."""

    profile_folder: Path
    run_folder: Path
    python: str
    """Interpreter that runs our own services."""

    def of_policy(self, policy: str | None) -> Path:
        """The folder of a policy's files."""
        return policy_folder(self.run_folder, policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The cluster of a run."""

    address: str | None
    """`host:port` of the head of an existing one; None: a private one."""
    machines: int
    """Of a private one: how many machines this one stands for."""
    devices_per_machine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One service, ready to be started: everything the supervisor knows about it."""

    name: str
    kind: str
    replica_of: str | None = None
    """The service of the profile that it is another replica of, with the settings of that one."""
    argv: Annotated[tuple[str, ...], Field(min_length=1)]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables besides the supervisor's own environment."""
    env_in_temporary: Mapping[str, str] = field(default_factory=dict)
    """Variables that name a folder in the temporary folder of the run, relative to it."""
    env_from_files: tuple[str, ...] = ()
    """Those of them whose value comes from a file: often secrets, never shown."""
    cwd: Path
    needs: Mapping[str, NeedCondition]
    prepares: bool = False
    """Whether it is started held while it waits for the services that it needs."""
    needs_one_replica: bool = False
    """Whether another start than the first leaves out replicas that have failed or were stopped, where one is ready."""
    ready: Probe | None
    live: Probe | None
    restart: RestartPolicy
    restart_unhealthy: bool
    max_restarts: int
    restart_window_s: float
    backoff_s: float
    stop_grace_s: float
    stop_signal: signal.Signals
    ports: tuple[int, ...]
    gpus: tuple[int, ...]
    num_devices: int = 0
    """Devices that it takes of a cluster, on all of its machines together; 0: it runs on the supervisor's."""
    num_machines: int | None = None
    """Of a cluster, each with as many of its devices; None: one, or, where no machine has so many devices and it has
    `part_arguments`, the fewest that do."""
    part_arguments: tuple[str, ...] = ()
    """Added to the arguments of each part where it is on several machines, with `{num_devices}` of a machine,
    `{num_machines}`, `{number}` of this one from 0, and `{address}` and `{port}` of the first, where a port is free;
    empty: it cannot be on several."""
    beside: tuple[str, ...] = ()
    """Services beside which it is placed: it has a part on each of their machines, the first one where the first of
    them is, and takes no devices. A part that is lost with its machine does not end the others, and one is added where
    they are placed later."""
    later_arguments: tuple[str, ...] = ()
    """Added to the arguments of each of its parts but the first."""
    machine_folder: Path | None = None
    """Folder of the run with a folder for each machine of a cluster, of that name."""
    machine_arguments: tuple[str, ...] = ()
    """Added to its arguments on a machine of a cluster, with `{machine}` and the `{folder}` of it."""
    num_ranks: int = 1
    """Processes of a trainer, on all of its machines; one on each of its GPUs where it has any."""
    ends_run: bool | None
    failed_by: Mapping[str, str] = field(default_factory=dict)
    """Services whose failure ends it, each with a regular expression for the line of its log that shows so. It is then
    restarted with that service, whatever `restart` says."""
    unfinished: str | None = None
    """Regular expression for a line of its log by which an exit with code 0 that nobody asked for is not the end of its
    work but a failure; empty: its work has no end, as a server's."""
    cause: str | None = None
    """Regular expression for a line before its last ones that says why it failed; its first group is quoted."""
    is_optional: bool = False
    """Whether the run goes on without it: its last log line says why it exits with 0 before it is ready."""
    followers: tuple[str, ...] = ()
    """Services that must be restarted after this one was, in order."""
    after_restart: str | None = None
    """Message about what other services do after a restart of this one, where none has to be restarted with it."""
    phases: tuple[tuple[str, str], ...] = ()
    """Of its start-up: (regular expression for a log line, text for what the service does from there on)."""
    restart_in_place: RestartInPlace | None = None
    """How it is restarted while its process stays; None: it is stopped and started."""
    written_folders: tuple[Path, ...] = ()
    """Folders outside the run folder that it writes to, watched for free space."""
    access: str | None = None
    """Whom it answers, for `grpo-tui plan`; None where it is not known."""
    final_exit_codes: tuple[int, ...] = ()
    """Exit codes after which it has failed whatever `restart` says: it would fail the same way again."""
    gpu_memory_share: float | None = None
    """Share of the memory of each of its GPUs that must be free before it is started."""
    gpu_memory_bytes: int | None = None
    """The same in bytes, where it is not a share."""
    cpus: tuple[int, ...] | None = None
    nice: int = 0
    memory_limit_bytes: int | None = None
    """Resident memory of the service and all below it, over which it is ended as failed."""
    log_limit_bytes: int = 256_000_000
    console: Mapping[str, ConsoleMetric] = field(default_factory=dict)
    """Metrics to be read from its log, by name."""

    @property
    def is_placed(self) -> bool:
        """Whether it runs on machines of a cluster."""
        return self.num_devices > 0 or bool(self.beside)

    @property
    def plans_gpu_memory(self) -> bool:
        """Whether it says how much memory of a GPU it uses."""
        return self.gpu_memory_share is not None or self.gpu_memory_bytes is not None

    def gpu_share_of(self, card_bytes: int | None) -> float | None:
        """The share of a GPU of this size that it plans to use; None where it does not say, or the size is unknown."""
        if self.gpu_memory_bytes is None:
            return self.gpu_memory_share
        return None if card_bytes is None else self.gpu_memory_bytes / card_bytes

    @property
    def rank_gpus(self) -> tuple[int | None, ...]:
        """The GPU of each of several ranks, by rank; None on a CPU."""
        if self.num_ranks == 1:
            return ()
        return self.gpus if len(self.gpus) == self.num_ranks else (None,) * self.num_ranks

    @property
    def settings(self) -> str:
        """The key of its settings in the profile, as in `services.vllm`."""
        return f"services.{self.replica_of or self.name}"


def read_env_file(path: Path, *, where: str) -> dict[str, str]:
    """The variables of a file of `NAME=value` lines. A bare `NAME` adds none: a service inherits the supervisor's.

    Values are not expanded, as with systemd's `EnvironmentFile` and `docker run --env-file`: a password may contain
    `${`. Quotes, `export`, comments and values of several lines are read as Docker Compose reads them.

    Raises:
        ConfigError: missing, unreadable, or with a line that cannot be parsed; the message does not quote it, since it
            may hold a secret.
    """
    from dotenv.parser import (
        parse_stream,
    )  # imported here, since most profiles have no such file; this parser reports the bad line

    try:
        content = read_file(path, max_bytes=MAX_ENV_FILE_BYTES)
        bindings = list(parse_stream(io.StringIO(content.decode("utf-8-sig"), newline=None)))
    except OSError as error:
        raise ConfigError(f"{where}: {path}: cannot be read: {error.strerror or error}; correct the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: {path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    for binding in bindings:
        if binding.error:
            text = binding.original.string
            line = binding.original.line + text[: len(text) - len(text.lstrip())].count("\n")
            raise ConfigError(f"{where}: {path}, line {line}: not a NAME=value line; correct it, or put a # before it")
        if "\0" in binding.original.string:
            line = binding.original.line
            raise ConfigError(f"{where}: {path}, line {line}: a NUL character, which no variable can hold: take it out")
    return {each.key: each.value for each in bindings if each.key is not None and each.value is not None}
