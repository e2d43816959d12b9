"""`none`: no shared memory. Every few steps a checkpoint is saved, and the server reads it in place, or starts anew.

Works with any server that can read the trainer's disk, at the price of a whole checkpoint a hand-over; in between the
server samples from an older version, which every answer says.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from grpo_engine.bridges.protocol import Bridge, BridgeContext
from grpo_engine.bridges.saving import save_model, trainable_device
from grpo_engine.bridges.whole_checkpoints import CheckpointBridge, CheckpointSettings
from grpo_engine.flags import Flag

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CheckpointReload(CheckpointSettings):
    """Checkpoints that the server reads every few steps."""

    after_server_restart: ClassVar[str] = "the new server begins with the newest checkpoint that was handed over"
    """What happens then, for the people who restart one."""
    trains_adapter: ClassVar[bool] = False
    """Whether an adapter on a frozen model learns, and not the model."""
    shares_memory: ClassVar[bool] = False
    """Whether trainer and server map the same weights."""
    mode: Annotated[Literal["none"], Flag(("--weight-bridge-mode",))] = "none"
    """How new weights reach inference."""

    def build(self, context: BridgeContext) -> Bridge:
        """The bridge itself."""
        return CheckpointBridge(self, context, _WholeModel(context))


class _WholeModel:
    """See `OwnModel`: the model as it is."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._model: PreTrainedModel

    def load(self) -> PreTrainedModel:
        from grpo_engine.models.loading import load_model

        context = self._context
        self._model = load_model(context.model_name, dtype=context.dtype, device=trainable_device(context.device))
        return self._model

    def most_bytes(self) -> int:
        return 2 * sum(int(parameter.nbytes) for parameter in self._model.parameters())

    def write(self, folder: Path, kept: Path) -> None:
        save_model(self._model, self._context.model_name, folder)
