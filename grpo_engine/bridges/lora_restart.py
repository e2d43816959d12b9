"""`lora_restart`: an adapter is trained, and served folded into the model: full speed, and no adapter kernels.

Every few steps the adapter is merged into a copy of the weights that it stands beside, from the untrained ones each
time, and the server reads that checkpoint in place, or starts anew. The trainer computes with the adapter apart, so
both differ by the rounding of the sum.

    A checkpoint: frozen-*.safetensors         what no adapter changes, written once and linked into each
                  merged.safetensors           what adapters change, written anew

No tensor is in two files: vLLM loads every tensor of every file that an index names, and not only where it names it.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from grpo_engine.bridges.protocol import Bridge, BridgeContext
from grpo_engine.bridges.saving import trainable_device, write_whole
from grpo_engine.bridges.whole_checkpoints import CheckpointBridge, CheckpointSettings
from grpo_engine.flags import Flag

if TYPE_CHECKING:
    from peft import PeftModel

_INDEX = "model.safetensors.index.json"
_MERGED = "merged.safetensors"


class LoraRestart(CheckpointSettings):
    """An adapter on a frozen model, merged into checkpoints that the server reads every few steps."""

    after_server_restart: ClassVar[str] = "the new server begins with the newest checkpoint that was handed over"
    """What happens then, for the people who restart one."""
    trains_adapter: ClassVar[bool] = True
    """Whether an adapter on a frozen model learns, and not the model."""
    shares_memory: ClassVar[bool] = False
    """Whether trainer and server map the same weights."""
    mode: Annotated[Literal["lora_restart"], Flag(("--weight-bridge-mode",))] = "lora_restart"
    """How new weights reach inference."""

    def build(self, context: BridgeContext) -> Bridge:
        """The bridge itself."""
        return CheckpointBridge(self, context, _MergedAdapter(context))


class _MergedAdapter:
    """See `OwnModel`: a base with an adapter, written as one."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._model: PeftModel

    def load(self) -> PeftModel:
        from grpo_engine.models.loading import load_model
        from grpo_engine.models.lora import add_lora

        context = self._context
        base = load_model(context.model_name, dtype=context.dtype, device=trainable_device(context.device))
        self._model = add_lora(base, context.lora)
        return self._model

    def most_bytes(self) -> int:
        from grpo_engine.models.merging import frozen_state

        whole = sum(int(parameter.nbytes) for parameter in self._model.get_base_model().parameters())
        frozen = {tensor.data_ptr(): int(tensor.nbytes) for tensor in frozen_state(self._model).values()}  # tied: once
        return 2 * whole - sum(frozen.values())

    def write(self, folder: Path, kept: Path) -> None:
        from safetensors.torch import save_file

        from grpo_engine.models.merging import merged_weights

        if not kept.is_dir():
            self._write_kept(kept, folder / ".kept")
        for path in kept.iterdir():
            if path.name != _INDEX:
                _link(path, folder / path.name)
        merged = {name: weight.cpu().contiguous() for name, weight in merged_weights(self._model)}
        save_file(merged, folder / _MERGED, metadata={"format": "pt"})
        index = json.loads((kept / _INDEX).read_text())
        index["weight_map"] |= dict.fromkeys(merged, _MERGED)
        index["metadata"]["total_size"] += sum(weight.nbytes for weight in merged.values())
        (folder / _INDEX).write_text(json.dumps(index))

    def _write_kept(self, kept: Path, partial: Path) -> None:
        """Write what no adapter changes: settings, tokenizer, and the other tensors in files of names of their own.

        Args:
            partial: where until it is whole; in a checkpoint, with which it goes if that is never finished.
        """
        from safetensors import safe_open

        from grpo_engine.models.loading import load_tokenizer
        from grpo_engine.models.merging import frozen_state

        write_whole(self._model.get_base_model(), partial, frozen_state(self._model))
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
    """Have one file in two folders; a copy on file systems that have no links."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)
