"""Settings that reduce the memory of a step that does not fit, the cheapest first. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_engine.bridges import Colocate, LoraOnly
from grpo_engine.train.config import LEAST_SEQ_LEN, TrainConfig
from grpo_engine.train.memory.plan import BF16, Card, ModelShape, available_bytes, memory_plan, part_of_model

LEAST_GAIN = 0.01
"""Share of the needed memory below which a suggestion is left out."""

Changes = Mapping[str, Any]
"""New values of settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Settings that reduce the memory of a step."""

    text: str
    """As flags, where they are the trainer's."""
    frees_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """How to make a step fit, the cheapest first."""

    each: tuple[Suggestion, ...]
    """Every suggestion, alone."""
    together: Suggestion | None
    """A minimal set that makes it fit; None where there is none."""


def advice(model: ModelShape, config: TrainConfig, card: Card) -> Advice:
    """How to make a step with these settings fit on the card."""

    def spare(*changes: Changes) -> int:
        changed = config.model_copy(update=_merged(changes))
        return available_bytes(card, changed) - memory_plan(model, changed).needed_bytes

    def suggestion(*changes: Changes) -> Suggestion:
        return Suggestion(text=_in_words(config, _merged(changes)), frees_bytes=spare(*changes) - spare())

    knobs = [levels for levels in _knobs(model, config, card) if levels]
    least_bytes = LEAST_GAIN * memory_plan(model, config).needed_bytes
    # Each alone, then one after the other until it fits: at the weakest level that suffices, else at the strongest.
    each = [suggestion(next((level for level in levels if spare(level) >= 0), levels[-1])) for levels in knobs]
    chosen: list[Changes] = []
    for levels in knobs:
        if spare(*chosen) < 0:
            chosen.append(next((level for level in levels if spare(*chosen, level) >= 0), levels[-1]))
    fits = spare(*chosen) >= 0
    for changes in reversed(chosen):  # later ones may have made these unnecessary
        others = [other for other in chosen if other is not changes]
        if spare(*others) >= 0:
            chosen = others
    return Advice(
        each=tuple(one for one in each if one.frees_bytes >= least_bytes),
        together=suggestion(*chosen) if fits else None,
    )


def _knobs(model: ModelShape, config: TrainConfig, card: Card) -> Iterator[list[Changes]]:
    """What can be changed, the cheapest first; each with its levels, the weakest first."""
    if not config.gradient_checkpointing:
        yield [{"gradient_checkpointing": True}]
    yield list(_smaller_micro_batches(config))
    # Noise of 1/500 of a gradient hurts less than noise of an update's size, or larger, in a weight.
    if config.gradient_dtype == "float32" and model.bytes_each == BF16:
        yield [{"gradient_dtype": "bfloat16"}]
    if config.master_weights == "float32" and model.bytes_each == BF16:
        yield [{"master_weights": "stochastic_rounding"}]
    match config.optimizer:
        case "adamw":
            yield [{"optimizer": "adamw_8bit"}, {"optimizer": "adafactor"}]
        case "adamw_8bit":
            yield [{"optimizer": "adafactor"}]
    if card.inference_share is not None:
        yield list(_smaller_shares(model, config, card))
    if not config.bridge.trains_adapter and config.train_layer_indices is None:
        last = model.num_layers - 1
        quarters = (last + 1 - (last + 1) * part // 4 for part in (3, 2, 1))
        yield [{"train_layer_indices": f"{first}-{last}"} for first in quarters if first <= last]
        own = config.bridge
        with_adapter = own.model_copy(update={"adapter": True}) if isinstance(own, Colocate) else LoraOnly()
        yield [{"bridge": with_adapter, "train_layer_indices": None}]
    yield [{"seq_len": config.seq_len // part} for part in (2, 4) if config.seq_len // part >= LEAST_SEQ_LEN]


def _smaller_micro_batches(config: TrainConfig) -> Iterator[Changes]:
    """Fewer sequences at a time, as many a step."""
    if config.micro_batch_tokens is not None:
        tokens = config.micro_batch_tokens // 2
        while tokens >= config.seq_len:
            yield {"micro_batch_tokens": tokens}
            tokens //= 2
        return
    for size in range(config.batch_size // 2, 0, -1):
        if config.batch_size % size == 0:
            yield {"batch_size": size, "gradient_accumulation_steps": config.sequences_per_batch // size}


def _smaller_shares(model: ModelShape, config: TrainConfig, card: Card) -> Iterator[Changes]:
    """A smaller share for inference, down to its weights and the KV cache of four longest sequences."""
    if config.splits_model:
        model = part_of_model(model, config.num_ranks)
    keys_and_values = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.bytes_each
    least = model.num_parameters * model.bytes_each + 4 * config.max_model_len * keys_and_values + 2_000_000_000
    share = round(config.gpu_memory_utilization - 0.05, 2)
    while share * card.total_bytes > least:
        yield {"gpu_memory_utilization": share}
        share = round(share - 0.05, 2)


def _merged(changes: Iterable[Changes]) -> dict[str, Any]:
    return {name: value for some in changes for name, value in some.items()}


def _in_words(config: TrainConfig, changes: Changes) -> str:
    """Flags of the trainer; the inference server's share as text, since it is a setting of the server."""
    flags, others = [], []
    for name, value in changes.items():
        flag = f"--{name.replace('_', '-')}"
        match name, value:
            case "bridge", Colocate():
                flags.append("--train-adapter")
            case "bridge", LoraOnly():
                flags.append("--weight-bridge-mode lora_only")
            case _, None:
                continue
            case "gpu_memory_utilization", float():
                lower = config.gpu_memory_utilization - value
                others.append(f"gpu_memory_utilization of the inference server {lower:.2f} lower")
            case _, True:
                flags.append(flag)
            case _:
                flags.append(f"{flag} {value}")
    return ", ".join([" ".join(flags), *others] if flags else others)
