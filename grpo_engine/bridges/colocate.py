"""Mode `colocate`: an inference engine in every process of the trainer, on the same devices, which take turns.

There is no inference server, and no environment beside it: the trainer takes problems of a task, samples, scores and
trains. While it computes a step, the engines sleep and their memory is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field

from grpo_engine.bridges.engine import InProcessEngine
from grpo_engine.bridges.placement.adapter import AdaptedModel
from grpo_engine.bridges.placement.own import OwnModel
from grpo_engine.bridges.placement.sharded import ShardedModel
from grpo_engine.bridges.placement.sharded_adapter import ShardedAdaptedModel
from grpo_engine.bridges.protocol import Bridge, BridgeContext, Mode, Placement
from grpo_engine.bridges.transport.in_process import EngineOfRanks, InProcessBridge
from grpo_engine.errors import ConfigError
from grpo_engine.flags import Flag

if TYPE_CHECKING:
    from grpo_engine.ranks.group import RankGroup


class Colocate(Mode):
    """Weights written into an engine of the same process."""

    after_server_restart: ClassVar[str] = "there is no inference server: the trainer samples itself"
    if_not_served: ClassVar[tuple[str, str]] = (
        "the engine computes with a copy of the weights that it was given (repacked or compiled-in weights)",
        "leave quantization out",
    )
    trains_over_ranks: ClassVar[bool] = True
    takes_turns: ClassVar[bool] = True
    samples_in_process: ClassVar[bool] = True
    mode: Annotated[Literal["colocate"], Flag(("--weight-bridge-mode",))] = "colocate"
    """How new weights reach inference."""
    sync_frequency: Annotated[int, Flag(("--sync-frequency",))] = Field(1, ge=1)
    """Steps between two weight updates of the engines; above 1, completions are sampled from older weights between
    them, and engines keep theirs in main memory during a step."""
    adapter: Annotated[bool, Flag(("--train-adapter",))] = False
    """Train an adapter on a frozen model (`lora_r` …) instead of the model; it is merged into the engines' weights."""

    @property
    def trains_adapter(self) -> bool:
        """If that is asked for."""
        return self.adapter

    @property
    def steps_between_updates(self) -> int:
        """See `Mode`."""
        return self.sync_frequency

    def updating_at_once(self) -> Self:
        """See `Mode`."""
        return self.model_copy(update={"sync_frequency": 1})

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport.

        Raises:
            ConfigError: the command has no engine.
        """
        if context.engine is None or context.ranks is None:
            raise ConfigError(
                "bridge mode colocate samples in the trainer, and this command does not: use grpo-engine train, with a "
                "--task"
            )
        placement = self.rank_placement(context) if context.has_ranks else self._own_placement(context)
        engines = self.engines(context.engine, placement, context.ranks)
        return InProcessBridge(placement, engines, every_steps=self.sync_frequency)

    def rank_placement(self, context: BridgeContext) -> ShardedModel | ShardedAdaptedModel:
        """The model over several ranks, on one of them."""
        return ShardedAdaptedModel(context) if self.adapter else ShardedModel(context)

    def engines(self, engine: InProcessEngine, placement: Placement, ranks: RankGroup) -> EngineOfRanks:
        """The engine of this rank, with weights from the placement that `build` or `rank_placement` made."""
        assert isinstance(placement, OwnModel | ShardedModel | AdaptedModel)
        stream = placement.stream_merged if isinstance(placement, AdaptedModel) else placement.stream
        return EngineOfRanks(engine, stream, ranks, is_partial=self.adapter)

    def _own_placement(self, context: BridgeContext) -> OwnModel | AdaptedModel:
        return AdaptedModel(context) if self.adapter else OwnModel(context)
