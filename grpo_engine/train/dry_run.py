"""`--dry-run`: what would be trained and what it takes, from the model's configuration alone. Contacts nobody.

Loads no weights: the model is built on the meta device, where a parameter is its shape. The same plan is a line in the
log of every start on a GPU.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from grpo_engine.bridges.saving import trainable_device
from grpo_engine.errors import ModelError
from grpo_engine.flags import to_flags
from grpo_engine.models.config import parse_layer_indices
from grpo_engine.models.layers import require_layers, require_targets
from grpo_engine.models.loading import load_config, torch_dtype
from grpo_engine.models.local import RANDOM_MODEL_BYTES
from grpo_engine.models.random_models import published_shape
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.fitting import Advice, advice
from grpo_engine.train.idle_settings import settings_without_effect
from grpo_engine.train.memory_plan import (
    CUDA_CONTEXT_BYTES,
    Card,
    MemoryPlan,
    ModelShape,
    ParameterShape,
    available_bytes,
    memory_plan,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

log = logging.getLogger(__name__)


def dry_run(config: TrainConfig) -> int:
    """Print the report on stdout; the exit code is 0 where it fits.

    Raises:
        ModelError: as `report`.
    """
    text, fits = report(config, card_before_inference(config))
    sys.stdout.write(text)
    return 0 if fits else 1


def report(config: TrainConfig, card: Card | None) -> tuple[str, bool]:
    """What would be trained and what it takes, and whether that fits on the card; without one it does.

    Raises:
        ModelError: the model's configuration cannot be read, or its model lacks layers or modules to be trained.
    """
    name = config.model_name
    # A model with random weights is made where it is first loaded: of 8B that takes minutes, and 16 GB of the disk.
    pretrained = published_shape(name) if name in RANDOM_MODEL_BYTES else load_config(name)
    model = model_shape(pretrained, config)
    plan = memory_plan(model, config)
    fits = card is None or plan.needed_bytes <= available_bytes(card, config)
    lines = [*_training(model, config, plan), "", *_table(plan), "", *_verdict(model, config, plan, card)]
    return "\n".join(lines) + "\n", fits


def log_plan(config: TrainConfig) -> None:
    """A line in the log, before the model is loaded; a warning with what to do where it will not fit. Only on a GPU."""
    card = card_now(config)
    if card is None:
        return
    try:
        model = model_shape(load_config(config.model_name), config)
    except ModelError as error:
        log.warning("no plan of its memory: %s", error)
        return
    plan = memory_plan(model, config)
    line = f"memory: {one_line(plan)}; {card.name} has {gb(card.free_bytes)} for it"
    if plan.needed_bytes <= card.free_bytes:
        log.info("%s", line)
    else:
        log.warning("%s: this will not fit. %s", line, in_a_sentence(advice(model, config, card)))


def model_shape(pretrained: PreTrainedConfig, config: TrainConfig) -> ModelShape:
    """What a plan must know of the model of a configuration.

    Raises:
        ModelError: it lacks layers that are to be trained, or is no decoder with attention.
    """
    try:
        with init_empty_weights(include_buffers=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # initialising what has no memory is a no-op: intended
            model = AutoModelForCausalLM.from_config(pretrained)
        model.tie_weights()
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"{type(pretrained).__name__}: no shapes of such a model without its weights: {error}"
        ) from error
    for indices in (config.train_layer_indices, config.lora_layer_indices):
        if indices is not None:
            require_layers(model, parse_layer_indices(indices))
    if config.bridge.trains_adapter:
        require_targets(model, config.lora_target_modules)
    text: Any = pretrained.get_text_config()
    try:
        hidden, num_heads, num_layers = text.hidden_size, text.num_attention_heads, text.num_hidden_layers
    except AttributeError as error:
        raise ModelError(f"{type(pretrained).__name__} is of no decoder that is known here: {error}") from None
    dtype = torch_dtype(config.dtype)
    if not isinstance(dtype, torch.dtype):
        dtype = cast(torch.dtype, pretrained.dtype or torch.float32)
    parameters = tuple(
        ParameterShape(name=name, shape=tuple(parameter.shape), bytes_each=dtype.itemsize)
        for name, parameter in model.named_parameters()
    )
    return ModelShape(
        parameters=parameters,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=_intermediate_size(text),
        num_heads=num_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(text, "head_dim", None) or hidden // num_heads,
        vocab_size=text.vocab_size,
        has_head_norms=any(parameter.name.endswith("q_norm.weight") for parameter in parameters),
        is_tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        bytes_each=dtype.itemsize,
    )


def _intermediate_size(text: Any) -> int:
    """Of the MLP that a token goes through; of a mixture, of all its experts for that token."""
    size: int = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    num_experts: int | None = getattr(text, "num_experts_per_tok", None)
    return size if num_experts is None else num_experts * (getattr(text, "moe_intermediate_size", None) or size)


def card_now(config: TrainConfig) -> Card | None:
    """The GPU that the trainer runs on, with inference running; None where it runs on a CPU."""
    device = torch.device(trainable_device(config.device))
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device)
    return Card(
        name=torch.cuda.get_device_name(device),
        total_bytes=total,
        free_bytes=free + torch.cuda.memory_reserved(device) + CUDA_CONTEXT_BYTES,  # asking for it made the context
        inference_share=config.gpu_memory_utilization if _shares_card(config) else None,
    )


def card_before_inference(config: TrainConfig) -> Card | None:
    """The same, where inference may not run yet but will."""
    card = card_now(config)
    if card is None or card.inference_share is None:
        return card
    return replace(card, free_bytes=min(card.free_bytes, int((1 - card.inference_share) * card.total_bytes)))


def _shares_card(config: TrainConfig) -> bool:
    """Whether inference is known to be on the trainer's card: it must be to share weights, or its share was given."""
    return config.bridge.shares_memory or "gpu_memory_utilization" in config.model_fields_set


def one_line(plan: MemoryPlan) -> str:
    """The plan in a line, the largest parts first."""
    parts = sorted((p for p in plan.parts if plan.peak in p.when), key=lambda part: -part.num_bytes)
    named = ", ".join(f"{part.name} {gb(part.num_bytes)}" for part in parts if part.num_bytes)
    return f"{gb(plan.needed_bytes)} at the peak ({named})"


def in_a_sentence(what: Advice) -> str:
    """What to do, in a sentence or two."""
    each = "; ".join(f"{s.text} (frees {gb(s.frees_bytes)})" for s in what.each)
    if what.together is None:
        return f"No setting makes it fit on this card; what helps: {each}" if each else "Take a larger card"
    return f"By the plan it fits with {what.together.text}. What helps, the cheapest first: {each}"


def gb(num_bytes: float) -> str:
    """1 GB is 10⁹ bytes, as in the metrics; small ones in MB."""
    return f"{num_bytes / 1e9:.1f} GB" if abs(num_bytes) >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _training(model: ModelShape, config: TrainConfig, plan: MemoryPlan) -> Iterator[str]:
    yield f"model        {config.model_name}: {model.num_layers} layers, {model.num_parameters:,} parameters"
    yield f"trained      {plan.num_trained:,} parameters: {_what(config)}"
    tokens = f"{plan.rows} x {plan.row_tokens} tokens at the longest"
    yield f"micro-batch  {tokens}; {config.sequences_per_batch} sequences a step"
    yield f"settings     {' '.join(to_flags(config.model_copy(update={'dry_run': False})))}"
    for sentence in settings_without_effect(config):
        yield f"to know      {sentence}"


def _what(config: TrainConfig) -> str:
    if config.bridge.trains_adapter:
        layers = f" of layers {config.lora_layer_indices}" if config.lora_layer_indices else ""
        return f"adapters of rank {config.lora_r} on {', '.join(config.lora_target_modules)}{layers}"
    return f"layers {config.train_layer_indices}" if config.train_layer_indices else "all"


def _table(plan: MemoryPlan) -> Iterator[str]:
    yield f"{'memory':<24}{'':>10}  most {plan.peak}"
    for part in plan.parts:
        is_there = plan.peak in part.when
        note = part.note if is_there else "at another moment, and less"
        size = gb(part.num_bytes) if is_there else f"({gb(part.num_bytes)})"
        yield f"  {part.name:<22}{size:>10}  {note}".rstrip()
    yield f"  {'CUDA context':<22}{gb(CUDA_CONTEXT_BYTES):>10}"
    yield f"  {'gaps of the allocator':<22}{gb(plan.slack_bytes):>10}"
    yield f"  {'in all':<22}{gb(plan.needed_bytes):>10}"


def _verdict(model: ModelShape, config: TrainConfig, plan: MemoryPlan, card: Card | None) -> Iterator[str]:
    if card is None:
        yield f"card         none here to compare with: a GPU would need {gb(plan.needed_bytes)} free"
        return
    share = "" if card.inference_share is None else f", {card.inference_share:.0%} of it for inference"
    yield f"card         {card.name}: {gb(card.total_bytes)}{share}; {gb(card.free_bytes)} for the trainer"
    spare = available_bytes(card, config) - plan.needed_bytes
    if spare >= 0:
        yield f"fits         {gb(spare)} to spare"
        return
    yield f"too large    by {gb(-spare)}; what helps, the cheapest first:"
    what = advice(model, config, card)
    for suggestion in what.each:
        yield f"  {suggestion.text:<60} frees {gb(suggestion.frees_bytes)}"
    yield f"enough       {what.together.text}" if what.together else "enough       nothing of this: take a larger card"
