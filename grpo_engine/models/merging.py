"""Fold a low-rank adapter into the weights that it stands beside; the trained model stays as it is.

Each time from the base's own weights, summed in fp32 and rounded once: what is folded into an already rounded sum loses
updates that are smaller than its last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

if TYPE_CHECKING:
    from peft import PeftModel

_WRAPPED = ".base_layer."
"""What PEFT puts into the names of the parameters that an adapter stands beside."""


@torch.no_grad()
def merged_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """The weight of every module with an adapter as base + adapter: (name in the bare model, new tensor of its dtype).

    One at a time, so that a caller who writes them away holds one fp32 sum at most.
    """
    adapter = str(model.active_adapter)
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer) and adapter in module.lora_A:
            weight = module.get_base_layer().weight
            update = module.get_delta_weight(adapter)
            yield f"{name}.weight", (weight.float() + update.float()).to(weight.dtype)


def frozen_state(model: PeftModel) -> dict[str, Tensor]:
    """The rest of the bare model's state: whatever no adapter changes, under its name there."""
    base = model.get_base_model()
    changed = {f"{name}.weight" for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    named = {name.replace(_WRAPPED, "."): tensor for name, tensor in base.state_dict().items() if ".lora_" not in name}
    return {name: tensor for name, tensor in named.items() if name not in changed}
