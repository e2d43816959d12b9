"""Mode `lora_only`: the base model never changes; every step a new adapter is written and loaded by the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from grpo_engine.bridges.placement.adapter import AdaptedModel
from grpo_engine.bridges.protocol import Bridge, BridgeContext
from grpo_engine.bridges.transport.adapter import AdapterBridge
from grpo_engine.config import Config
from grpo_engine.flags import Flag


class LoraOnly(Config):
    """An adapter on a frozen model, loaded by the server over HTTP."""

    after_server_restart: ClassVar[str] = (
        "the trainer loads its latest adapter into the new server before its next step"
    )
    """What happens then; shown to users who restart a server."""
    trains_adapter: ClassVar[bool] = True
    """Whether an adapter on a frozen model is trained instead of the model."""
    shares_memory: ClassVar[bool] = False
    """Whether trainer and server map the same weights."""
    mode: Annotated[Literal["lora_only"], Flag(("--weight-bridge-mode",))] = "lora_only"
    """How new weights reach inference."""
    adapter_folder: Annotated[Path | None, Flag(("--adapter-folder",))] = None
    """Where adapters are written for the server, which must see that folder; default: shared memory (/dev/shm) where it
    has room, else the run folder."""

    def build(self, context: BridgeContext) -> Bridge:
        """Pair placement and transport."""
        return AdapterBridge(context, AdaptedModel(context), folder=self.adapter_folder)
