"""Mode `lora_restart`: an adapter is trained and served merged into the model, as checkpoints loaded every few steps.

The server runs at the base model's speed, without adapter kernels. The trainer computes with the adapter unmerged, so
both differ by the rounding of the sum.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from grpo_engine.bridges.placement.adapter import AdaptedModel
from grpo_engine.bridges.protocol import Bridge, BridgeContext
from grpo_engine.bridges.transport.checkpoint import CheckpointBridge, CheckpointSettings
from grpo_engine.flags import Flag


class LoraRestart(CheckpointSettings):
    """An adapter on a frozen model, merged into checkpoints that the server reads every few steps."""

    after_server_restart: ClassVar[str] = "the new server loads the newest checkpoint"
    """What happens then; shown to users who restart a server."""
    trains_adapter: ClassVar[bool] = True
    """Whether an adapter on a frozen model is trained instead of the model."""
    shares_memory: ClassVar[bool] = False
    """Whether trainer and server map the same weights."""
    mode: Annotated[Literal["lora_restart"], Flag(("--weight-bridge-mode",))] = "lora_restart"
    """How new weights reach inference."""

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport."""
        return CheckpointBridge(self, context, AdaptedModel(context))
