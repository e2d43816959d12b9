"""Placement `own`: the whole model is trained in the trainer's own memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.bridges.protocol import BridgeContext
from grpo_engine.bridges.transport.saving import own_tensors, save_model

if TYPE_CHECKING:
    from torch import Tensor
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

    def layers(self) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes of the parameters in the order of `stream`."""
        from grpo_engine.models.execution import shapes_by_layer

        return shapes_by_layer(self._model)

    def stream(self, receive: Callable[[dict[str, Tensor]], None]) -> None:
        """Hand out the parameters by name, layer by layer."""
        whole = {name: parameter.data for name, parameter in self._model.named_parameters()}
        for names in self.layers():
            receive({name: whole[name] for name in names})

    def write(self, folder: Path, kept: Path) -> None:
        """Write a whole checkpoint; `kept` is not used."""
        self.save(folder, self.tensors())

    def tensors(self) -> Mapping[str, Tensor]:
        """The model's own."""
        return own_tensors(self._model)

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the model and its tokenizer."""
        save_model(self._model, self._context.model_name, folder, tensors)
