"""The GPU memory of a reference service, from the model's shape and the settings alone.

Weights, and what a forward pass without gradient has of one layer at a time: bytes a token, with h hidden, i
intermediate and d bytes an element, the residual stream and the normed input (2 d h), and gate, up and their product in
the MLP (3 d i); or the two fp32 copies of a norm (8 h) where those are more. Afterwards there are the last hidden
states, before and after the final norm (2 d h), and a tile of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_engine.algo.head import TILES
from grpo_engine.models.loading import load_config
from grpo_engine.models.local import RANDOM_MODEL_BYTES
from grpo_engine.models.random_models import published_shape
from grpo_engine.reference.config import ReferenceConfig
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.dry_run import card_now, card_of_size, gb, model_shape
from grpo_engine.train.memory.plan import CUDA_CONTEXT_BYTES, SLACK, ModelShape

_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePlan:
    """What a reference service takes of its GPU."""

    weight_bytes: int
    layer_bytes: int
    """Of the largest micro-batch in one layer."""
    output_bytes: int
    """Of its last hidden states, and a tile of logits."""

    @property
    def needed_bytes(self) -> int:
        """At the peak, as the card counts it."""
        comes_and_goes = max(self.layer_bytes, self.output_bytes)
        return self.weight_bytes + int((1 + SLACK) * comes_and_goes) + CUDA_CONTEXT_BYTES


def reference_plan(model: ModelShape, config: ReferenceConfig) -> ReferencePlan:
    """The memory of these settings."""
    h, i, d, tokens = model.hidden_size, model.intermediate_size, model.bytes_each, config.tokens_at_once
    most_tokens, fewest_words = TILES["cuda"]
    of_tile = min(tokens, most_tokens)
    words = min(most_tokens * fewest_words // of_tile, model.vocab_size)
    return ReferencePlan(
        weight_bytes=sum(parameter.num_bytes for parameter in model.parameters),
        layer_bytes=tokens * (2 * d * h + max(3 * d * i, 2 * _FP32 * h)),
        output_bytes=2 * tokens * d * h + of_tile * words * (_FP32 + d),
    )


def report(config: ReferenceConfig) -> tuple[str, bool]:
    """The plan as text, and whether it fits on the GPU; True without one.

    Raises:
        ModelError: the model's configuration cannot be read.
    """
    name = config.model_name
    as_trained = TrainConfig(model_name=name, dtype=config.dtype, device=config.device)
    pretrained = published_shape(name) if name in RANDOM_MODEL_BYTES else load_config(name)
    model = model_shape(pretrained, as_trained)
    plan = reference_plan(model, config)
    card = card_now(as_trained) if config.card_gb is None else card_of_size(as_trained, config.card_gb)
    lines = [
        f"model        {name}: {model.num_layers} layers, {model.num_parameters:,} parameters, frozen",
        f"micro-batch  {config.tokens_at_once:,} tokens at the longest; rows of up to {config.max_model_len:,}",
        "",
        "memory",
        f"  {'weights':<22}{gb(plan.weight_bytes):>10}",
        f"  {'one layer':<22}{gb(plan.layer_bytes):>10}",
        f"  {'output layer':<22}{gb(plan.output_bytes):>10}  not at the same time as a layer",
        f"  {'CUDA context':<22}{gb(CUDA_CONTEXT_BYTES):>10}",
        f"  {'in all':<22}{gb(plan.needed_bytes):>10}",
        "",
    ]
    if card is None:
        lines.append(f"card         none on this machine; a GPU needs {gb(plan.needed_bytes)} free")
        return "\n".join(lines) + "\n", True
    spare = card.free_bytes - plan.needed_bytes
    lines.append(f"card         {card.name}: {gb(card.total_bytes)}; {gb(card.free_bytes)} free")
    if spare >= 0:
        lines.append(f"fits         {gb(spare)} to spare")
    else:
        least = reference_plan(model, config.model_copy(update={"micro_batch_tokens": config.max_model_len}))
        advice = "lower --micro-batch-tokens" if least.needed_bytes <= card.free_bytes else "use a larger card"
        lines.append(f"too large    by {gb(-spare)}: {advice}, or leave the reference to the trainer")
    return "\n".join(lines) + "\n", spare >= 0
