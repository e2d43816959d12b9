"""`--dry-run`: what would be trained and the memory it takes, from the model's configuration alone.

Loads no weights and opens no connection: the model is built on the meta device. The same plan is logged at every start
on a GPU.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import init_empty_weights

from grpo_engine.errors import ModelError
from grpo_engine.flags import to_flags
from grpo_engine.models.auto import AutoModelForCausalLM
from grpo_engine.models.config import parse_layer_indices
from grpo_engine.models.devices import require_device, trainable_device
from grpo_engine.models.layers import require_layers, require_targets
from grpo_engine.models.loading import fitting_length, load_config, torch_dtype
from grpo_engine.models.local import RANDOM_MODEL_BYTES
from grpo_engine.models.random_models import published_shape
from grpo_engine.train.checkpointing.staging import free_memory
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.advice import Advice, advice
from grpo_engine.train.memory.checkpoint_copy import checkpoint_copy_bytes
from grpo_engine.train.memory.plan import (
    CUDA_CONTEXT_BYTES,
    Card,
    MemoryPlan,
    ModelShape,
    ParameterShape,
    available_bytes,
    memory_plan,
)
from grpo_engine.train.memory.sampling import SamplingPhase, sampling_phase
from grpo_engine.train.unused_settings import settings_without_effect

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

log = logging.getLogger(__name__)

SURE_SHARE = 0.95
"""Of the free memory: a step that is planned to take less fits; the greatest that was seen above its plan was 1 %."""
_BYTES_OF_A_NAMED_GB = 0.985 * 2**30
"""Of an H100 of 80 GB CUDA has 0.990 × 80 × 2³⁰ bytes, of an H200 of 141 GB 0.996."""


def dry_run(config: TrainConfig) -> int:
    """Print the report on stdout; the exit code is 0 where it fits.

    Raises:
        ModelError: as `report`.
    """
    if config.card_gb is not None:
        card = card_of_size(config, config.card_gb)
        text, fits = report(config, *[card] * (config.processes or 1))
        sys.stdout.write(text)
        return 0 if fits else 1
    configs = [config.model_copy(update={"device": device}) for device in rank_devices(config)]
    for each in configs if torch.cuda.is_available() else ():
        require_device(trainable_device(each.device))
    text, fits = report(config, *(card_before_inference(each) for each in configs))
    sys.stdout.write(text)
    return 0 if fits else 1


def rank_devices(config: TrainConfig) -> list[str]:
    """The device of each rank of this machine: the visible GPUs in their order, or the CPU."""
    device, num_ranks = trainable_device(config.device), config.processes or 1
    if num_ranks == 1 or not device.startswith("cuda"):
        return [device] * num_ranks
    return [f"cuda:{number}" for number in range(num_ranks)]


def report(config: TrainConfig, *cards: Card | None) -> tuple[str, bool]:
    """What would be trained and the memory it takes, and whether that fits on every card; True without a card.

    Args:
        cards: of each rank of this machine, None for a CPU.

    Raises:
        ModelError: the model's configuration cannot be read, or its model lacks layers or modules to be trained.
    """
    name = config.model_name
    # A model with random weights is generated when first loaded: 8B takes minutes and 16 GB of disk.
    pretrained = published_shape(name) if name in RANDOM_MODEL_BYTES else load_config(name)
    config = config.model_copy(update={"seq_len": fitting_length(pretrained, config.seq_len, "seq_len")})
    model = model_shape(pretrained, config)
    plan = memory_plan(model, config)
    card = min((each for each in cards if each is not None), key=lambda each: each.free_bytes, default=None)
    sampling = sampling_phase(model, config, plan)
    fits = card is None or plan.needed_bytes <= available_bytes(card, config)
    if card is not None and sampling is not None:
        fits = fits and sampling.fits(card, config.seq_len)
    lines = [*_training(model, config, plan), "", *_table(plan), ""]
    lines += [*_ranks(config, plan, cards), *_verdict(model, config, plan, card)]
    lines += _checkpoints(model, config)
    lines += [] if sampling is None else _sampling(sampling, config, card)
    return "\n".join(lines) + "\n", fits


def log_plan(config: TrainConfig) -> bool:
    """Log the memory plan before the model is loaded; a warning with advice where it does not fit. Only on a GPU.

    Returns:
        Whether a step is sure to fit.
    """
    card = card_now(config)
    if card is None:
        return False
    try:
        model = model_shape(load_config(config.model_name), config)
    except ModelError as error:
        log.warning("no memory plan: %s", error)
        return False
    plan = memory_plan(model, config)
    line = f"memory: {one_line(plan)}; {card.name} has {gb(card.free_bytes)} free"
    if plan.needed_bytes <= card.free_bytes:
        log.info("%s", line)
    else:
        log.warning("%s: it does not fit. %s", line, advice_text(advice(model, config, card)))
    return plan.needed_bytes <= SURE_SHARE * card.free_bytes


def model_shape(pretrained: PreTrainedConfig, config: TrainConfig) -> ModelShape:
    """The shapes of a model, from its configuration.

    Raises:
        ModelError: it lacks layers that are to be trained, or is not a decoder with attention.
    """
    try:
        with init_empty_weights(include_buffers=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # initialising meta tensors is a no-op, as intended
            model = AutoModelForCausalLM.from_config(pretrained)
        model.tie_weights()
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"{type(pretrained).__name__}: shapes cannot be computed without its weights: {error}"
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
        raise ModelError(f"{type(pretrained).__name__} is not a supported decoder configuration: {error}") from None
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
    free += torch.cuda.memory_reserved(device) + CUDA_CONTEXT_BYTES  # the call created it
    return Card(
        name=torch.cuda.get_device_name(device),
        total_bytes=total,
        free_bytes=free_in_a_step(config, free_bytes=free, total_bytes=total),
        inference_share=config.gpu_memory_utilization if _shares_card(config) else None,
    )


def free_in_a_step(config: TrainConfig, *, free_bytes: int, total_bytes: int) -> int:
    """What is free while a step is computed: a server that takes turns with the trainer sleeps then, and may be awake
    now."""
    if not config.bridge.takes_turns or config.bridge.samples_in_process:
        return free_bytes
    return min(free_bytes + int(config.gpu_memory_utilization * total_bytes), total_bytes)


def card_before_inference(config: TrainConfig) -> Card | None:
    """`card_now`, less the share of an inference server that is not running yet."""
    card = card_now(config)
    if card is None or card.inference_share is None:
        return card
    return replace(card, free_bytes=min(card.free_bytes, int((1 - card.inference_share) * card.total_bytes)))


def card_of_size(config: TrainConfig, size_gb: float) -> Card:
    """A GPU with so many GB by its name, with inference's share of it taken."""
    total = int(size_gb * _BYTES_OF_A_NAMED_GB)
    share = config.gpu_memory_utilization if _shares_card(config) else None
    free = total if share is None else int((1 - share) * total)
    return Card(name=f"a GPU of {size_gb:g} GB", total_bytes=total, free_bytes=free, inference_share=share)


def _shares_card(config: TrainConfig) -> bool:
    """Whether inference is on the trainer's card: weights are shared, or its share of the card was set."""
    if config.bridge.takes_turns:
        return False
    return config.bridge.shares_memory or "gpu_memory_utilization" in config.model_fields_set


def one_line(plan: MemoryPlan) -> str:
    """The plan in a line, the largest parts first."""
    parts = sorted((p for p in plan.parts if plan.peak in p.when), key=lambda part: -part.num_bytes)
    named = ", ".join(f"{part.name} {gb(part.num_bytes)}" for part in parts if part.num_bytes)
    return f"{gb(plan.needed_bytes)} at the peak ({named})"


def advice_text(what: Advice) -> str:
    """The advice as one or two sentences."""
    each = "; ".join(f"{s.text} (frees {gb(s.frees_bytes)})" for s in what.each)
    if what.together is None:
        return f"No setting makes it fit on this card; these free memory: {each}" if each else "Use a larger card"
    return f"It should fit with {what.together.text}. What frees memory, the cheapest first: {each}"


def gb(num_bytes: float) -> str:
    """In GB of 10⁹ bytes, as in the metrics; below 0.1 GB in MB."""
    return f"{num_bytes / 1e9:.1f} GB" if abs(num_bytes) >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _training(model: ModelShape, config: TrainConfig, plan: MemoryPlan) -> Iterator[str]:
    yield f"model        {config.model_name}: {model.num_layers} layers, {model.num_parameters:,} parameters"
    yield f"trained      {plan.num_trained:,} parameters: {_what(config)}"
    tokens = f"{plan.rows} x {plan.row_tokens} tokens at the longest"
    yield f"micro-batch  {tokens}; {config.sequences_per_batch} sequences a step"
    yield f"settings     {' '.join(to_flags(config.model_copy(update={'dry_run': False, 'card_gb': None})))}"
    for sentence in settings_without_effect(config):
        yield f"no effect    {sentence}"


def _what(config: TrainConfig) -> str:
    if config.bridge.trains_adapter:
        layers = f" of layers {config.lora_layer_indices}" if config.lora_layer_indices else ""
        return f"adapters of rank {config.lora_r} on {', '.join(config.lora_target_modules)}{layers}"
    return f"layers {config.train_layer_indices}" if config.train_layer_indices else "all"


def _table(plan: MemoryPlan) -> Iterator[str]:
    yield f"{'memory':<24}{'':>10}  most {plan.peak}"
    for part in plan.parts:
        is_there = plan.peak in part.when
        note = part.note if is_there else "not at the peak"
        size = gb(part.num_bytes) if is_there else f"({gb(part.num_bytes)})"
        yield f"  {part.name:<22}{size:>10}  {note}".rstrip()
    yield f"  {'CUDA context':<22}{gb(CUDA_CONTEXT_BYTES):>10}"
    yield f"  {'gaps of the allocator':<22}{gb(plan.slack_bytes):>10}"
    yield f"  {'in all':<22}{gb(plan.needed_bytes):>10}"


def _ranks(config: TrainConfig, plan: MemoryPlan, cards: Sequence[Card | None]) -> Iterator[str]:
    """Each rank of this machine with its GPU; the card below is the one with the least room."""
    if config.num_ranks == 1:
        return
    yield f"ranks        {config.num_ranks}, each needs {gb(plan.needed_bytes)} on a GPU"
    first = config.node_rank * (config.processes or 1)
    for number, (device, card) in enumerate(zip(rank_devices(config), cards, strict=True)):
        room = "" if card is None else f": {card.name}, {gb(card.free_bytes)} for it"
        yield f"  rank {first + number:<6}{device}{room}"


def _verdict(model: ModelShape, config: TrainConfig, plan: MemoryPlan, card: Card | None) -> Iterator[str]:
    if card is None:
        yield f"card         none on this machine; a GPU needs {gb(plan.needed_bytes)} free"
        return
    share = "" if card.inference_share is None else f", {card.inference_share:.0%} of it for inference"
    yield f"card         {card.name}: {gb(card.total_bytes)}{share}; {gb(card.free_bytes)} for the trainer"
    spare = available_bytes(card, config) - plan.needed_bytes
    if spare >= 0:
        yield f"fits         {gb(spare)} to spare"
        return
    yield f"too large    by {gb(-spare)}; these free memory, the cheapest first:"
    what = advice(model, config, card)
    for suggestion in what.each:
        yield f"  {suggestion.text:<60} frees {gb(suggestion.frees_bytes)}"
    yield f"enough       {what.together.text}" if what.together else "enough       no combination: use a larger card"


def _checkpoints(model: ModelShape, config: TrainConfig) -> Iterator[str]:
    """What copies of the state take, where they are written while training goes on."""
    if num_bytes := checkpoint_copy_bytes(model, config):
        here = "" if config.card_gb is not None else f"; {gb(free_memory())} are free here"
        otherwise = ", if there is so much: else training waits for them" * (config.checkpoint_async_mode == "auto")
        yield f"checkpoints  copied to {gb(num_bytes)} of main memory and written meanwhile{otherwise}{here}"


def _sampling(phase: SamplingPhase, config: TrainConfig, card: Card | None) -> Iterator[str]:
    """The other phase of a trainer that samples itself: whether its engine has room beside what lasts."""
    lasting = f"{gb(phase.trainer_bytes)} of the trainer last, and the step's memory is free"
    if card is None:
        yield f"sampling     {lasting}; the engine has {phase.share:.0%} of the card"
        return
    tokens = phase.cache_tokens(card)
    yield (
        f"sampling     {lasting}; the engine has {phase.share:.0%} of the card, {gb(phase.engine_bytes(card))}: "
        f"{gb(phase.weight_bytes)} weights, a cache of {tokens:,} tokens"
    )
    if phase.spare_bytes(card) < 0:
        yield f"too large    by {gb(-phase.spare_bytes(card))} while it samples: lower --gpu-memory-utilization"
    elif tokens < config.seq_len:
        yield f"too small    the cache has no room for {config.seq_len} tokens: raise --gpu-memory-utilization"
    else:
        yield f"fits         {gb(phase.spare_bytes(card))} to spare while it samples"
