"""What every bridge offers the training loop, and what it is told. Torch-free to import.

Leaves out how weights travel: one file a mode, beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from grpo_engine.models.config import DtypeName, LoraSettings

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from grpo_engine.bridges.server_client import ServerClient


def never() -> bool:
    """Nobody asks to stop."""
    return False


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
    """How long a server may be away (loading, restarting) before training gives up."""
    server_flags: tuple[str, ...] = ()
    """What `grpo-engine server` is started with, where the trainer starts it itself."""
    server_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of that server besides this process's own."""
    is_stopping: Callable[[], bool] = never
    """Asked while a server is awaited: once true, the wait ends as if patience had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeModel:
    """A model to train."""

    model: PreTrainedModel | PeftModel
    """Its parameters are what is handed over; with adapters it is PEFT's wrapper."""
    is_shared: bool
    """Whether writing into a parameter changes what inference reads."""
    policy_version: int
    """What the server served when it was asked first."""
    save: Callable[[Path], None]
    """Writes the model (or its adapter) and the tokenizer into a folder, as transformers, PEFT and vLLM load them."""
    unmerged: Callable[[], AbstractContextManager[None]] = nullcontext
    """Within, the model computes with its parameters as they are now; outside it may do so with those that were handed
    over last, as where an adapter is folded into the weights that inference reads."""


class Bridge(Protocol):
    """How new weights reach inference; one trainer, one server.

    Every method raises `PeerUnavailable` when the server stays away for longer than the context's patience.
    """

    def attach(self) -> BridgeModel:
        """Load the model, or map the server's; called once and first.

        Raises:
            ModelError, BridgeError: there is nothing to train on.
        """

    def publish(self, version: int, write: Callable[[], None]) -> None:
        """Make the server serve `version`; `write` copies the new values into the model's trained parameters.

        `write` runs with the fence closed where inference reads the very same memory. It runs again, until the next
        publish, for a server that was restarted: it must bring all of them each time, and look the parameters' storage
        up when it runs (`parameter.data`), since that may have moved.
        """

    def keep_up(self) -> None:
        """Notice that the server has ended, and let go of what is mapped of it; never waits for the next one.

        Called a few times a second while a batch is awaited; must cost next to nothing where all is well.
        """

    def ensure_current(self) -> None:
        """Notice a server that was restarted, and give it the current version again; one GET where all is well."""

    def close(self) -> None:
        """Let go of the server and of whatever was left for it to read."""


def connect(context: BridgeContext) -> ServerClient:
    """A client of the inference server; only here, so that reading settings loads no HTTP client."""
    from grpo_engine.bridges.server_client import ServerClient

    return ServerClient(context.server_url, patience_s=context.patience_s, is_stopping=context.is_stopping)
