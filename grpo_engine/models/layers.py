"""Selection of trained parameters: layers by index, and target modules of adapters.

Assumes the parameter names of the decoders in transformers: `….layers.<index>.…` (`….h.<index>.…` in GPT-2's
line). The text form (`0-3,28-31`) is parsed in `config.py`.
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
    """Freeze everything but these layers, including embeddings, final norm and head; frozen parameters stay frozen.

    With an adapter, only the adapter's part in these layers is trained.

    Raises:
        ModelError: no index, or one that the model does not have; nothing is changed then.
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
    """One module of each of these names, if all can have adapters.

    Raises:
        ModelError: one is no linear layer of this model, or its output layer.
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
    """Whether every layer respects an arbitrary mask: full attention by SDPA, no sliding window, no recurrence.

    A window, or a recurrent state along the row, would see positions that the mask hides. Some models (Falcon) call
    SDPA directly and cannot use another attention function.
    """
    config = model.config.get_text_config()
    has_window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    is_sdpa = model.config._attn_implementation in ("sdpa", "grpo_engine") and model._supports_attention_backend
    is_plain = is_sdpa and not getattr(config, "alibi", False) and not caps_attention(model)
    return bool(is_plain and not has_window and kinds == {"full_attention"})


def caps_attention(model: PreTrainedModel) -> bool:
    """Whether attention scores are soft-capped by a tanh, as in Gemma 2; SDPA does not support that."""
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
    """Including quantized layers, and GPT-2's, whose weights are transposed."""
    return "Linear" in type(module).__name__ or isinstance(module, Conv1D)
