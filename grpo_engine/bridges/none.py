"""Mode `none`: the trainer's own model, sent as checkpoints that the server loads every few steps.

Works with any server that can read the trainer's disk, at the price of a whole checkpoint per weight update. Between
two updates the server samples from an older version, which every answer states.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from grpo_engine.bridges.placement.own import OwnModel
from grpo_engine.bridges.placement.sharded import ShardedModel
from grpo_engine.bridges.protocol import Bridge, BridgeContext
from grpo_engine.bridges.transport.checkpoint import CheckpointBridge, CheckpointSettings
from grpo_engine.flags import Flag


class CheckpointReload(CheckpointSettings):
    """Checkpoints that the server reads every few steps."""

    after_server_restart: ClassVar[str] = "the new server loads the newest checkpoint"
    if_not_served: ClassVar[tuple[str, str]] = (
        "the server acknowledged the reload and kept its old weights",
        "look at the server's log; restart it",
    )
    trains_over_ranks: ClassVar[bool] = True
    mode: Annotated[Literal["none"], Flag(("--weight-bridge-mode",))] = "none"
    """How new weights reach inference."""

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport."""
        placement = self.rank_placement(context) if context.has_ranks else OwnModel(context)
        return CheckpointBridge(self, context, placement)

    def rank_placement(self, context: BridgeContext) -> ShardedModel:
        """The model over several ranks, on one of them."""
        return ShardedModel(context)
