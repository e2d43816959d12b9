"""What every service has, whatever its kind: needs, probes, restart policy, ports, GPUs; and the launch made from it.

A kind is a `Service` with settings of its own and a `launch()`. Nothing here starts a process.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from grpo_engine.config import Config

PORT = Annotated[int, Field(ge=1, le=65535)]


class NeedCondition(StrEnum):
    """What must be true of another service before this one starts."""

    STARTED = "started"
    READY = "ready"
    FINISHED = "finished"


class RestartPolicy(StrEnum):
    """When a service that ended by itself is started again."""

    NEVER = "never"
    ON_FAILURE = "on-failure"
    ALWAYS = "always"


class Probe(Config):
    """A question asked again and again until it is answered yes. Exactly one of http, tcp, log, file, command."""

    http: str | None = Field(None, pattern=r"^https?://")
    """URL that must answer one of `status`."""
    status: tuple[int, ...] = (200,)
    tcp: str | None = Field(None, pattern=r"^[^:]+:\d+$")
    """`host:port` that must accept a connection."""
    log: str | None = None
    """Regular expression that a line of this attempt's log must match."""
    file: Path | None = None
    """Path that must exist, relative to the service's working directory."""
    command: tuple[str, ...] | None = None
    """Command that must exit 0."""
    interval_s: float = Field(0.25, gt=0)
    """Seconds between two questions."""
    timeout_s: float = Field(5.0, gt=0)
    """Seconds after which one question counts as unanswered."""
    within_s: float = Field(600.0, gt=0)
    """Seconds after the start within which the answer must be yes once."""

    @model_validator(mode="after")
    def _asks_one_question(self) -> Probe:
        asked = [name for name in ("http", "tcp", "log", "file", "command") if getattr(self, name) is not None]
        if len(asked) != 1:
            raise ValueError(f"a probe asks one of http, tcp, log, file, command; this one has {asked or 'none'}")
        try:
            re.compile(self.log or "")
        except re.error as error:
            raise ValueError(f"log = {self.log!r} is not a regular expression: {error}") from None
        return self


def _needs_by_name(value: Any) -> Any:
    """`needs = ["api"]` is short for `needs = { api = "ready" }`."""
    return dict.fromkeys(value, NeedCondition.READY) if isinstance(value, list | tuple) else value


class Service(Config):
    """Settings that every kind of service has."""

    needs: Annotated[dict[str, NeedCondition], BeforeValidator(_needs_by_name)] = {}
    """Services that must be started, ready or finished first."""
    ready: Probe | None = None
    """When it counts as ready; without one, as soon as its process runs."""
    live: Probe | None = None
    """Asked once it is ready; `within_s` without a yes makes it unhealthy."""
    restart: RestartPolicy = RestartPolicy.NEVER
    """Whether to start it again when it ends by itself: never, on-failure, always."""
    restart_unhealthy: bool = False
    """Whether an unhealthy service is restarted as if it had failed."""
    max_restarts: int = Field(5, ge=0)
    """Restarts within `restart_window_s` before it is given up as failed."""
    restart_window_s: float = Field(600.0, gt=0)
    backoff_s: float = Field(1.0, gt=0)
    """Seconds before the first restart; doubled for each one after it, up to a minute."""
    stop_grace_s: float = Field(10.0, ge=0)
    """Seconds between the stop signal and SIGKILL."""
    stop_signal: str = "SIGTERM"
    ports: tuple[PORT, ...] = ()
    """TCP ports it listens on: checked before a start, cleared after an end."""
    gpus: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """GPUs it may use, as CUDA_VISIBLE_DEVICES; unset: all."""
    env: dict[str, str] = {}
    """Environment variables besides the inherited ones."""
    cwd: Path = Path(".")
    """Working directory, relative to the folder of the profile."""
    ends_run: bool | None = None
    """Whether the run is over when this service has finished; unset: the trainer ends it, else those nobody needs."""

    @model_validator(mode="after")
    def _stop_signal_exists(self) -> Service:
        if self.stop_signal not in signal.Signals.__members__:
            raise ValueError(f"stop_signal {self.stop_signal!r} is not a signal: write it as in SIGTERM or SIGINT")
        return self

    def launch(self, name: str, place: Place) -> Launch:
        """What to start, where, and when it counts as ready."""
        raise NotImplementedError

    def _launch(self, name: str, kind: str, place: Place, **own: Any) -> Launch:
        """The part of a launch that all kinds share, with what a kind sets of its own."""
        environment = dict(self.env)
        if self.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in self.gpus)
        shared: dict[str, Any] = {
            "name": name,
            "kind": kind,
            "env": environment,
            "cwd": (place.profile_folder / self.cwd).resolve(),
            "needs": self.needs,
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
            "ends_run": self.ends_run,
        }
        if own.get("env") is not None:
            own["env"] = {**own["env"], **environment}
        return Launch(**{**shared, **own})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a launch happens."""

    profile_folder: Path
    run_folder: Path
    python: str
    """Interpreter that runs our own services."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One service, ready to be started: everything the supervisor knows about it."""

    name: str
    kind: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables besides the supervisor's own environment."""
    cwd: Path
    needs: Mapping[str, NeedCondition]
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
    ends_run: bool | None
    followers: tuple[str, ...] = ()
    """Services that must be restarted after this one was, in order."""
