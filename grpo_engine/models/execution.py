"""How a model's layers run in training: without dropout, with activation checkpointing, compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from grpo_engine.compilers import has_compiler
from grpo_engine.errors import ModelError
from grpo_engine.models.attention import keeping_attention

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def recompute_layers(model: PreTrainedModel | PeftModel, *, keep_attention: bool = False) -> None:
    """Activation checkpointing: keep the input of each layer only, and recompute the rest in the backward pass.

    Args:
        keep_attention: keep attention's outputs too: 2 bytes × hidden size per position and layer; long rows are 10 %
            faster. No effect on packed rows, or if the model has its own attention.

    Raises:
        ModelError: this kind of model cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"gradient_checkpointing: {type(model).__name__} has none in transformers: leave it out, and lower "
            "--batch-size or --micro-batch-tokens instead"
        )
    # Not reentrant: that variant computes no gradients when a layer's input needs none, as with frozen embeddings.
    settings: dict[str, Any] = {"use_reentrant": False}
    if keep_attention:
        settings["context_fn"] = keeping_attention
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def silence(model: nn.Module) -> None:
    """Disable the dropout and router noise of the model's configuration.

    GPT-2 and OPT have 0.1: every log-prob would differ from the sampler's, and between updates. Dropout of adapters
    stays, since it has its own setting.
    """
    for name, module in model.named_modules():
        if "lora_dropout" in name:
            continue
        for attribute, value in list(vars(module).items()):
            is_noise = (
                "drop" in attribute or "jitter" in attribute or (attribute == "p" and isinstance(module, _DropoutNd))
            )
            if is_noise and isinstance(value, float):
                setattr(module, attribute, 0.0)


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each layer separately, which fuses norms, rotations and activations; all layers share one compilation.

    With dynamic shapes, since widths vary between batches.

    Raises:
        ModelError: no C compiler.
    """
    if not has_compiler():
        raise ModelError(
            "compile_layers: neither gcc nor clang is in PATH, nor the compiler of CC: install one (apt install gcc), "
            "set "
            "CC, or omit compile_layers"
        )
    for layer in decoder_layers(model):
        layer.forward = _with_view(torch.compile(layer.forward, dynamic=True))


def _with_view(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward pass of a layer, whose input is a view in each call.

    FSDP hands it a view, and a recomputed layer gets what that is a view of: torch would compile each layer for both.
    """

    @wraps(forward)
    def call(hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        return forward(hidden_states.view_as(hidden_states), *arguments, **named)

    return call


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a decoder, in order.

    Raises:
        ModelError: their attribute has an unknown name.
    """
    body = model.get_decoder()
    for name in ("layers", "h", "blocks"):
        layers = getattr(body, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise ModelError(f"{type(body).__name__} has its layers under none of the names layers, h and blocks")


def parameters_by_layer(model: PreTrainedModel) -> list[list[str]]:
    """Names of all parameters in the model's order: first those outside of its layers, then those of each layer."""
    layers = decoder_layers(model)
    number = {id(parameter): n for n, layer in enumerate(layers, 1) for parameter in layer.parameters()}
    names: list[list[str]] = [[] for _ in range(len(layers) + 1)]
    for name, parameter in model.named_parameters():
        names[number.get(id(parameter), 0)].append(name)
    return names


def shapes_by_layer(model: PreTrainedModel) -> list[dict[str, tuple[int, ...]]]:
    """The same with their whole shapes."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return [{name: shapes[name] for name in names} for names in parameters_by_layer(model)]
