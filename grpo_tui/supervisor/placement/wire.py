"""Messages between the processes of a cluster: the broker of a run, and the agent of each machine.

JSON, one object a line. What `remote_process.py` and the broker say to each other is defined there, since that script
imports nothing of ours.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from grpo_engine.wire.codec import Message, Whole
from grpo_engine.wire.supervisor import GpuStatus, PlacedUsage, RanksReport, ServiceReport
from grpo_tui.services.base import Launch

LAUNCH: TypeAdapter[Launch] = TypeAdapter(Launch)


class Start(Message):
    """Broker → agent: start an attempt; answered by `Started`."""

    do: Literal["start"] = "start"
    launch: str
    """As `LAUNCH` writes it, with the whole environment of the service."""
    attempt: Whole
    take_ports: bool = False


class Follow(Message):
    """Broker → agent: what an attempt has written from an offset on, and how it ended; answered by `Followed`."""

    do: Literal["follow"] = "follow"
    service: str
    attempt: Whole
    num_copied: Whole
    """Bytes of its log that are known, from where the attempt begins."""
    wait_s: float
    """How long to wait for more."""


class Signal(Message):
    """Broker → agent: end an attempt, or send a signal to its main process; answered by `Done`."""

    do: Literal["signal"] = "signal"
    service: str
    attempt: Whole
    how: Literal["stop", "kill", "send"]
    number: Whole = 0


class ChoosePort(Message):
    """Broker → agent: choose a free port for an attempt, the same one if asked again; answered by `Chosen`."""

    do: Literal["choose_port"] = "choose_port"
    service: str
    attempt: Whole
    address: str
    """Of this machine."""
    but: list[Whole] = []
    """Ports that services of the run will have."""


class Look(Message):
    """Broker → agent: what runs, and what it uses; answered by `Usage`. It renews the lease of the agent."""

    do: Literal["look"] = "look"
    heard: Whole | None = None
    """The number of the last answer that the broker has. The lease counts from when that was sent, so that a request
    which was on its way for long renews nothing that the broker does not know of."""


class Route(Message):
    """Broker → agent: listen for connections from other machines, and lead to them; answered by `Routed`."""

    do: Literal["route"] = "route"
    address: str
    """Of this machine."""
    inside: list[Whole]
    """Ports of services here."""
    doors: dict[Whole, tuple[str, Whole]] = {}
    """Ports of services elsewhere, each with address and port of the gate there."""


class Routed(Message):
    """The answer to `Route`."""

    gate: Whole
    """The port of the gate."""
    faults: list[str] = []
    """Why a port is not reachable here, for people."""


class Chosen(Message):
    """The answer to `ChoosePort`."""

    port: Whole | None
    """None where none is free."""


class End(Message):
    """Broker → agent: end everything and exit; answered by `Done` when no process is left."""

    do: Literal["end"] = "end"


class Started(Message):
    """The answer to `Start`."""

    refused: str | None = None
    """Why it was not started, for people; None where it was."""


class Followed(Message):
    """The answer to `Follow`."""

    data: str = ""
    """Base64."""
    is_known: bool = True
    """Whether the machine has had this attempt."""
    has_exited: bool = False
    exit_code: Whole | None = None
    error: str | None = None
    report: ServiceReport | None = None
    ranks: RanksReport | None = None
    """What it has reported of itself since the last answer, and the last of it with its exit."""


class Usage(Message):
    """The answer to `Look`."""

    number: Whole = 0
    """Of this answer, counted by the agent."""
    sees_run: bool
    """Whether the folder of the run is there, as this user's."""
    attempts: dict[str, Whole] = {}
    services: dict[str, PlacedUsage] = {}
    gpus: list[GpuStatus] = []
    cpu_percent: float | None = None
    num_cpus: Whole | None = None
    memory_used_bytes: Whole | None = None
    memory_total_bytes: Whole | None = None
    """Of the machine, as in `MachineStatus`."""


class Done(Message):
    """The answer where there is nothing to say."""

    error: str | None = None


AnyRequest = Start | Follow | Signal | ChoosePort | Look | Route | End
REQUEST: TypeAdapter[AnyRequest] = TypeAdapter(Annotated[AnyRequest, Field(discriminator="do")])
