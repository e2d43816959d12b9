"""Low-rank adapters by PEFT: adding them to a model, and saving them so that PEFT and vLLM can load them.

A new adapter changes nothing (its second factor is zero), and its parameters are fp32 whatever the model's dtype.
Merging is in `merged_lora.py`.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from grpo_engine.errors import ModelError
from grpo_engine.models.config import LoraSettings, parse_layer_indices
from grpo_engine.models.layers import require_layers, require_targets
from grpo_engine.wire.checkpoints import ADAPTER_CONFIG, ADAPTER_WEIGHTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_lora(model: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    """Wrap `model` with a new adapter, whose parameters are the only trained ones from then on.

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


def adapter_tensors(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """The adapter's factors, under the names that PEFT gives them in its files.

    `get_peft_model_state_dict` returns the same through the whole model's state: about 20 ms for an 8B model.
    """
    infix = f".{model.active_adapter}."
    return {
        name.replace(infix, "."): parameter
        for name, parameter in model.named_parameters()
        if f".lora_A{infix}" in name or f".lora_B{infix}" in name
    }


def save_adapter(model: PeftModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write the adapter's config and safetensors to `folder`, atomically.

    It is written to a temporary folder and renamed; an existing adapter is replaced. Use a new folder per version if a
    server may be reading. PEFT's own `save_pretrained` writes the same two files and a model card, and takes many times
    as long.

    Args:
        dtype: of the file; None: the adapter's own. A server that computes in bfloat16 would round it anyway.

    Raises:
        ModelError: the folder is no adapter.
    """
    if folder.exists() and not (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{folder}: exists and is not an adapter; choose another folder")
    beside, replaced = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.replaced")
    for leftover in (beside, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    beside.mkdir(parents=True)
    save_file(_on_host(adapter_tensors(model), dtype), beside / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    _served(model.peft_config[model.active_adapter]).save_pretrained(str(beside))
    if folder.exists():
        folder.rename(replaced)
    beside.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _on_host(tensors: dict[str, torch.nn.Parameter], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Copies in host memory, by one transfer: one per tensor would synchronize each time."""
    flat = torch.cat([tensor.detach().to(dtype or tensor.dtype).flatten() for tensor in tensors.values()]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(tensors.items(), parts, strict=True)}


def _served(config: LoraConfig) -> LoraConfig:
    """The config to write, for inference."""
    served = copy.copy(config)
    served.inference_mode = True
    return served
