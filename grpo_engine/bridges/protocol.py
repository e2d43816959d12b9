"""Interfaces between training loop, bridges and placements. Torch-free to import.

A mode (one file beside this one) pairs a placement, where the trained parameters live, with a transport, by which new
versions reach the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from grpo_engine.config import Config
from grpo_engine.models.config import DtypeName, LoraSettings
from grpo_engine.retrying import never

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

    from grpo_engine.bridges.engine import InProcessEngine
    from grpo_engine.bridges.transport.server_client import ServerClient
    from grpo_engine.ranks.group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How ranks share a model."""

    rounds_weights: bool = False
    """Whether shards have the model's dtype and are rounded stochastically; else they are fp32."""
    keeps_gathered: bool = False
    """Whether gathered layers stay in memory between the forward and backward pass."""
    offloads: bool = False
    """Whether shards, gradients and optimizer are in main memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeContext:
    """What a bridge must know of its run."""

    model_name: str
    dtype: DtypeName
    """Of the trained model's parameters; a shared model has the server's."""
    device: str
    """`auto`, `cpu`, `cuda`, `cuda:1`; a shared model is where the server put it."""
    server_urls: tuple[str, ...]
    """Of every inference server, e.g. `http://127.0.0.1:9001`; at least one."""
    folder: Path
    """Where checkpoints and adapters are put for the server to read; made when needed."""
    lora: LoraSettings
    """Used by the modes that train an adapter."""
    parameter_urls: tuple[str, ...] = ()
    """Of parameter services, that of this machine first; none: the weights are held in this process."""
    patience_s: float = 300.0
    """How long a server may be away (loading, restarting) before training fails."""
    server_flags: tuple[str, ...] = ()
    """Flags of `grpo-engine server`, where the trainer starts it itself."""
    server_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of that server in addition to this process's own."""
    ranks: RankGroup | None = None
    """The ranks of the trainer; None where nothing is trained."""
    sharding: Sharding = field(default_factory=lambda: Sharding())
    """Of a model over several ranks."""
    engine: InProcessEngine | None = None
    """The inference engine of this process, in modes that sample in it."""
    served_file: Path | None = None
    """Where it is noted what inference was sent last, for the next trainer of this run; None: nowhere."""
    is_stopping: Callable[[], bool] = never
    """Checked while waiting for a server: once true, the wait ends as at the time limit."""

    @property
    def has_ranks(self) -> bool:
        """Whether several ranks have parts of the model."""
        return self.ranks is not None and self.ranks.size > 1


def nothing() -> None:
    """Do nothing."""


def send_all(versions: range) -> None:
    """Publish every version that is computed again: inference reads the memory in which it is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeModel:
    """A model to train."""

    model: PreTrainedModel | PeftModel
    """Its trained parameters are what is published; with an adapter it is PEFT's wrapper."""
    is_shared: bool
    """Whether writing into a parameter changes what inference reads."""
    policy_version: int
    """What the server served when the bridge attached."""
    save: Callable[[Path, Mapping[str, Tensor]], None]
    """Writes the model (or its adapter) with values by `tensors`, and the tokenizer, into a folder, as transformers,
    PEFT and vLLM load them; on rank 0, in any thread."""
    tensors: Callable[[], Mapping[str, Tensor]] | None = None
    """Gathers what `save` writes, on all ranks, in main memory of rank 0; None: nothing has to be gathered, the values
    are the model's own."""
    prepare_save: Callable[[], None] = nothing
    """Called before the values to save are taken, on rank 0 alone."""
    unmerged: Callable[[], AbstractContextManager[None]] = nullcontext
    """Within, the model computes with its current parameters; outside it may compute with those published last, as
    where an adapter is merged into the weights that inference reads."""
    asleep_bytes: Callable[[], int] = int
    """What torch counts as allocated although an engine in this process has freed it while it sleeps."""
    repeat: Callable[[range], None] = send_all
    """Called before the first publish, with the versions that may be served while steps are repeated from the journal:
    through the last one, to which it leads. Until that is published, inference may stay at one of them that it has from
    this run, or sleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one publish sent to inference."""

    pause_s: float
    """How long the server that was paused longest served no request."""
    num_bytes: int
    """Sent to each server; 0 where inference reads the trainer's memory."""
    num_servers: int
    """That serve the new version now."""
    phase_times: Mapping[str, float] = field(default_factory=dict)
    """Of engines in this process: seconds of each phase since the update before, by the names of `metrics.jsonl`."""

    def metrics(self) -> dict[str, float]:
        """By the names of `metrics.jsonl`."""
        return {
            "sync/pause_time": self.pause_s,
            "sync/bytes": float(self.num_bytes),
            "sync/num_servers": float(self.num_servers),
            **self.phase_times,
        }


class Bridge(Protocol):
    """How new weights reach inference; one trainer, one server.

    Every method raises `PeerUnavailable` when the server is away for longer than the context's `patience_s`.
    """

    def attach(self) -> BridgeModel:
        """Load the model, or map the server's; called once and first.

        Raises:
            ModelError, BridgeError: there is nothing to train on.
        """

    def publish(self, version: int, write: Callable[[], None]) -> Update | None:
        """Make the server serve `version`; `write` copies the new values into the model's trained parameters.

        Returns what was sent; None where nothing was, as between two checkpoints or while steps are repeated
        (`BridgeModel.repeat`), or where it was not measured.

        `write` runs under the weight lock where inference reads the same memory. Until the next publish it is called
        again for each server that was restarted: it must write all parameters each time, and look up their storage when
        it runs (`parameter.data`), since that may have moved.
        """

    def poll_server(self) -> None:
        """Release what is mapped of a server that has exited, and attach to its successor if there is one; never waits.

        Called a few times per second while a batch is awaited; must cost next to nothing while the server runs.
        """

    def prepare_step(self) -> None:
        """Called before each gradient step: wait until the server serves the current version, publishing it again after
        a restart (usually one GET); or put an engine in this process to sleep."""

    def close(self) -> None:
        """Disconnect from the server and remove the files that were written for it."""


class Mode(Config):
    """Settings of one mode, and what it declares of itself; nothing outside of its file asks which mode it is."""

    after_server_restart: ClassVar[str]
    """What happens then; shown to users who restart a server."""
    if_not_served: ClassVar[tuple[str, str]]
    """Probable cause and advice where a server acknowledged new weights and computes with the old ones."""
    shares_memory: ClassVar[bool] = False
    """Whether trainer and server map the same weights."""
    is_of_one_device: ClassVar[bool] = False
    """Whether trainer and server must be on the same device."""
    trains_over_ranks: ClassVar[bool] = False
    """Whether a trainer of several ranks can use it."""
    takes_turns: ClassVar[bool] = False
    """Whether inference sleeps while a step is computed, so that each has the memory of the device to itself."""
    samples_in_process: ClassVar[bool] = False
    """Whether the trainer samples too, so that there is no inference server and no rollout API."""
    updates_many_servers: ClassVar[bool] = False
    """Whether several servers can be sent its weights."""
    one_machine_because: ClassVar[str | None] = None
    """What it does that needs trainer and servers on one machine; None: they may be on several."""
    placed_because: ClassVar[str | None] = None
    """What it does that needs trainer and servers placed, where there are several machines; None: they may run beside
    the supervisor."""
    computes_merged: ClassVar[bool] = False
    """Whether the trainer computes with its adapter merged into the weights, so that none of its inputs is dropped."""
    has_parameter_services: ClassVar[bool] = False
    """Whether services of kind `parameters` hold its weights."""
    server_settings: ClassVar[Mapping[str, bool]] = {}
    """What the inference server needs."""
    mode: str
    """Its name."""

    @property
    def trains_adapter(self) -> bool:
        """Whether an adapter on a frozen model is trained instead of the model."""
        return False

    @property
    def device_bytes(self) -> int:
        """What the transport keeps on the trainer's device beside the model."""
        return 0

    @property
    def steps_between_updates(self) -> int:
        """How many steps apart inference gets new weights."""
        return 1

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport."""
        raise NotImplementedError

    def rank_placement(self, context: BridgeContext) -> RankPlacement:
        """The model over several ranks, on one of them; of modes that `trains_over_ranks`."""
        raise NotImplementedError

    def updating_at_once(self) -> Self:
        """The same with every publish sent to the server, and nothing written where a run has its files."""
        return self


class SavedPlacement(Protocol):
    """Where the trained parameters live, beside those that inference reads."""

    def load(self) -> PreTrainedModel | PeftModel:
        """Load the model to train; called once."""

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """See `BridgeModel`."""

    def tensors(self) -> Mapping[str, Tensor]:
        """The values that `save` writes; on all ranks, and gathered where the model is sharded."""


class Placement(SavedPlacement, Protocol):
    """The same for transports that write files."""

    def max_bytes(self) -> int:
        """Size of two checkpoints."""

    def write(self, folder: Path, kept: Path) -> None:
        """Write a whole checkpoint of the model without adapters, with its tokenizer.

        Args:
            folder: an empty folder.
            kept: a folder beside it, for files that all checkpoints share; as the last call left it.
        """


class RankPlacement(Protocol):
    """The model on a rank other than 0, which does what rank 0 announces."""

    def join(self, work: object) -> BridgeModel:
        """Load this rank's part of the model, where that is announced: first and once."""

    def take_part(self, work: object, write: Callable[[], None]) -> None:
        """Take part in any later work that this placement, or its bridge, announces on rank 0.

        Args:
            write: copies what was trained into the trained parameters, as for `Bridge.publish`.
        """


def connect(context: BridgeContext) -> ServerClient:
    """A client of the inference server; imported here, so that reading settings loads no HTTP client."""
    from grpo_engine.bridges.transport.server_client import ServerClient

    return ServerClient(context.server_urls[0], patience_s=context.patience_s, is_stopping=context.is_stopping)
