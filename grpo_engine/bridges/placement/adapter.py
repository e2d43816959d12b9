"""Placement `adapter`: an adapter is trained on a frozen base model in the trainer's own memory.

Checkpoints have the adapter merged into a copy of the weights, always from the untrained ones:

    A checkpoint: frozen-*.safetensors         tensors without adapters, written once and linked into each
                  merged.safetensors           tensors with adapters, written for each

No tensor is in two files: vLLM loads every tensor of every file that an index names, and not only where it names it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.bridges.protocol import BridgeContext
from grpo_engine.bridges.transport.saving import own_tensors, save_model, write_whole

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

_INDEX = "model.safetensors.index.json"
_MERGED = "merged.safetensors"


class AdaptedModel:
    """See `grpo_engine.bridges.protocol.Placement`: a base with an adapter, written as one model."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._model: PeftModel
        self._described: PreTrainedModel
        """Has the configuration of the base model, and the names of its tensors."""

    def load(self) -> PeftModel:
        """Load the base model and put an adapter on it that changes nothing yet."""
        from grpo_engine.models.devices import trainable_device
        from grpo_engine.models.loading import load_model
        from grpo_engine.models.lora import add_lora

        context = self._context
        base = load_model(context.model_name, dtype=context.dtype, device=trainable_device(context.device))
        self._model = add_lora(base, context.lora)
        self._described = self._model.get_base_model()
        return self._model

    def stream_merged(self, receive: Callable[[dict[str, Tensor]], None]) -> None:
        """Hand out the weights with adapters, merged, one at a time, by their names in the model without adapters."""
        from grpo_engine.models.merged_lora import merged_weights

        for name, weight in merged_weights(self._model):
            receive({name: weight})

    def tensors(self) -> Mapping[str, Tensor]:
        """The adapter's own, which each rank has whole."""
        return own_tensors(self._model)

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the adapter and the tokenizer."""
        save_model(self._model, self._context.model_name, folder, tensors)

    def max_bytes(self) -> int:
        """Size of two checkpoints: frozen tensors count once."""
        from grpo_engine.models.merged_lora import adapted_layers

        adapted = [layer.get_base_layer().weight for layer in adapted_layers(self._model).values()]
        parameters = [*self._model.get_base_model().parameters(), *adapted]
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters)

    def write(self, folder: Path, kept: Path) -> None:
        """Write the merged tensors, and link the frozen ones out of `kept`."""
        from safetensors.torch import save_file

        is_first = not kept.is_dir()
        frozen, merged = self._tensors(with_frozen=is_first)
        if is_first:
            self._write_kept(kept, folder / ".kept", frozen)
        for path in kept.iterdir():
            if path.name != _INDEX:
                _link(path, folder / path.name)
        save_file(merged, folder / _MERGED, metadata={"format": "pt"})
        index = json.loads((kept / _INDEX).read_text())
        index["weight_map"] |= dict.fromkeys(merged, _MERGED)
        index["metadata"]["total_size"] += sum(weight.nbytes for weight in merged.values())
        (folder / _INDEX).write_text(json.dumps(index))

    def _tensors(self, *, with_frozen: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The base model's tensors without adapters (none if not asked for), and the merged ones on the CPU."""
        from grpo_engine.models.merged_lora import frozen_state, merged_weights

        merged = {name: weight.cpu().contiguous() for name, weight in merged_weights(self._model)}
        return frozen_state(self._model) if with_frozen else {}, merged

    def _write_kept(self, kept: Path, partial: Path, frozen: Mapping[str, Tensor]) -> None:
        """Write configuration, tokenizer and frozen tensors to `kept`.

        Args:
            partial: where they are written first; in a checkpoint folder, with which they are removed if unfinished.
        """
        from safetensors import safe_open

        from grpo_engine.models.loading import load_tokenizer

        write_whole(self._described, partial, frozen)
        load_tokenizer(self._context.model_name).save_pretrained(partial)
        weight_map: dict[str, str] = {}
        num_bytes = 0
        for number, path in enumerate(sorted(partial.glob("*.safetensors")), start=1):
            # transformers would take a file of the usual name for the whole model.
            renamed = path.rename(partial / f"frozen-{number:05d}.safetensors")
            num_bytes += renamed.stat().st_size
            with safe_open(renamed, framework="np") as file:
                weight_map |= dict.fromkeys(file.keys(), renamed.name)
        (partial / _INDEX).write_text(json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": weight_map}))
        partial.rename(kept)


def _link(path: Path, to: Path) -> None:
    """Hard-link a file, or copy it on file systems without links."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)
