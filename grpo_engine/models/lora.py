"""Low-rank adapters by PEFT: putting them on a model, and saving them so that PEFT and vLLM can load them.

An adapter starts as no change at all (its second factor is zero), and its parameters are fp32 whatever the model's
type. Serving it, and folding it into the weights, is the bridges' business.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from peft import LoraConfig, PeftModel, get_peft_model
from transformers.pytorch_utils import Conv1D

from grpo_engine.errors import ModelError
from grpo_engine.models.config import LoraSettings, parse_layer_indices
from grpo_engine.models.layers import require_layers, require_targets

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_lora(model: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    """Wrap `model` with a fresh adapter, the only part of it that learns from then on.

    Raises:
        ModelError: target modules or layers that the model does not have.
    """
    layers = None
    if settings.layer_indices is not None:
        layers = sorted(require_layers(model, parse_layer_indices(settings.layer_indices)))
    targets = require_targets(model, settings.target_modules)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules),
        layers_to_transform=layers,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in targets),
    )
    return get_peft_model(model, config, autocast_adapter_dtype=True)


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapter's config and safetensors to `folder`, whole or not at all.

    It is written beside its place and renamed; an adapter that lies there already is replaced. A server that may be
    reading it should be given a new folder for each version instead.

    Raises:
        ModelError: the folder holds something else than an adapter.
    """
    if folder.exists() and not (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder}: exists and is no adapter; choose another folder")
    beside, replaced = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.replaced")
    for leftover in (beside, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Embedding layers: never part of these adapters, and looking whether they are would ask the hub.
    model.save_pretrained(beside, save_embedding_layers=False)
    if folder.exists():
        folder.rename(replaced)
    beside.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
