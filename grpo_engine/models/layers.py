"""Choosing what learns: transformer layers by index, to train or to put adapters on, and modules for adapters.

Assumes the naming that every decoder of the transformers library has: `….layers.<index>.…` (`….h.<index>.…` in GPT-2's
line). Reading the text form (`0-3,28-31`) is in `config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn
from transformers.pytorch_utils import Conv1D

from grpo_engine.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER_OF_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def freeze_except_layers(model: nn.Module, indices: Iterable[int]) -> None:
    """Freeze all but these layers, also embeddings, final norm and head; what is frozen already stays so.

    Of a model with an adapter, the adapter alone learns, and with this only its part in these layers.

    Raises:
        ModelError: no index, or one that the model does not have; nothing is frozen then.
    """
    chosen = require_layers(model, indices)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and layer_of(name) in chosen)


def require_layers(model: nn.Module, indices: Iterable[int]) -> frozenset[int]:
    """`indices` as a set, if the model has all of those layers.

    Raises:
        ModelError: no index, or one that the model does not have.
    """
    chosen, present = frozenset(indices), frozenset(_layers(model))
    if not chosen:
        raise ModelError("layer indices: none given, so nothing would learn; leave the filter out to train all layers")
    if missing := sorted(chosen - present):
        raise ModelError(
            f"layer indices: {', '.join(map(str, missing))} not in this model, which has {len(present)} layers, "
            f"0 to {len(present) - 1}"
        )
    return chosen


def require_targets(model: PreTrainedModel, names: Sequence[str]) -> list[nn.Module]:
    """A module of each of these names, if adapters can be put on all of them.

    Raises:
        ModelError: one is no linear layer of this model, or is its output layer.
    """
    linear = {name.rpartition(".")[2]: module for name, module in model.named_modules() if _is_linear(module)}
    if unknown := [name for name in names if name not in linear]:
        raise ModelError(
            f"LoRA target modules {', '.join(unknown)} are no linear layers of this model; it has "
            f"{', '.join(sorted(linear))}"
        )
    head = model.get_output_embeddings()
    if of_head := [name for name in names if linear[name] is head]:
        raise ModelError(
            f"LoRA target module {of_head[0]} is the output layer, which is applied without adapters here, so that "
            "one would learn nothing: leave it out"
        )
    return [linear[name] for name in names]


def takes_any_mask(model: PreTrainedModel) -> bool:
    """Whether every layer attends as a mask of ours says: full attention by SDPA, no sliding window, no recurrence.

    A window, or a state that runs along the row, would see what the mask hides. Some models (Falcon) call SDPA by
    themselves and take no attention of ours.
    """
    config = model.config.get_text_config()
    has_window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    is_sdpa = model.config._attn_implementation in ("sdpa", "grpo_engine") and model._supports_attention_backend
    is_plain = is_sdpa and not getattr(config, "alibi", False) and not caps_attention(model)
    return bool(is_plain and not has_window and kinds == {"full_attention"})


def caps_attention(model: PreTrainedModel) -> bool:
    """Whether attention scores are held down by a tanh before their softmax, as in Gemma 2; SDPA leaves that out."""
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None


def layer_of(parameter_name: str) -> int | None:
    """The index of the layer that a parameter belongs to; None for embeddings, final norm and head."""
    match = _LAYER_OF_NAME.search(parameter_name)
    return int(match[1]) if match else None


def _layers(model: nn.Module) -> Iterator[int]:
    for name, _ in model.named_parameters():
        index = layer_of(name)
        if index is not None:
            yield index


def _is_linear(module: nn.Module) -> bool:
    """Also quantized ones, and GPT-2's, whose weights are transposed."""
    return "Linear" in type(module).__name__ or isinstance(module, Conv1D)
