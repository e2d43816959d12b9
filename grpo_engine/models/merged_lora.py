"""Adapters merged into the weights, so that a forward pass costs what the base model's does; and merged checkpoints.

A layer computes y = x Wᵀ + b with W = round(W₀ + s B A), and W is in the memory of the base layer's weight, which an
inference server may read. Each merge starts from a kept copy of W₀, so that rounding errors do not accumulate. A and B
are trained: by the chain rule for dW = s (dB A + B dA), with g = ∂L/∂y and the rounding taken for the identity
(straight through, arXiv 1308.3432),

    ∂L/∂W = gᵀ x        ∂L/∂A = s (g B)ᵀ x        ∂L/∂B = s gᵀ (x Aᵀ)        ∂L/∂x = g W

of which the first is never computed. Legend: N tokens, I inputs, O outputs, R rank; A is (R, I), B is (O, R).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional

from grpo_engine.errors import ModelError

if TYPE_CHECKING:
    from peft import PeftModel

_ADAPTER = "default"
"""PEFT's name for the adapter that `add_lora` creates."""
_WRAPPED = ".base_layer."
"""What PEFT adds to the names of parameters with an adapter."""


class MergedLora:
    """The layers of a model whose adapters are merged into their weights."""

    def __init__(self, model: PeftModel, base_weights: Mapping[str, Tensor]) -> None:
        """Make the layers with adapters compute with merged weights, which `merge` writes.

        Args:
            base_weights: the weights without adapter by the names of `adapted_weights`; copied to the weights' device.

        Raises:
            ModelError: adapters of a kind that cannot be merged here.
        """
        layers = adapted_layers(model)
        for name, layer in layers.items():
            _require_mergeable(name, layer)
        for name, layer in layers.items():
            weight = layer.base_layer.weight
            layer.register_buffer("unadapted", base_weights[name].to(weight, copy=True), persistent=False)
            layer.is_merged_apart = False
            layer.__class__ = _MergedLinear
        self._layers = [layer for layer in layers.values() if isinstance(layer, _MergedLinear)]

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the current adapters into the weights, in place."""
        for layer in self._layers:
            layer.base_layer.weight.data.copy_(layer.merged())

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, the model computes with the current adapters and temporary merged weights.

        They are computed in every forward pass, exactly as by `merge`.
        """
        for layer in self._layers:
            layer.is_merged_apart = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer.is_merged_apart = False


def adapted_weights(model: PeftModel) -> list[str]:
    """The names of weights with adapters, as in the model without adapters."""
    return list(adapted_layers(model))


@torch.no_grad()
def merged_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """The weight of every module with an adapter as base + adapter: (name in the bare model, new tensor of its dtype).

    One at a time, so that at most one fp32 sum is in memory. Always from the base weights, summed in fp32 and rounded
    once.
    """
    for name, layer in adapted_layers(model).items():
        yield name, merged_weight(layer, layer.get_base_layer().weight)


@torch.no_grad()
def merged_weight(layer: Any, weight: Tensor) -> Tensor:
    """Base + adapter of a layer of `adapted_layers`, on the device and in the dtype of its base weight.

    Args:
        weight: the base weight, which the layer does not have where it is sharded over ranks.
    """
    update: Tensor = layer.get_delta_weight(_ADAPTER)
    return (weight.float() + update.float()).to(weight.dtype)


def unwrapped_name(name: str) -> str | None:
    """The name in the model without adapters; None for a part of an adapter."""
    return None if ".lora_" in name else name.replace(_WRAPPED, ".")


def frozen_state(model: PeftModel) -> dict[str, Tensor]:
    """The rest of the model's state, tensors without adapters, by their names in the model without adapters."""
    changed = adapted_layers(model).keys()
    named = {unwrapped_name(name): tensor for name, tensor in model.get_base_model().state_dict().items()}
    return {name: tensor for name, tensor in named.items() if name is not None and name not in changed}


def adapted_layers(model: PeftModel) -> dict[str, Any]:
    """The layers with adapters, by the names of their weights in the model without adapters."""
    modules = model.get_base_model().named_modules()
    return {f"{name}.weight": module for name, module in modules if isinstance(module, LoraLayer)}


def _require_mergeable(name: str, layer: Any) -> None:
    if type(layer) is not LoraLinear or not isinstance(layer.base_layer, nn.Linear) or layer.lora_variant:
        raise ModelError(
            f"{name}: an adapter of {type(layer.base_layer).__name__} cannot be merged into the weights, only plain "
            "LoRA on linear layers: choose other lora_target_modules, or the bridge lora_only"
        )
    if not isinstance(layer.lora_dropout[_ADAPTER], nn.Identity):
        raise ModelError(
            f"{name}: an adapter with dropout cannot be merged, since its input would differ from the base layer's: "
            "set lora_dropout 0, or choose the bridge lora_only"
        )


class _MergedLinear(LoraLinear):  # type: ignore[misc]
    """PEFT's layer with another forward pass; `MergedLora` changes the class of layers to it."""

    unadapted: Tensor
    """(O, I): W₀."""
    is_merged_apart: bool
    """Whether merged weights are computed in each forward pass."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(…, I) → (…, O)."""
        if self.disable_adapters:
            return functional.linear(x, self.unadapted, self.base_layer.bias)
        weight = self.merged() if self.is_merged_apart else self.base_layer.weight
        first, second = self.lora_A[_ADAPTER].weight, self.lora_B[_ADAPTER].weight
        output: Tensor = _MergedProduct.apply(x, weight, self.base_layer.bias, first, second, self.scaling[_ADAPTER])  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def merged(self) -> Tensor:
        """(O, I): W, summed in the adapter's dtype and rounded once."""
        first, second = self.lora_A[_ADAPTER].weight, self.lora_B[_ADAPTER].weight
        exact = torch.addmm(self.unadapted.to(second.dtype), second, first, alpha=self.scaling[_ADAPTER])
        return exact.to(self.unadapted.dtype)


class _MergedProduct(torch.autograd.Function):
    """x Wᵀ + b with gradients of x and of the two factors of W, in the factors' dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor, second: Tensor, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, first, second)
        ctx.scaling = scaling
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [gradient] = gradients
        x, weight, first, second = ctx.saved_tensors
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        x_NI, gradient_NO = x.flatten(0, -2).to(first.dtype), gradient.flatten(0, -2).to(first.dtype)
        of_first = (gradient_NO @ (ctx.scaling * second)).T @ x_NI if ctx.needs_input_grad[3] else None
        of_second = gradient_NO.T @ (x_NI @ (ctx.scaling * first).T) if ctx.needs_input_grad[4] else None
        return of_x, None, None, of_first, of_second, None
