"""Whether sampling fits on a GPU on which sampling and training take turns (bridge modes colocate and turns).

In both phases there are the trainer's weights, masters, gradients and optimizer. While it samples, the engine has its
share of the card beside them; while it trains, the engine sleeps and the step has the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.plan import (
    CUDA_CONTEXT_BYTES,
    SLEEPING_ENGINE,
    Card,
    MemoryPlan,
    ModelShape,
)

BESIDE_WEIGHTS_BYTES = 2_500_000_000
"""What vLLM takes of its share for activations and CUDA graphs: as measured with 8B models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPhase:
    """The memory of a card while its engine samples."""

    trainer_bytes: int
    """That last over the phase."""
    share: float
    """Of the card, which the engine may use."""
    weight_bytes: int
    """Of the engine's own weights."""
    token_bytes: int
    """A token in its cache."""

    def engine_bytes(self, card: Card) -> int:
        """The engine's share."""
        return int(self.share * card.total_bytes)

    def spare_bytes(self, card: Card) -> int:
        """What is left of the card; below 0, what is missing."""
        return card.free_bytes - self.trainer_bytes - self.engine_bytes(card)

    def cache_tokens(self, card: Card) -> int:
        """Tokens that fit in the cache."""
        room = self.engine_bytes(card) - self.weight_bytes - BESIDE_WEIGHTS_BYTES
        return max(0, room // self.token_bytes)

    def fits(self, card: Card, longest: int) -> bool:
        """Whether there is room for both, with a cache for the longest sequence."""
        return self.spare_bytes(card) >= 0 and self.cache_tokens(card) >= longest


def sampling_phase(model: ModelShape, config: TrainConfig, plan: MemoryPlan) -> SamplingPhase | None:
    """The phase in which completions are sampled; None where that is not a phase of its own on the trainer's GPU."""
    if not config.bridge.takes_turns:
        return None
    asleep = sum(part.num_bytes for part in plan.parts if part.name == SLEEPING_ENGINE)
    return SamplingPhase(
        trainer_bytes=plan.lasting_bytes - asleep + CUDA_CONTEXT_BYTES,
        share=config.gpu_memory_utilization,
        weight_bytes=sum(parameter.num_bytes for parameter in model.parameters),
        token_bytes=2 * model.num_layers * model.num_kv_heads * model.head_dim * model.bytes_each,
    )
