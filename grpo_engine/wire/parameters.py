"""What a trainer, a parameter service and the services of other machines say to each other over HTTP."""

from __future__ import annotations

from pydantic import Field, FiniteFloat

from grpo_engine.wire.codec import Message, Reason, Whole
from grpo_engine.wire.inference import PolicyVersion

HEALTH_ROUTE = "/health"
STATE_ROUTE, BEGIN_ROUTE, COMMIT_ROUTE = "/parameters", "/parameters/begin", "/parameters/commit"
FILE_ROUTE = "/parameters/files"
"""`…/<number>/<name>` is the content of a file, `…/<number>/<name>/sha256` its digest in hex."""
MACHINES_ROUTE = "/parameters/machines"


class ServedBy(Message):
    """An inference server of a parameter service."""

    url: str
    policy_version: Whole | None
    """What it serves; None: not known yet."""
    is_away: bool
    """Whether it did not answer the last time."""


class ParametersState(Message):
    """Answer of `STATE_ROUTE` and `COMMIT_ROUTE`: the newest version, and who serves which."""

    instance: str
    """Differs for every start of the service."""
    number: Whole = 0
    """Counts the versions that this service was given; 0: none."""
    policy_version: PolicyVersion = 0
    model: str = ""
    pull_every: int = Field(1, ge=1)
    files: dict[str, Whole] = {}
    """Sizes of the files of that version by their names."""
    servers: list[ServedBy] = []
    is_settled: bool = False
    """Whether every server that answers serves the newest version, or needs none yet; and at least one answers."""
    longest_s: FiniteFloat = 0.0
    """Of the updates of single servers to this version."""
    problem: Reason = ""
    """What a server refused, where one did."""
    late: list[Reason] = []
    """Other machines whose servers do not have what is due to them yet, each with what it waits for, for people."""


class BeginRequest(Message):
    """Body of `BEGIN_ROUTE`: a trainer on the machine of the service will write a version."""

    policy_version: PolicyVersion
    model: str
    """What the model was loaded from: an absolute folder, or a hub id."""
    most_bytes: Whole
    """Of two versions."""
    pull_every: int = Field(ge=1)


class BeginAnswer(Message):
    """Answer of `BEGIN_ROUTE`."""

    path: str
    """An empty folder, to write the model and its tokenizer into."""


class CommitRequest(Message):
    """Body of `COMMIT_ROUTE`: what was written is complete."""

    policy_version: PolicyVersion


class MachineReport(Message):
    """Body of `MACHINES_ROUTE`: what the service of another machine says of itself, several times a second."""

    machine: str
    state: ParametersState
    source_instance: str = ""
    source_number: Whole = 0
    """Start of the source, and number of the version there, that it has fetched."""
    fault: Reason = ""
    """Why it could not fetch the newest version when it last tried."""
