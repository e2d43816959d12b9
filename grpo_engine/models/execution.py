"""How a model's layers run in training: without dropout, with activation checkpointing, compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map_only

from grpo_engine.compilers import has_compiler
from grpo_engine.errors import ModelError
from grpo_engine.models.attention import keeping_attention, reshaped, rows_aside, uses_training_attention
from grpo_engine.models.compiled import compiled

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_MARK_OF_FSDP = "_is_fsdp_managed_module"
"""Read by torch's compiler alone (torch/_dynamo/variables/builder.py)."""


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

    For any sizes, since widths vary between batches. FSDP marks the modules of its layers for torch, which then
    takes their own numbers, as the size of a head, for ones that vary, and reasons about products of them: on a CPU, a
    Llama layer that is found compiled was traced in 5.4 s instead of 2.2 (torch 2.11 and 2.13). The mark is taken off.

    Raises:
        ModelError: no C compiler.
    """
    if not has_compiler():
        raise ModelError(
            "compile_layers: neither gcc nor clang is in PATH, nor the compiler of CC: install one (apt install gcc), "
            "set "
            "CC, or omit compile_layers"
        )
    form = _in_one_row if uses_training_attention(model) else _in_its_rows
    for layer in decoder_layers(model):
        for module in layer.modules():
            if hasattr(module, _MARK_OF_FSDP):
                setattr(module, _MARK_OF_FSDP, False)
        layer.forward = form(compiled(layer.forward))


# Torch compiles a layer anew for each look of its arguments: each of these gives all calls one. In both it is given no
# view, for which torch looks at the tensor behind it too: FSDP hands a layer a view, and a recomputed layer gets none.


def _in_its_rows(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward pass of a layer."""

    @wraps(forward)
    def call(hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        return forward(reshaped(hidden_states, hidden_states.shape), *arguments, **named)

    return call


def _in_one_row(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward pass of a layer in which only attention knows where a row of hidden states (B, L, H) ends.

    All else in such a layer acts on each position alone. So the compiled code gets one row of B · L positions (torch
    makes other code for one row than for several), and no mask, which packed rows have and plain rows do not; both go
    around it to `attend`.
    """

    @wraps(forward)
    def call(hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        shape = hidden_states.shape[:2]
        mask = named.get("attention_mask")
        if mask is not None:
            named["attention_mask"] = None
        arguments, named = tree_map_only(Tensor, partial(_joined, shape), (arguments, named))
        with rows_aside(shape[0], mask):
            output = forward(_joined(shape, hidden_states), *arguments, **named)
        return tree_map_only(Tensor, partial(_split, shape), output)

    return call


def _joined(shape: torch.Size, values: Tensor) -> Tensor:
    """Values of each position, (B, L, …), or (1, L, …) for all rows, as (1, B · L, …); others unchanged."""
    if values.shape[:2] not in {shape, (1, shape[1])}:
        return values
    of_rows = values.expand(*shape, *values.shape[2:])
    return reshaped(of_rows, (1, shape.numel(), *values.shape[2:]))


def _split(shape: torch.Size, values: Tensor) -> Tensor:
    """The reverse."""
    return values.view(*shape, *values.shape[2:]) if values.shape[:2] == (1, shape.numel()) else values


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
