"""Mode `lora_restart`: an adapter is trained and served merged into the model, as checkpoints loaded every few steps.

The server runs at the base model's speed, without adapter kernels. The trainer computes with the adapter unmerged, so
both differ by the rounding of the sum.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from grpo_engine.bridges.placement.adapter import AdaptedModel
from grpo_engine.bridges.placement.sharded_adapter import ShardedAdaptedModel
from grpo_engine.bridges.protocol import Bridge, BridgeContext
from grpo_engine.bridges.transport.checkpoint import CheckpointBridge, CheckpointSettings
from grpo_engine.flags import Flag


class LoraRestart(CheckpointSettings):
    """An adapter on a frozen model, merged into checkpoints that the server reads every few steps."""

    after_server_restart: ClassVar[str] = "the new server loads the newest checkpoint"
    if_not_served: ClassVar[tuple[str, str]] = (
        "the server acknowledged the reload and kept its old weights",
        "look at the server's log; restart it",
    )
    trains_over_ranks: ClassVar[bool] = True
    mode: Annotated[Literal["lora_restart"], Flag(("--weight-bridge-mode",))] = "lora_restart"
    """How new weights reach inference."""

    @property
    def trains_adapter(self) -> bool:
        """Always."""
        return True

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport."""
        placement = self.rank_placement(context) if context.has_ranks else AdaptedModel(context)
        return CheckpointBridge(self, context, placement)

    def rank_placement(self, context: BridgeContext) -> ShardedAdaptedModel:
        """The model over several ranks, on one of them."""
        return ShardedAdaptedModel(context)
