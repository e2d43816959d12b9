"""Interfaces between training loop, bridges and placements. Torch-free to import.

A mode (one file beside this one) pairs a placement, where the trained parameters live, with a transport, by which new
versions reach the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from grpo_engine.models.config import DtypeName, LoraSettings
from grpo_engine.retrying import never

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from grpo_engine.bridges.transport.server_client import ServerClient


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeContext:
    """What a bridge must know of its run."""

    model_name: str
    dtype: DtypeName
    """Of the trained model's parameters; a shared model has the server's."""
    device: str
    """`auto`, `cpu`, `cuda`, `cuda:1`; a shared model is where the server put it."""
    server_url: str
    """E.g. `http://127.0.0.1:9001`."""
    folder: Path
    """Where checkpoints and adapters are put for the server to read; made when needed."""
    lora: LoraSettings
    """Used by the modes that train an adapter."""
    patience_s: float = 300.0
    """How long a server may be away (loading, restarting) before training fails."""
    server_flags: tuple[str, ...] = ()
    """Flags of `grpo-engine server`, where the trainer starts it itself."""
    server_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of that server in addition to this process's own."""
    is_stopping: Callable[[], bool] = never
    """Checked while waiting for a server: once true, the wait ends as at the time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeModel:
    """A model to train."""

    model: PreTrainedModel | PeftModel
    """Its trained parameters are what is published; with an adapter it is PEFT's wrapper."""
    is_shared: bool
    """Whether writing into a parameter changes what inference reads."""
    policy_version: int
    """What the server served when the bridge attached."""
    save: Callable[[Path], None]
    """Writes the model (or its adapter) and the tokenizer into a folder, as transformers, PEFT and vLLM load them."""
    unmerged: Callable[[], AbstractContextManager[None]] = nullcontext
    """Within, the model computes with its current parameters; outside it may compute with those published last, as
    where an adapter is merged into the weights that inference reads."""


class Bridge(Protocol):
    """How new weights reach inference; one trainer, one server.

    Every method raises `PeerUnavailable` when the server is away for longer than the context's `patience_s`.
    """

    def attach(self) -> BridgeModel:
        """Load the model, or map the server's; called once and first.

        Raises:
            ModelError, BridgeError: there is nothing to train on.
        """

    def publish(self, version: int, write: Callable[[], None]) -> None:
        """Make the server serve `version`; `write` copies the new values into the model's trained parameters.

        `write` runs under the weight lock where inference reads the same memory. Until the next publish it is called
        again for each server that was restarted: it must write all parameters each time, and look up their storage when
        it runs (`parameter.data`), since that may have moved.
        """

    def poll_server(self) -> None:
        """Release what is mapped of a server that has exited, and attach to its successor if there is one; never waits.

        Called a few times per second while a batch is awaited; must cost next to nothing while the server runs.
        """

    def ensure_current(self) -> None:
        """Wait until the server serves the current version, publishing it again after a restart; usually one GET."""

    def close(self) -> None:
        """Disconnect from the server and remove the files that were written for it."""


class Placement(Protocol):
    """Where the trained parameters live, for transports that write files."""

    def load(self) -> PreTrainedModel | PeftModel:
        """Load the model to train; called once."""

    def max_bytes(self) -> int:
        """Size of two checkpoints."""

    def write(self, folder: Path, kept: Path) -> None:
        """Write a whole checkpoint of the model without adapters, with its tokenizer.

        Args:
            folder: an empty folder.
            kept: a folder beside it, for files that all checkpoints share; as the last call left it.
        """


def connect(context: BridgeContext) -> ServerClient:
    """A client of the inference server; imported here, so that reading settings loads no HTTP client."""
    from grpo_engine.bridges.transport.server_client import ServerClient

    return ServerClient(context.server_url, patience_s=context.patience_s, is_stopping=context.is_stopping)
