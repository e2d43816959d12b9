"""Mode `none`: the trainer's own model, sent as checkpoints that the server loads every few steps.

Works with any server that can read the trainer's disk, at the price of a whole checkpoint per weight update. Between
two updates the server samples from an older version, which every answer states.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from grpo_engine.bridges.placement.own import OwnModel
from grpo_engine.bridges.protocol import Bridge, BridgeContext
from grpo_engine.bridges.transport.checkpoint import CheckpointBridge, CheckpointSettings
from grpo_engine.flags import Flag


class CheckpointReload(CheckpointSettings):
    """Checkpoints that the server reads every few steps."""

    after_server_restart: ClassVar[str] = "the new server loads the newest checkpoint"
    """What happens then; shown to users who restart a server."""
    trains_adapter: ClassVar[bool] = False
    """Whether an adapter on a frozen model is trained instead of the model."""
    shares_memory: ClassVar[bool] = False
    """Whether trainer and server map the same weights."""
    mode: Annotated[Literal["none"], Flag(("--weight-bridge-mode",))] = "none"
    """How new weights reach inference."""

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport."""
        return CheckpointBridge(self, context, OwnModel(context))
