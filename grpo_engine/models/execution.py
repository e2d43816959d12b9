"""How a model's layers are run in training: without noise, computed again in the backward pass, compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from grpo_engine.compilers import has_compiler
from grpo_engine.errors import ModelError
from grpo_engine.models.attention import keeping_attention

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def recompute_layers(model: PreTrainedModel | PeftModel, *, keep_attention: bool = False) -> None:
    """Keep only what goes into each layer, and compute the rest again in the backward pass.

    Args:
        keep_attention: keep what attention gives, too: 2 bytes × hidden size a position and layer, and long rows are
            a tenth quicker. Without effect on packed rows, and where the model has attention of its own.

    Raises:
        ModelError: this kind of model cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"gradient_checkpointing: {type(model).__name__} has none in transformers: leave it out, and lower "
            "--batch-size or --micro-batch-tokens instead"
        )
    # Not reentrant: that one runs nothing backward when a layer's input needs no gradient, as with frozen embeddings.
    settings: dict[str, Any] = {"use_reentrant": False}
    if keep_attention:
        settings["context_fn"] = keeping_attention
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def silence(model: nn.Module) -> None:
    """Switch off the dropout and router noise that the model's own configuration has for training.

    GPT-2 and OPT have 0.1: every log-probability would differ from the sampler's, and from one update to the next.
    Dropout of adapters stays, since a setting of its own asks for it.
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
    """Compile each layer by itself: norms, rotations and activations are fused; all layers share one compilation.

    Widths vary from batch to batch, so sizes are left open.

    Raises:
        ModelError: nothing to compile with.
    """
    if not has_compiler():
        raise ModelError(
            "compile_layers: neither gcc nor clang is in PATH, nor what CC names: install one (apt install gcc), name "
            "one in CC, or leave compile_layers out"
        )
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a decoder, in their order.

    Raises:
        ModelError: it names them in none of the ways known here.
    """
    body = model.get_decoder()
    for name in ("layers", "h", "blocks"):
        layers = getattr(body, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise ModelError(f"{type(body).__name__} has its layers under none of the names layers, h and blocks")
