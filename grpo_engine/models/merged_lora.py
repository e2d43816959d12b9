"""Adapters that are folded into the weights they change, so that a forward pass costs what the base model's does.

A layer computes y = x Wᵀ + b with W = round(W₀ + s B A), and W stands where the base layer's weight stands, which an
inference server may be reading. Each merge starts from W₀, a copy of the base weight that is kept, so that rounding to
the weights' type never adds up. What learns is A and B, as everywhere: by the chain rule for dW = s (dB A + B dA), with
g = ∂L/∂y and the rounding taken for the identity (straight through, arXiv 1308.3432),

    ∂L/∂W = gᵀ x        ∂L/∂A = s (g B)ᵀ x        ∂L/∂B = s gᵀ (x Aᵀ)        ∂L/∂x = g W

of which the first is never made. Legend: N tokens, I inputs, O outputs, R rank; A is (R, I), B is (O, R).
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
"""The one that `add_lora` makes, by PEFT's name for it."""


class MergedLora:
    """The layers of a model whose adapters are folded into their weights."""

    def __init__(self, model: PeftModel, base_weights: Mapping[str, Tensor]) -> None:
        """Have the layers with adapters compute with merged weights from now on; `merge` makes these.

        Args:
            base_weights: by the names of `adapted_weights`: what the weights were before any adapter; copied to where
                the weights are.

        Raises:
            ModelError: adapters of a kind that is not merged here.
        """
        layers = _adapted_layers(model)
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
        """Fold the adapters, as they are now, into the weights where these are."""
        for layer in self._layers:
            layer.base_layer.weight.data.copy_(layer.merged())

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, the model computes with the adapters as they are now, and merged weights of its own.

        They are made anew in every forward pass, exactly as `merge` makes them.
        """
        for layer in self._layers:
            layer.is_merged_apart = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer.is_merged_apart = False


def adapted_weights(model: PeftModel) -> list[str]:
    """The weights that adapters are for, by their names in the model without adapters."""
    return list(_adapted_layers(model))


def _adapted_layers(model: PeftModel) -> dict[str, Any]:
    modules = model.get_base_model().named_modules()
    return {f"{name}.weight": module for name, module in modules if isinstance(module, LoraLayer)}


def _require_mergeable(name: str, layer: Any) -> None:
    if type(layer) is not LoraLinear or not isinstance(layer.base_layer, nn.Linear) or layer.lora_variant:
        raise ModelError(
            f"{name}: an adapter of {type(layer.base_layer).__name__} is not merged into the weights here, only plain "
            "LoRA on linear layers: choose other lora_target_modules, or the bridge lora_only"
        )
    if not isinstance(layer.lora_dropout[_ADAPTER], nn.Identity):
        raise ModelError(
            f"{name}: an adapter with dropout cannot be merged, since its input would differ from the base layer's: "
            "set lora_dropout 0, or choose the bridge lora_only"
        )


class _MergedLinear(LoraLinear):  # type: ignore[misc]
    """PEFT's layer, with another forward pass; a layer becomes one in `MergedLora`."""

    unadapted: Tensor
    """(O, I): W₀."""
    is_merged_apart: bool
    """Whether the merged weights are made anew in each forward pass."""

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
        """(O, I): W, added up in the adapter's type and rounded once."""
        first, second = self.lora_A[_ADAPTER].weight, self.lora_B[_ADAPTER].weight
        exact = torch.addmm(self.unadapted.to(second.dtype), second, first, alpha=self.scaling[_ADAPTER])
        return exact.to(self.unadapted.dtype)


class _MergedProduct(torch.autograd.Function):
    """x Wᵀ + b, whose gradient goes to x and to the two factors that W is made of, in the factors' type."""

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
