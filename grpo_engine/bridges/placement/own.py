"""Placement `own`: the whole model is trained in the trainer's own memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.bridges.protocol import BridgeContext
from grpo_engine.bridges.transport.saving import save_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OwnModel:
    """See `grpo_engine.bridges.protocol.Placement`: checkpoints are the model as it is."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._model: PreTrainedModel

    def load(self) -> PreTrainedModel:
        """Load the model."""
        from grpo_engine.models.devices import trainable_device
        from grpo_engine.models.loading import load_model

        context = self._context
        self._model = load_model(context.model_name, dtype=context.dtype, device=trainable_device(context.device))
        return self._model

    def max_bytes(self) -> int:
        """Size of two checkpoints."""
        return 2 * sum(int(parameter.nbytes) for parameter in self._model.parameters())

    def write(self, folder: Path, kept: Path) -> None:
        """Write a whole checkpoint; `kept` is not used."""
        save_model(self._model, self._context.model_name, folder)
